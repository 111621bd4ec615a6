"""What the kernels need to know of an activation, and the tiles that suit it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from iternorm import solvers
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.backends.triton.devices import lacking, tf32_allowed
from iternorm.whitening import groups

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The largest group whose iteration runs in one program: three matrices of 64x64 fit its registers, of 128x128 not.
LARGEST_NEWTON = 64
# The largest whose moments one program sums, and whose matrix it can apply. Wider ones are cut into blocks.
LARGEST_WHOLE = 128
BLOCK = 64
# Beyond this a row of a matrix does not fit a program's registers.
LARGEST_GROUP = 1024
# Triton decides when a kernel is defined whether it will be interpreted.
INTERPRETED: bool = knobs.runtime.interpret


class Shape(NamedTuple):
    """An activation as the kernels see it."""

    samples: int  # N L
    channels: int
    length: int  # L, the stride of a channel in contiguous memory
    rows: bool  # channels_last
    group_size: int
    padded: int  # see `padded_size`
    num_groups: int
    big: bool  # offsets past 2^31
    whole: bool  # every group fills its tile


class Tiles(NamedTuple):
    block: int  # samples a tile
    warps: int
    stages: int
    per_sm: int  # programs for each multiprocessor

    def smaller(self) -> "Tiles | None":
        """The next that ask for less shared memory, for a GPU that has less than an H200; None if there are none."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        # A tile is an operand of a matrix product, which takes sixteen at least.
        return self._replace(block=self.block // 2) if self.block > 16 else None


def unsupported(x: Tensor, group_size: int, solver: str = "newton") -> str | None:
    """Why the kernels cannot run on `x`, or None."""
    if x.dtype not in DTYPES:
        return f"they take float16, bfloat16 and float32, not {x.dtype}"
    largest = LARGEST_GROUP if solver == "newton" else LARGEST_NEWTON
    size = groups.effective_size(x.shape[1], group_size)
    if size > largest:
        return f"they take groups of up to {largest} channels for {solver!r}, not {group_size}"
    if not x.is_cuda and not INTERPRETED:
        return f"they need a CUDA tensor, not one on {x.device}"
    return lacking(x.device.index) if x.is_cuda else None


def by_cublas(x: Tensor, group_size: int) -> bool:
    """Whether the torch path, whose products are cuBLAS's, is faster: for large fp32 activations in wide groups.

    256x256x8x8 took 439 us in the kernels and 601 in torch, 64x1024x14x14 took 4027 and 2879, 128x256x56x56 7033 and
    2919; in bfloat16 that took 1711 and 5633 (H200, CUDA graph, TF32, forward and backward).
    """
    wide = groups.effective_size(x.shape[1], group_size) > LARGEST_WHOLE
    return wide and x.dtype == torch.float32 and x.numel() > 2**23


def dense(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or _is_rows(x) else x.contiguous()


def placed(x: Tensor, group_size: int) -> Tensor:
    """`x` as the kernels read it: `dense`, and channels_last for groups in blocks.

    Their programs read every sample many times over, and along rows that is faster by more than a copy takes.
    """
    x = dense(x)
    if groups.effective_size(x.shape[1], group_size) <= LARGEST_WHOLE or x.ndim == 2 or _is_rows(x):
        return x
    return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape)


def _is_rows(x: Tensor) -> bool:
    return torch_verbs.is_channels_last(x) or (x.ndim == 3 and x.transpose(1, 2).is_contiguous())


def padded_size(size: int) -> int:
    """The tile that holds a group: a power of two, and at least what a matrix product takes; or whole blocks."""
    if size > LARGEST_WHOLE:
        return -(-size // BLOCK) * BLOCK
    return max(16, 1 << (size - 1).bit_length())


class State(NamedTuple):
    """Where a forward pass keeps what its backward needs, in one fp32 buffer: offsets, in elements."""

    mean: int  # [C]
    variance: int  # [C]
    batches: int  # one int64: a copy of the counter of batches
    covariance: int  # [G, BD, BD], without eps
    whitening: int  # [G, d, d]
    iterates: (
        int  # [G, 2 T - 1, parts, BD, BD] of 16 bits, see `newton_parts`; of a group above 64 [2 T - 1, G, BD, BD]
    )
    size: int


def state_of(channels: int, group_size: int, num_iters: int, kept_parts: int) -> State:
    """The state of a forward pass whose iteration multiplies `kept_parts` (see `newton_parts`)."""
    size = groups.effective_size(channels, group_size)
    padded = padded_size(size)
    count = groups.num_groups(channels, group_size)
    kept = slots_of(num_iters) * padded**2
    if padded <= LARGEST_NEWTON and kept_parts:
        # Of two bytes each.
        kept = kept * kept_parts // 2
    offsets = [0]
    for length in (channels, channels, 2, count * padded**2, count * size**2, count * kept):
        # Every part begins at 16 bytes, as the kernels' loads expect.
        offsets.append(offsets[-1] + -(-length // 4) * 4)
    return State(*offsets)


def slots_of(num_iters: int) -> int:
    """How many matrices the backward wants: R_0..R_{T-1} and Z_1..Z_{T-1}; none where there is no product."""
    return 2 * num_iters - 1 if num_iters > 1 else 0


def views(state: Tensor, channels: int, group_size: int, num_iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``[C]``, covariance ``[G, BD, BD]`` and whitening ``[G, d, d]`` in a state buffer."""
    size = groups.effective_size(channels, group_size)
    count, padded = groups.num_groups(channels, group_size), padded_size(size)
    # Where the iterates end, which depends on their parts, does not matter here.
    at = state_of(channels, group_size, num_iters, 1)
    covariance = state[at.covariance : at.covariance + count * padded**2].view(count, padded, padded)
    whitening = state[at.whitening : at.whitening + count * size**2].view(count, size, size)
    return state[:channels], covariance, whitening


def shape_of(x: Tensor, group_size: int) -> Shape:
    channels = x.shape[1]
    samples = x.numel() // channels
    length = samples // x.shape[0] if x.shape[0] else 1
    size = groups.effective_size(channels, group_size)
    padded = padded_size(size)
    rows = length == 1 or not x.is_contiguous()
    # A tile past the last sample may still compute its offsets: keep a margin below 2^31.
    big = x.numel() >= 2**31 - 2**20 * channels
    whole = size == padded and channels % size == 0
    return Shape(samples, channels, length, rows, size, padded, groups.num_groups(channels, group_size), big, whole)


def parts(dtype: torch.dtype) -> int:
    """How many bfloat16 parts an operand is split into; 0 is a plain fp32 product, for the interpreter.

    fp32 input is computed to fp32's accuracy unless the user has allowed TF32 products: then to 2^-16, or in TF32 where
    the memory order allows it. float16 has three bits more than one bfloat16 holds.
    """
    if INTERPRETED:
        return 0
    if dtype == torch.bfloat16:
        return 1
    return 3 if dtype == torch.float32 and not tf32_allowed() else 2


def newton_parts(split: int, exact: bool, num_iters: int) -> int:
    """How the iteration multiplies: 1 or 2 float16 parts, 3 of bfloat16, or 0 for the interpreter, which knows fp32.

    Two parts have 22 bits, which is enough for seven steps: in simulation, for data of rank 8 in 64 channels, the
    output's error is 1.2e-6 at T=7 and 3.9e-6 at T=9. float16's range is enough for twelve, see `newton_range`.
    """
    if split == 0:
        return 0
    if exact or num_iters > (7 if split == 3 else 12):
        return 3
    return 2 if split == 3 else 1


def newton_range(num_iters: int) -> float:
    """What the largest entry of a gradient is scaled to before the iteration's backward: a power of two.

    A step multiplies the spectral norm by at most 27/8, and that of 64 rows is at most 64 times the largest entry. The
    result shall not reach 2^15.
    """
    return min(1.0, 2.0 ** math.floor(9 - (num_iters - 2) * math.log2(3.375)))


def split_of(state: Tensor, x: Tensor, group_size: int, num_iters: int, exact: bool) -> int:
    """The `parts` of the forward pass that left this state: the user may have set another precision since.

    Only fp32's depend on it, and where they keep their iterates in different ways, these are of different size.
    """
    split = parts(x.dtype)
    if x.dtype != torch.float32 or split == 0:
        return split
    sizes = {
        state_of(x.shape[1], group_size, num_iters, newton_parts(possible, exact, num_iters)).size: possible
        for possible in (2, 3)
    }
    return sizes[state.numel()] if len(sizes) == 2 else split


def jitter(split: int) -> float:
    """What ZCA's variances are raised by, relative to each: more than rounding makes of zero eigenvalues.

    A negative one would grow to infinity in the iteration's many steps. Two parts leave out the product of the lower
    ones, about 2^-20 of the variances; the other products are exact, and their sums in fp32.
    """
    return 2.0**-17 if split == 2 else 2.0**-20


def is_watched(num_iters: int) -> bool:
    """Whether the last of so many steps are watched: see `device/newton.py`."""
    return num_iters > solvers.UNWATCHED_STEPS


def precision(split: int, num_iters: int) -> str:
    """The products of the iteration of large groups, on fp32 matrices, for a number of `parts`.

    In many steps Z grows large where channels depend on each other, and TF32's rounding would spread from there (in
    simulation 3 to 100 % of the output at T=50 and 256 channels, in three products 0.4 %).
    """
    if split == 0:
        return "ieee"
    return "tf32x3" if split == 3 or is_watched(num_iters) else "tf32"


def block_of(kernel: str, shape: Shape) -> int:
    """The channels of a block, of groups that are cut into such."""
    return 2 * BLOCK if kernel == "cross_moments" and shape.padded % (2 * BLOCK) == 0 else BLOCK


def tiles_for(kernel: str, shape: Shape, split: int, relu: bool = False) -> Tiles:
    """The choices that benchmarks/tune_kernels.py found best over its shapes on an H200.

    With an activation (`relu`) the backward's kernels read a third tile.
    """
    backward = kernel in ("cross_moments", "apply_backward", "whiten_backward")
    few = shape.samples * shape.num_groups < 2048 * 64
    if relu and backward:
        tiles = tiles_for(kernel, shape, split)
        if split == 1 and shape.padded <= 64:
            # Of half the samples, to keep them in registers.
            if kernel == "cross_moments":
                return Tiles(64, 4, 3, 1 if shape.samples * shape.num_groups < 2048 * 128 else 2)
            return tiles._replace(block=64) if few else Tiles(64, 4, 2, 2)
        if shape.padded <= 64 and (few or (split == 2 and kernel == "cross_moments")):
            return tiles
        return tiles._replace(stages=max(1, tiles.stages - 1))
    if shape.padded > LARGEST_WHOLE:
        if kernel == "cross_moments":
            return Tiles(64, 8, 3, 1) if block_of(kernel, shape) == 128 else Tiles(64, 4, 3, 2)
        if kernel == "moments":
            return Tiles(128, 4, 3, 1)
        if kernel == "apply":
            return Tiles(128 if split == 1 else 64, 4, 3, 2)
        return Tiles(128, 4, 3, 1) if split == 1 else Tiles(64, 4, 2, 4)
    if shape.padded == LARGEST_WHOLE and split == 3 and kernel.startswith("apply"):
        return Tiles(64, 4, 3, 2)
    if shape.padded > 64:
        return Tiles(64 if split == 1 else 32, 8, 2, 1)
    if kernel == "whiten_backward":
        if split == 1:
            tiles = Tiles(128, 4, 3 if shape.rows else 4, 1)
        elif split == 2:
            tiles = Tiles(64, 4, 3, 1 if few else 2)
        elif shape.rows:
            tiles = Tiles(64, 4, 3, 1) if few else Tiles(128, 8, 3, 1)
        else:
            tiles = Tiles(64, 4, 3, 1) if few else Tiles(64, 4, 2, 2)
    elif split == 1:
        small = few and kernel in ("cross_moments", "whiten")
        tiles = Tiles(64 if small else 128, 4, 4, 1 if backward else 2)
    elif kernel in ("apply", "whiten"):
        tiles = Tiles(64, 4, 4, 2) if shape.rows or split == 3 else Tiles(128, 4, 3, 2)
    else:
        tiles = Tiles(64, 4, 3, 2)
    if kernel.endswith("moments") and shape.samples * shape.num_groups < 2048 * tiles.block:
        # Each program adds a partial matrix to be reduced: with few tiles for each, fewer programs are faster.
        tiles = tiles._replace(per_sm=1)
    return tiles


def programs(shape: Shape, tiles: Tiles, num_sms: int, others: int = 0, blocks: int = 1) -> tuple[int, int]:
    """How many programs share the samples of a block of a group, and the tiles each takes.

    There are so many `blocks`, and `others` need room too.
    """
    total = -(-shape.samples // tiles.block)
    wanted = max(1, num_sms * tiles.per_sm // (shape.num_groups * blocks) - others)
    per_program = -(-total // wanted)
    return -(-total // per_program), per_program
