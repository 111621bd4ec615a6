"""Items of a batch that are whitened each by itself: their tiles, and the passes over them that know γ and β.

A row of an item's matrix is `SPAN` channels: one for instance whitening, those of a group for group whitening. So γ and
β change along a row. A tile stays within a block of `PACK` channels of each row, for which they are the same in every
tile: one channel of contiguous memory, and neighbours in channels_last memory, where one channel alone would use a few
bytes of each piece of memory that is read. A program takes some tiles of all blocks, or all tiles of some blocks.

Where a tile of channels_last memory has all channels of an item (`FLAT`), the tiles are those of a layer over a batch,
and so are the passes: an item's matrix W becomes W ⊗ I, which multiplies channels, and moments are those of channels.
`reduce_moments` makes those of rows of them.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import as_operand, rounded_on
from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.tiles import (
    along_channels,
    finished,
    load_tile,
    over_samples,
    passed,
    shifted,
    store_tile,
    zero_tile,
)


@triton.jit
def rows_of(group, C, L, TILE: tl.constexpr):
    """The rows of a group: where their statistics are, which there are, where they begin, and their first channels."""
    index = tl.arange(0, TILE.BD)
    first = group % TILE.SETS * TILE.D
    valid = index < tl.minimum(TILE.D, C // TILE.SPAN - first)
    channels = index * TILE.SPAN
    if not TILE.ROWS:
        channels = channels * L
    return group * TILE.D + index, valid, channels, (first + index) * TILE.SPAN


@triton.jit
def begin_of(group, C, L, TILE: tl.constexpr):
    """Where the rows of a group begin."""
    first = group % TILE.SETS * TILE.D * TILE.SPAN
    if not TILE.ROWS:
        first = first * L
    return (group // TILE.SETS).to(tl.int64) * C * L + first


@triton.jit
def on_items(matrix, TILE: tl.constexpr):
    """The matrix of all channels ``[BC, BC]`` that multiplies rows by a matrix ``[BD, BD]``: its product with I."""
    BC: tl.constexpr = TILE.BC
    SPAN: tl.constexpr = TILE.SPAN
    ROWS: tl.constexpr = TILE.BC // TILE.SPAN
    MORE: tl.constexpr = TILE.BD // ROWS
    if MORE > 1:
        # The rows that there are come first, and the others are zero.
        matrix = tl.sum(tl.sum(matrix.reshape(MORE, ROWS, MORE, ROWS), 2), 0)
    whole = tl.broadcast_to(matrix[:, None, :, None], [ROWS, SPAN, ROWS, SPAN]).reshape(BC, BC)
    index = tl.arange(0, BC) % SPAN
    return tl.where(index[:, None] == index[None, :], whole, 0.0)


@triton.jit
def tiles_of(L, TILE: tl.constexpr):
    """How many tiles a block has."""
    return tl.cdiv(L, TILE.BL // TILE.PACK)


@triton.jit
def blocks_of(program, num_programs, L, TILE: tl.constexpr):
    """A program's share: its first block and how many, its first tile of each and how many."""
    BLOCKS: tl.constexpr = TILE.SPAN // TILE.PACK
    tiles = tiles_of(L, TILE)
    blocks = BLOCKS
    first_block, first_tile = 0, 0
    if TILE.BY_BLOCK:
        each = tl.cdiv(BLOCKS, num_programs)
        first_block = program * each
        blocks = tl.minimum(each, BLOCKS - first_block)
    else:
        each = tl.cdiv(tiles, num_programs)
        first_tile = program * each
        tiles = tl.minimum(each, tiles - first_tile)
    return first_block, tl.maximum(blocks, 0), first_tile, tl.maximum(tiles, 0)


