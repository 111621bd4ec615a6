"""How an activation lies in memory as the kernels read it, and where a forward pass keeps what its backward needs."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.backends.triton.precision import Split, is_watched, newton_split, split_for
from iternorm.backends.triton.runtime import INTERPRETED, lacking
from iternorm.whitening import groups

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The largest group whose iteration runs in one program: three matrices of 64x64 fit its registers, of 128x128 not.
LARGEST_NEWTON = 64
# The largest group that is one tile of channels. Those above it are wide: they are computed in blocks of channels.
LARGEST_TILE = 128
# The channels of the smallest block.
BLOCK = 64
# The largest groups of which several share a tile.
LARGEST_SHARED = 8
# Beyond this a row of a matrix does not fit a program's registers.
LARGEST_GROUP = 1024
# The positions of a plane of contiguous memory from which on wide groups are read in place.
SHORTEST_PLANE = 64
# Of a multiple of so many positions, the compiler knows that each plane begins where a vector may be loaded.
ALIGNED = 16
# What CUDA allows of the grid's second dimension, which counts groups.
MOST_GROUPS = 65535


class Layout(NamedTuple):
    """An activation as the kernels see it."""

    samples: int  # N L
    channels: int
    length: int  # L, the stride of a channel in contiguous memory
    rows: bool  # channels_last
    group_size: int  # of all groups that share a tile, where they do
    padded: int  # see `padded_size`
    num_groups: int  # or tiles that groups share
    int64: bool  # offsets past 2^31
    even: bool  # every group fills its tile: no channel is masked
    shared: int = 0  # the channels of each group where several share a tile, see `shared_size`

    @property
    def wide(self) -> bool:
        """Whether groups are computed in blocks of channels."""
        return self.padded > LARGEST_TILE

    @property
    def matrix_size(self) -> int:
        """The elements of the padded matrices of all groups."""
        return self.num_groups * self.padded**2


def unsupported(x: Tensor, group_size: int, solver: str = "newton") -> str | None:
    """Why the kernels cannot run on `x`, or None."""
    if x.dtype not in DTYPES:
        return f"they take float16, bfloat16 and float32, not {x.dtype}"
    largest = LARGEST_GROUP if solver == "newton" else LARGEST_NEWTON
    size = groups.effective_size(x.shape[1], group_size)
    if size > largest:
        return f"they take groups of up to {largest} channels for {solver!r}, not {group_size}"
    if x.shape[1] > size * MOST_GROUPS:
        return f"they take up to {MOST_GROUPS} groups, not {-(-x.shape[1] // size)}"
    if not x.is_cuda and not INTERPRETED:
        return f"they need a CUDA tensor, not one on {x.device}"
    return lacking(x.device.index) if x.is_cuda else None


def dense(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or torch_verbs.is_rows(x) else x.contiguous()


def is_read_in_place(x: Tensor, group_size: int) -> bool:
    """Whether the kernels read `x` itself: it is dense, and where groups are wide, they read long pieces of it at once.

    The programs of a wide group read every sample many times over. Contiguous memory whose planes are short, or do not
    begin at a vector's boundary, is copied to channels_last: docs/decisions/wide-planes.md.
    """
    if torch_verbs.is_rows(x):
        return True
    wide = x.ndim > 2 and groups.effective_size(x.shape[1], group_size) > LARGEST_TILE
    length = math.prod(x.shape[2:])
    return x.is_contiguous() and (not wide or (length >= SHORTEST_PLANE and length % ALIGNED == 0))


def placed(x: Tensor, group_size: int) -> Tensor:
    """`x` as the kernels read it: itself, or a copy."""
    x = dense(x)
    if is_read_in_place(x, group_size):
        return x
    return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape)


def placed_without_data(x: Tensor, group_size: int) -> Tensor:
    """`placed` for its shape and stride alone: a copy has no memory."""
    if is_read_in_place(x, group_size):
        return x
    return placed(torch.empty_strided(x.shape, x.stride(), device="meta"), group_size)


def padded_size(size: int) -> int:
    """The tile that holds a group: a power of two, and at least what a matrix product takes; or full blocks."""
    if size > LARGEST_TILE:
        return -(-size // BLOCK) * BLOCK
    return max(16, 1 << (size - 1).bit_length())


def shared_size(channels: int, group_size: int, num_iters: int, exact: bool, ranks: int) -> int:
    """The size of groups of which several share a tile of up to 64 channels, 0 where each has its own.

    A tile of a few channels reads a few bytes of each sample in channels_last memory. Groups do not share one if they
    may stop at different steps (`device/newton.py`), for ZCA, whose many steps are faster in small tiles, and if ranks
    exchange their moments.
    """
    size = groups.effective_size(channels, group_size)
    apart = exact or ranks > 0 or is_watched(num_iters)
    return size if size <= LARGEST_SHARED and size < channels and not apart else 0


def tiled(channels: int, group_size: int, shared: int) -> tuple[int, int]:
    """The channels of a tile, and how many tiles there are: one for each group, or for as many as fit 64 channels."""
    size, count = groups.effective_size(channels, group_size), groups.num_groups(channels, group_size)
    if not shared:
        return size, count
    together = min(LARGEST_NEWTON // shared, count)
    return together * shared, -(-count // together)


class State(NamedTuple):
    """Where a forward pass keeps what its backward needs, in one fp32 buffer: offsets, in elements."""

    mean: int  # [C]
    variance: int  # [C]
    batches: int  # two int64: a copy of the counter of batches, and of a synchronized layer all ranks' samples
    covariance: int  # [G, BD, BD], without eps; G counts tiles where groups share them, as for the iterates
    whitening: int  # [G, d, d]
    # [G, 2 T - 1, parts, BD, BD] of 16 bits, see `NewtonSplit`; none of groups above 64 channels.
    iterates: int
    size: int
    even: bool  # all of it is written by the kernels: no part ends before the next begins


# Asked for twice in the backward of a compiled layer in fp32: 7 us of Python that take 2.
@functools.cache
def state_of(channels: int, group_size: int, num_iters: int, kept_parts: int, shared: int) -> State:
    """The state of a forward pass whose iteration multiplies so many parts (`NewtonSplit`).

    `shared` is what `shared_size` says.
    """
    size, num_groups = groups.effective_size(channels, group_size), groups.num_groups(channels, group_size)
    together, count = tiled(channels, group_size, shared)
    padded = padded_size(together)
    kept = slots_of(num_iters) * padded**2 if padded <= LARGEST_NEWTON else 0
    if kept_parts:
        # Of two bytes each.
        kept = kept * kept_parts // 2
    # Two int64.
    lengths = (channels, channels, 4, count * padded**2, num_groups * size**2, count * kept)
    offsets = [0]
    for length in lengths:
        # Every part begins at 16 bytes, as the kernels' loads expect.
        offsets.append(offsets[-1] + -(-length // 4) * 4)
    return State(*offsets, even=offsets[-1] == sum(lengths))


def slots_of(num_iters: int) -> int:
    """How many matrices the backward wants: R_0..R_{T-1} and Z_1..Z_{T-1}; none where there is no product."""
    return 2 * num_iters - 1 if num_iters > 1 else 0


def layout_of(x: Tensor, group_size: int, shared: int = 0) -> Layout:
    """Of an input that is `placed`; `shared` is what `shared_size` says."""
    channels = x.shape[1]
    samples = x.numel() // channels
    size, count = tiled(channels, group_size, shared)
    padded = padded_size(size)
    length = samples // x.shape[0] if x.shape[0] else 1
    return Layout(
        samples=samples,
        channels=channels,
        length=length,
        rows=length == 1 or not x.is_contiguous(),
        group_size=size,
        padded=padded,
        num_groups=count,
        # A tile past the last sample may still compute its offsets: keep a margin below 2^31.
        int64=x.numel() >= 2**31 - 2**20 * channels,
        even=size == padded and channels % size == 0,
        shared=shared,
    )


def split_of(state: Tensor, x: Tensor, group_size: int, num_iters: int, exact: bool, ranks: int = 0) -> Split:
    """The split of the forward pass that left this state: the user may have set another precision since.

    Only fp32's depend on it, and where they keep their iterates in different ways, these are of different size.
    """
    split = split_for(x.dtype)
    if x.dtype != torch.float32 or split == Split.INTERPRETED:
        return split
    shared = shared_size(x.shape[1], group_size, num_iters, exact, ranks)
    sizes = {
        state_of(x.shape[1], group_size, num_iters, newton_split(possible, exact, num_iters), shared).size: possible
        for possible in (Split.TWO_PARTS, Split.THREE_PARTS)
    }
    return sizes[state.numel()] if len(sizes) == 2 else split
