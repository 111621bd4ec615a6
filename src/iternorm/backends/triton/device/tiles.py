"""Tiles of an activation in a kernel: where they are, what of them is there, loads and stores.

A tile is ``[BC, BL]`` (channels by samples) for contiguous memory and ``[BL, BC]`` for channels_last (`ROWS`). What
lies beyond the group is masked, not copied.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from iternorm.backends.triton.device.items.packed import load_packed, store_packed


class Tile(NamedTuple):
    """How a kernel goes over an activation: the constants that it is compiled for."""

    D: int  # channels of a group
    BD: int  # the same, padded: a power of two, or full blocks of a wide group
    BC: int  # channels of a tile: BD, those of a block, or all of an item
    BL: int  # samples of a tile
    ROWS: bool  # a sample is a row of a tile, as in channels_last memory
    ROUND: bool  # tiles go round among the programs, see `share_of`
    PARTS: int  # how products are split, see `precision.Split`
    INT64: bool  # offsets past 2^31
    EVEN: bool  # every group fills its tile: no channel is masked
    STAGES: int  # of the loop that loads tiles
    LONG: bool = False  # sums are of so many samples that the tensor cores' truncation matters, see `outer_product`
    PLANES: bool = False  # memory is contiguous, though a sample is a row of a tile
    DEPTH: int = 0  # channels that a map of a wide group multiplies at a time
    SHARED: int = 0  # channels of each group where several share the tile, whose D channels are then all of theirs
    # Where each item of a batch is whitened by itself, see `device/items/tiles.py`.
    SPAN: int = 0  # channels of a row; 0 where the batch is whitened together
    PACK: int = 1  # of them, those that are in one tile
    SETS: int = 1  # groups of an item
    WHOLE: bool = False  # the positions of an item fill their tiles
    BY_BLOCK: bool = False  # a program has all tiles of some blocks, else some of all
    FLAT: bool = False  # a tile has all channels of its positions, as those of a batch that is whitened together


class After(NamedTuple):
    """What follows the normalization in the same kernel."""

    RESIDUAL: bool  # an addition
    RELU: bool  # an activation


class Passing(NamedTuple):
    """What the first kernel of a backward makes of the output's gradient."""

    SUMMED: bool  # it comes in two parts, to be added
    RELU: bool  # it passes where the output is positive
    KEPT: bool  # what passes is written: it is the residual's gradient, and the next kernel reads it


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for the launch before, then let the next one start: programmatic dependent launch.

    What the launch before that one wrote, and all that is older, may be read earlier than this: it was complete before
    the launch before let this one begin.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def channels_of(group, C, L, TILE: tl.constexpr, begin=0):
    """The channels of a tile of a group: `channels_at` for all of them."""
    return channels_at(begin + tl.arange(0, TILE.BC), group, C, L, TILE)


@triton.jit
def channels_at(index, group, C, L, TILE: tl.constexpr):
    """Channels of a group, by index: where their statistics are, which of them there are, and where they begin."""
    if TILE.FLAT:
        # Those of an item, and the statistics of the rows that they belong to.
        features, channels = group * TILE.D + index // TILE.SPAN, index
        valid = index < C
    else:
        features = group * TILE.D + index
        valid = index < tl.minimum(TILE.D, C - group * TILE.D)
        channels = features
        if TILE.PLANES or not TILE.ROWS:
            channels = features * L
    return features, valid, channels


