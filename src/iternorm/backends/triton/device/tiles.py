"""Tiles of an activation in a kernel: where they are, what of them is there, loads and stores.

A tile is ``[BD, BL]`` (channels by samples) for contiguous memory and ``[BL, BD]`` for channels_last (`ROWS`). BD is
the group size rounded up to a power of two; what lies beyond the group is masked, not copied.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for the launch before, then let the next one be brought up: programmatic dependent launch.

    What the launch before that one wrote, and all that is older, may be read earlier than this: it was complete before
    the launch before let this one begin.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def channels_of(group, C, L, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, begin=0):
    """`BD` channels of a group: their numbers, which of them there are, and where they begin."""
    index = begin + tl.arange(0, BD)
    features = group * D + index
    channels = features
    if not ROWS:
        channels = features * L
    return features, index < tl.minimum(D, C - group * D), channels


@triton.jit
def sample_offsets(start, L, C, BL: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr):
    """Where the samples of a tile begin."""
    return sample_offset(start + tl.arange(0, BL), L, C, ROWS, BIG)


@triton.jit
def sample_offset(j, L, C, ROWS: tl.constexpr, BIG: tl.constexpr):
    """Where sample j begins: it is position j % L of item j // L."""
    if BIG:
        j = j.to(tl.int64)
    if ROWS:
        offsets = j * C
    else:
        n = j // L
        offsets = n * (C * L) + (j - n * L)
    return offsets


@triton.jit
def tile_pointers(ptr, samples, channels, ROWS: tl.constexpr):
    if ROWS:
        pointers = ptr + samples[:, None] + channels[None, :]
    else:
        pointers = ptr + samples[None, :] + channels[:, None]
    return pointers


@triton.jit
def along_channels(vector, ROWS: tl.constexpr):
    if ROWS:
        vector = vector[None, :]
    else:
        vector = vector[:, None]
    return vector


@triton.jit
def tile_mask(start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """What of a tile is there: channels of the group and, unless it is `FULL`, samples before the last."""
    if FULL:
        mask = along_channels(valid, ROWS)
    else:
        in_range = start + tl.arange(0, BL) < last
        if ROWS:
            mask = in_range[:, None] & valid[None, :]
        else:
            mask = in_range[None, :] & valid[:, None]
    return mask


@triton.jit
def load_tile(
    pointers, start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr
):
    """A tile, zero outside the group and past the last sample.

    `FULL` says that all its samples are there, `WHOLE` that its group fills it. A mask along the contiguous axis would
    make every load a scalar one, so no mask is given that is not needed.
    """
    if FULL and WHOLE:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=tile_mask(start, last, valid, BL, ROWS, FULL), other=0.0)
    return tile


@triton.jit
def store_tile(
    pointers,
    value,
    start,
    last,
    valid,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    value = value.to(pointers.dtype.element_ty)
    if FULL and WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=tile_mask(start, last, valid, BL, ROWS, FULL))


@triton.jit
def zero_tile(BD: tl.constexpr, BL: tl.constexpr, ROWS: tl.constexpr):
    if ROWS:
        tile = tl.zeros([BL, BD], dtype=tl.float32)
    else:
        tile = tl.zeros([BD, BL], dtype=tl.float32)
    return tile


@triton.jit
def shifted(tile, shift, start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """tile - shift in fp32, zero past the last sample. Outside the group both are zero already."""
    tile = tile.to(tl.float32) - along_channels(shift, ROWS)
    if not FULL:
        tile = tl.where(tile_mask(start, last, valid, BL, ROWS, False), tile, 0.0)
    return tile


@triton.jit
def passed(
    tile,
    output_ptr,
    samples,
    channels,
    start,
    last,
    valid,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
):
    """A tile of dy as it goes back through the activation: where the layer's output is positive."""
    if RELU:
        pointers = tile_pointers(output_ptr, samples, channels, ROWS)
        output = load_tile(pointers, start, last, valid, BL, ROWS, FULL, WHOLE)
        tile = tl.where(output > 0, tile, 0.0)
    return tile