@triton.jit
def tile_at(step, first_block, first_tile, tiles, C, L, TILE: tl.constexpr):
    """The block of a program's step, the first position of its tile, and where the samples of that begin."""
    tiles = tl.maximum(tiles, 1)
    block = first_block + step // tiles
    start = (first_tile + step % tiles) * (TILE.BL // TILE.PACK)
    positions = start + tl.arange(0, TILE.BL // TILE.PACK)
    if TILE.ROWS:
        samples = positions * C
        # Where there is but one block, the compiler is to know that 16 bytes can be read at once.
        if TILE.SPAN > TILE.PACK:
            samples += block * TILE.PACK
    else:
        samples = positions + block * L
    return block, start, samples


@triton.jit
def places_of(weights, block, valid, TILE: tl.constexpr):
    """Where γ or β of a block of several channels are, ``[PACK, BC]``, and which of them there are."""
    places = tl.arange(0, TILE.PACK)[:, None] + (weights + block * TILE.PACK)[None, :]
    # What is always true gives the mask its shape.
    return places, valid[None, :] & (places >= 0)


@triton.jit
def learned(ptr, weights, block, valid, TILE: tl.constexpr):
    """γ or β of a block, ``[BC]``, or ``[PACK, BC]`` of several channels, in fp32."""
    if TILE.PACK > 1:
        places, there = places_of(weights, block, valid, TILE)
        vector = tl.load(ptr + places, mask=there, other=0.0).to(tl.float32)
    else:
        vector = tl.load(ptr + weights + block, mask=valid, other=0.0).to(tl.float32)
    return vector


@triton.jit
def along_tile(vector, TILE: tl.constexpr):
    """What `learned` returns, for every sample of a tile."""
    if TILE.PACK > 1:
        BC: tl.constexpr = TILE.BC
        BL: tl.constexpr = TILE.BL
        PACK: tl.constexpr = TILE.PACK
        POSITIONS: tl.constexpr = TILE.BL // TILE.PACK
        tile = tl.broadcast_to(vector[None, :, :], [POSITIONS, PACK, BC]).reshape(BL, BC)
    else:
        tile = along_channels(vector, TILE.ROWS)
    return tile


@triton.jit
def over_positions(tile, TILE: tl.constexpr):
    """The sum of each channel of a block, as `learned` has them."""
    if TILE.PACK > 1:
        BC: tl.constexpr = TILE.BC
        PACK: tl.constexpr = TILE.PACK
        POSITIONS: tl.constexpr = TILE.BL // TILE.PACK
        total = tl.sum(tile.reshape(POSITIONS, PACK, BC), 0)
    else:
        total = over_samples(tile, TILE.ROWS)
    return total


@triton.jit
def store_learned(ptr, weights, block, value, valid, TILE: tl.constexpr):
    """Write what `over_positions` returns to where the channels of a block have their places."""
    if TILE.PACK > 1:
        places, there = places_of(weights, block, valid, TILE)
        tl.store(ptr + places, value, mask=there)
    else:
        tl.store(ptr + weights + block, value, mask=valid)


@triton.jit
def forward_items(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    matrix,
    mean,
    channels,
    weights,
    valid,
    program,
    num_programs,
    C,
    L,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
):
    """y = γ matrix (x - mean) + β over a program's share of an item."""
    if TILE.PARTS == 1:
        offset = -rounded_on(matrix, mean)
    operand = as_operand(matrix, TILE)
    if WEIGHT:
        scale = learned(weight_ptr, weights, 0, valid, TILE)
    if BIAS:
        shift = learned(bias_ptr, weights, 0, valid, TILE)
    first_block, blocks, first_tile, tiles = blocks_of(program, num_programs, L, TILE)
    for step in tl.range(0, blocks * tiles, num_stages=TILE.STAGES):
        block, start, samples = tile_at(step, first_block, first_tile, tiles, C, L, TILE)
        x = load_tile(x_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
        if TILE.PARTS != 1:
            x = shifted(x, mean, start, L, valid, TILE, TILE.WHOLE)
        y = on_channels(operand, x, zero_tile(TILE), TILE.ROWS, TILE.PARTS)
        if TILE.PARTS == 1:
            y += along_channels(offset, TILE.ROWS)
        if WEIGHT:
            if TILE.SPAN > TILE.PACK:
                scale = learned(weight_ptr, weights, block, valid, TILE)
            y *= along_tile(scale, TILE)
        if BIAS:
            if TILE.SPAN > TILE.PACK:
                shift = learned(bias_ptr, weights, block, valid, TILE)
            y += along_tile(shift, TILE)
        y = finished(y, y_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE, AFTER)
        store_tile(y_ptr, samples, channels, y, start, L, valid, TILE, TILE.WHOLE)


@triton.jit
def backward_items(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    weight_ptr,
    first_matrix,
    second_matrix,
    mean,
    offset,
    channels,
    weights,
    valid,
    program,
    num_programs,
    C,
    L,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    RELU: tl.constexpr,
):
    """dx = first γ dy + second (x - mean) + offset over a program's share of an item."""
    of_grad = as_operand(first_matrix, TILE)
    of_x = as_operand(second_matrix, TILE)
    if TILE.PARTS == 1:
        offset -= rounded_on(second_matrix, mean)
    if WEIGHT:
        scale = learned(weight_ptr, weights, 0, valid, TILE)
    first_block, blocks, first_tile, tiles = blocks_of(program, num_programs, L, TILE)
    for step in tl.range(0, blocks * tiles, num_stages=TILE.STAGES):
        block, start, samples = tile_at(step, first_block, first_tile, tiles, C, L, TILE)
        grad = load_tile(grad_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
        grad = passed(grad, output_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE, RELU)
        if WEIGHT or TILE.PARTS != 1:
            grad = grad.to(tl.float32)
        if WEIGHT:
            if TILE.SPAN > TILE.PACK:
                scale = learned(weight_ptr, weights, block, valid, TILE)
            grad *= along_tile(scale, TILE)
        x = load_tile(x_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
        dx = on_channels(of_grad, grad, zero_tile(TILE), TILE.ROWS, TILE.PARTS)
        if TILE.PARTS != 1:
            x = shifted(x, mean, start, L, valid, TILE, TILE.WHOLE)
        dx = on_channels(of_x, x, dx, TILE.ROWS, TILE.PARTS)
        dx += along_channels(offset, TILE.ROWS)
        store_tile(dx_ptr, samples, channels, dx, start, L, valid, TILE, TILE.WHOLE)
