"""What the kernels need to know of an activation, and the tiles that suit it."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from iternorm import groups, plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The largest group whose iteration runs in one program: three matrices of 64x64 fit its registers, of 128x128 not.
LARGEST_NEWTON = 64
LARGEST_GROUP = 128
# Triton decides when a kernel is defined whether it will be interpreted.
INTERPRETED: bool = knobs.runtime.interpret
# 2 and 8 warps were slower: 19.5 and 16.5 us against 10.4, forward at 64x64, T=5, TF32, on an H200.
NEWTON_WARPS = 4


class Shape(NamedTuple):
    """An activation as the kernels see it."""

    samples: int  # N L
    channels: int
    length: int  # L, the stride of a channel in contiguous memory
    rows: bool  # channels_last
    group_size: int
    padded: int  # the group size rounded up to a power of two, at least 16
    num_groups: int
    big: bool  # offsets past 2^31
    whole: bool  # every group fills its tile


class Tiles(NamedTuple):
    block: int  # samples a tile
    warps: int
    stages: int
    per_sm: int  # programs for each multiprocessor


def unsupported(x: Tensor, group_size: int, solver: str = "newton") -> str | None:
    """Why the kernels cannot run on `x`, or None."""
    if x.dtype not in DTYPES:
        return f"they take float16, bfloat16 and float32, not {x.dtype}"
    largest = LARGEST_GROUP if solver == "newton" else LARGEST_NEWTON
    if groups.effective_size(x.shape[1], group_size) > largest:
        return f"they take groups of up to {largest} channels for {solver!r}, not {group_size}"
    if not x.is_cuda and not INTERPRETED:
        return f"they need a CUDA tensor, not one on {x.device}"
    return None


def dense(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or _is_rows(x) else x.contiguous()


def _is_rows(x: Tensor) -> bool:
    return plain.is_channels_last(x) or (x.ndim == 3 and x.transpose(1, 2).is_contiguous())


def padded_size(size: int) -> int:
    """The tile that holds a group: a power of two, and at least what a matrix product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())


class State(NamedTuple):
    """Where a forward pass keeps what its backward needs, in one fp32 buffer: offsets, in elements."""

    mean: int  # [C]
    variance: int  # [C]
    finite: int  # one int32
    covariance: int  # [G, BD, BD], without eps
    whitening: int  # [G, d, d]
    iterates: int  # [G, 2 T - 1, BD, BD], of three bfloat16 parts or fp32; of a group above 64 [2 T - 1, G, BD, BD]
    size: int


def state_of(channels: int, group_size: int, num_iters: int, kept_parts: int = 1) -> State:
    """The state of a forward pass whose iteration multiplies `kept_parts` (see `newton_parts`)."""
    size = groups.effective_size(channels, group_size)
    padded = padded_size(size)
    count = groups.num_groups(channels, group_size)
    kept = slots_of(num_iters) * padded**2
    if padded <= LARGEST_NEWTON and kept_parts == 3:
        # Of two bytes each.
        kept += kept // 2
    offsets = [0]
    for length in (channels, channels, 1, count * padded**2, count * size**2, count * kept):
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
    at = state_of(channels, group_size, num_iters)
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

    fp32 input is computed to fp32's accuracy unless the user has allowed TF32 products: then to 2^-16, which is faster
    here than TF32. float16 has three bits more than one bfloat16 holds.
    """
    if INTERPRETED:
        return 0
    if dtype == torch.bfloat16:
        return 1
    return 3 if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else 2


def newton_parts(split: int, exact: bool) -> int:
    """How the iteration multiplies: 3 bfloat16 parts, 1 TF32, or 0 for the interpreter, which knows fp32."""
    if split == 0:
        return 0
    return 3 if exact or split == 3 else 1


def split_of(state: Tensor, x: Tensor, group_size: int, num_iters: int, exact: bool) -> int:
    """The `parts` of the forward pass that left this state: the user may have set another precision since.

    Only fp32's depend on it, and only they keep their iterates in one of two ways, of different size.
    """
    split = parts(x.dtype)
    whole, in_parts = (state_of(x.shape[1], group_size, num_iters, kept).size for kept in (1, 3))
    if x.dtype != torch.float32 or exact or split == 0 or whole == in_parts:
        return split
    return 3 if state.numel() == in_parts else 2


def jitter(split: int) -> float:
    """What ZCA's variances are raised by, relative to each: more than rounding makes of zero eigenvalues.

    A negative one would grow to infinity in the iteration's many steps. Two parts leave out the product of the lower
    ones, about 2^-20 of the variances; the other products are exact, and their sums in fp32.
    """
    return 2.0**-17 if split == 2 else 2.0**-20


def precision(split: int) -> str:
    """The products of the iteration, on fp32 matrices, for a number of `parts`."""
    return ("ieee", "tf32", "tf32", "tf32x3")[split]


def tiles_for(kernel: str, shape: Shape, split: int, relu: bool = False) -> Tiles:
    """The choices that benchmarks/tune_kernels.py found best over its shapes on an H200.

    With an activation (`relu`) the backward's kernels read a third tile: one stage less keeps it in shared memory, and
    tiles of half the samples keep bfloat16's in registers (seen in the compiler's report, not timed).
    """
    if relu and kernel in ("cross_moments", "apply_backward"):
        tiles = tiles_for(kernel, shape, split)
        block = min(tiles.block, 64) if split == 1 else tiles.block
        return tiles._replace(block=block, stages=max(1, tiles.stages - 1))
    if shape.padded > 64:
        return Tiles(64 if split == 1 else 32, 8, 2, 1)
    if split == 1:
        tiles = Tiles(128, 4, 4, 1 if kernel in ("cross_moments", "apply_backward") else 2)
    elif split == 3 and kernel == "apply_backward":
        tiles = Tiles(128, 8, 3, 1) if shape.rows else Tiles(64, 4, 2, 2)
    elif kernel == "apply":
        tiles = Tiles(64, 4, 4, 2) if shape.rows or split == 3 else Tiles(128, 4, 3, 2)
    else:
        tiles = Tiles(64, 4, 3, 2)
    if kernel.endswith("moments") and shape.samples * shape.num_groups < 2048 * tiles.block:
        # Each program adds a partial matrix to be reduced: with few tiles for each, fewer programs are faster.
        tiles = tiles._replace(per_sm=1)
    return tiles


def programs(shape: Shape, tiles: Tiles, num_sms: int) -> tuple[int, int]:
    """How many programs share the samples of a group, and the tiles each takes."""
    total = -(-shape.samples // tiles.block)
    wanted = max(1, num_sms * tiles.per_sm // shape.num_groups)
    per_program = -(-total // wanted)
    return -(-total // per_program), per_program


_num_sms: dict[torch.device, int] = {}


def num_sms(device: torch.device) -> int:
    count = _num_sms.get(device)
    if count is None:
        # The interpreter has no multiprocessors; a few programs show that their partials are joined.
        count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        _num_sms[device] = count
    return count