@triton.jit
def matrix_of(group, C, D: tl.constexpr, BD: tl.constexpr, SHARED: tl.constexpr):
    """Rows and columns of a group's matrix ``[BD, BD]``, and what of it is in a whitening matrix ``[D, D]``.

    Groups that share a tile have the blocks on its diagonal.
    """
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    inside = (i < D) & (j < D)
    if SHARED > 0:
        # A smaller last group is as large as the others in memory.
        end = tl.cdiv(C, SHARED) * SHARED
        inside = inside & (i // SHARED == j // SHARED) & (group * D + i < end)
    return i, j, inside


@triton.jit
def column_of(j, SHARED: tl.constexpr):
    """The column of a group's own matrix, where several share a tile."""
    if SHARED > 0:
        j = j % SHARED
    return j


@triton.jit
def of_own_group(rows, SHARED: tl.constexpr):
    """``[BD, BD]``: in each row the values, one for a row, of those of its group; zero elsewhere."""
    i = tl.arange(0, rows.shape[0])[:, None]
    j = tl.arange(0, rows.shape[0])[None, :]
    return tl.where(i // SHARED == j // SHARED, rows[None, :], 0.0)


@triton.jit
def over_group(tile, SHARED: tl.constexpr):
    """The sum of a tile's elements; where groups share it ``[BD, 1]``, for each row that of its group."""
    rows = tl.sum(tile, 1)
    if SHARED > 0:
        result = tl.sum(of_own_group(rows, SHARED), 1)[:, None]
    else:
        result = tl.sum(rows, 0)
    return result


@triton.jit
def load_vector(ptr, features, valid, PRESENT: tl.constexpr, default: tl.constexpr):
    """A value for each channel, in fp32: γ, β; `default` where there are none."""
    vector = tl.full([features.shape[0]], default, dtype=tl.float32)
    if PRESENT:
        vector = tl.load(ptr + features, mask=valid, other=0.0).to(tl.float32)
    return vector


@triton.jit
def share_of(program, num_programs, M, TILE: tl.constexpr):
    """A program's tiles: the first sample of the first, the end of the full ones, and how far they are apart.

    Also whether the tile that is not full, which begins at that end, is this program's. Tiles go round, program after
    program, so that all programs are at one place of the activation at any time, or a program has a run of them
    (docs/decisions/tile-order.md). A program beyond `num_programs` has none.
    """
    if TILE.ROUND:
        first = program * TILE.BL
        step = num_programs * TILE.BL
        end = tl.where(program < num_programs, M // TILE.BL * TILE.BL, 0)
        has_rest = (end < M) & (M // TILE.BL % num_programs == program)
    else:
        each = tl.cdiv(tl.cdiv(M, TILE.BL), num_programs) * TILE.BL
        first = program * each
        step = TILE.BL
        last = tl.maximum(tl.minimum(first + each, M), first)
        end = first + (last - first) // TILE.BL * TILE.BL
        has_rest = end < last
    return first, end, step, has_rest


@triton.jit
def from_the_end(start, first, end, step):
    """The tile as far from a program's last as this one is from its first.

    Tiles are added up in this order: the last were written last, and what applies a matrix next begins with the first.
    """
    return first + (end - 1 - first) // step * step - (start - first)


@triton.jit
def samples_of(program, num_programs, M, unit):
    """How many of M samples programs have among whom pieces of `unit` samples go round; a run is one piece."""
    rounds = M // (num_programs * unit)
    left = M - (rounds * num_programs + program) * unit
    return rounds * unit + tl.minimum(tl.maximum(left, 0), unit)


@triton.jit
def sample_offsets(start, L, C, TILE: tl.constexpr):
    """Where the samples of a tile begin."""
    return sample_offset(start + tl.arange(0, TILE.BL), L, C, TILE)


@triton.jit
def sample_offset(j, L, C, TILE: tl.constexpr):
    """Where sample j begins: it is position j % L of item j // L."""
    if TILE.INT64:
        j = j.to(tl.int64)
    if TILE.ROWS and not TILE.PLANES:
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
def over_samples(tile, ROWS: tl.constexpr):
    """The sum of each channel."""
    return tl.sum(tile, 0 if ROWS else 1)


@triton.jit
def tile_mask(start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    """What of a tile is there: channels of the group and, unless it is `FULL`, samples before the last."""
    if FULL:
        mask = along_channels(valid, TILE.ROWS)
    else:
        index = tl.arange(0, TILE.BL)
        if TILE.PACK > 1:
            index = index // TILE.PACK
        in_range = start + index < last
        if TILE.ROWS:
            mask = in_range[:, None] & valid[None, :]
        else:
            mask = in_range[None, :] & valid[:, None]
    return mask


@triton.jit
def load_tile(ptr, samples, channels, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    """A tile, zero outside the group and past the last sample.

    `FULL` says that all its samples are there. A mask along the contiguous axis would make every load a scalar one, so
    no mask is given that is not needed.
    """
    if TILE.PACK > 1:
        tile = load_packed(ptr, samples, channels, start, last, valid, TILE, FULL)
    else:
        pointers = tile_pointers(ptr, samples, channels, TILE.ROWS)
        if FULL and TILE.EVEN:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=tile_mask(start, last, valid, TILE, FULL), other=0.0)
    return tile


@triton.jit
def store_tile(ptr, samples, channels, value, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    if TILE.PACK > 1:
        store_packed(ptr, samples, channels, value, start, last, valid, TILE, FULL)
    else:
        pointers = tile_pointers(ptr, samples, channels, TILE.ROWS)
        value = value.to(pointers.dtype.element_ty)
        if FULL and TILE.EVEN:
            tl.store(pointers, value)
        else:
            tl.store(pointers, value, mask=tile_mask(start, last, valid, TILE, FULL))


@triton.jit
def zero_tile(TILE: tl.constexpr):
    # A list takes no field of a bundle as it is.
    BC: tl.constexpr = TILE.BC
    BL: tl.constexpr = TILE.BL
    if TILE.ROWS:
        tile = tl.zeros([BL, BC], dtype=tl.float32)
    else:
        tile = tl.zeros([BC, BL], dtype=tl.float32)
    return tile


@triton.jit
def shifted(tile, shift, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    """tile - shift in fp32, zero past the last sample. Outside the group both are zero already."""
    tile = tile.to(tl.float32) - along_channels(shift, TILE.ROWS)
    if not FULL:
        tile = tl.where(tile_mask(start, last, valid, TILE, False), tile, 0.0)
    return tile


@triton.jit
def passed(
    tile, output_ptr, samples, channels, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr, RELU: tl.constexpr
):
    """A tile of dy as it goes back through the activation: where the layer's output is positive."""
    if RELU:
        output = load_tile(output_ptr, samples, channels, start, last, valid, TILE, FULL)
        tile = tl.where(output > 0, tile, 0.0)
    return tile


@triton.jit
def gradient_tile(
    grad_ptr, more_ptr, output_ptr, kept_ptr, samples, channels, start, last, valid, keeps,
    TILE: tl.constexpr, FULL: tl.constexpr, PASSING: tl.constexpr,
):  # fmt: skip
    """A tile of dy in fp32, before the activation. A program that `keeps` writes it where that is asked for.

    A sum is rounded as autograd would, so that the sums of this kernel are those of what the next one reads.
    """
    tile = load_tile(grad_ptr, samples, channels, start, last, valid, TILE, FULL)
    if PASSING.SUMMED:
        more = load_tile(more_ptr, samples, channels, start, last, valid, TILE, FULL)
        tile = (tile.to(tl.float32) + more.to(tl.float32)).to(grad_ptr.dtype.element_ty)
    tile = passed(tile, output_ptr, samples, channels, start, last, valid, TILE, FULL, PASSING.RELU)
    if PASSING.KEPT:
        if keeps:
            store_tile(kept_ptr, samples, channels, tile, start, last, valid, TILE, FULL)
    return tile.to(tl.float32)


@triton.jit
def finished(
    tile, residual_ptr, samples, channels, start, last, valid,
    TILE: tl.constexpr, FULL: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """A tile of the output with what follows: a residual is added, and of the sum what is positive. A NaN stays one."""
    if AFTER.RESIDUAL:
        tile += load_tile(residual_ptr, samples, channels, start, last, valid, TILE, FULL).to(tl.float32)
    if AFTER.RELU:
        tile = tl.where(tile < 0, 0.0, tile)
    return tile
