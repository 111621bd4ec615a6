"""Items of a batch that are whitened each by itself: their tiles, and the passes over them that know γ and β.

A row of an item's matrix is `SPAN` channels: one for instance whitening, those of a group for group whitening. So γ and
β change along a row. A tile stays within a block of `PACK` channels of each row, for which they are the same in every
tile: one channel of contiguous memory, and neighbours in channels_last memory, where one channel alone would use a few
bytes of each piece of memory that is read. A program takes some tiles of all blocks, or all tiles of some blocks.

Where channels_last memory has all channels of an item in one tile (`FLAT`), the tiles are those of a layer over a batch
and so are the passes: an item's matrix W becomes W ⊗ I, which multiplies channels, and moments are those of channels, of
which `reduce_moments` makes those of rows.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import as_operand, rounded_on
from iternorm.backends.triton.device.moments import (
    no_products,
    outer_product,
    own_products,
    rounded_pilot,
    store_partials,
    sum_tiles,
    summed_products,
)
from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.tiles import (
    along_channels,
    channels_of,
    finished,
    follow,
    load_tile,
    load_vector,
    matrix_of,
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
def blocks_of(program, tiles_per_program, L, TILE: tl.constexpr):
    """A program's share: its first block and how many, its first tile of each and how many."""
    BLOCKS: tl.constexpr = TILE.SPAN // TILE.PACK
    tiles = tiles_of(L, TILE)
    by_block = tiles_per_program >= tiles
    each = tiles_per_program // tiles
    first_block = tl.where(by_block, program * each, 0)
    blocks = tl.where(by_block, tl.minimum(each, BLOCKS - first_block), BLOCKS)
    first_tile = tl.where(by_block, 0, program * tiles_per_program)
    tiles = tl.minimum(tl.where(by_block, tiles, tiles_per_program), tiles - first_tile)
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
    tiles_per_program,
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
    first_block, blocks, first_tile, tiles = blocks_of(program, tiles_per_program, L, TILE)
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
    tiles_per_program,
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
    first_block, blocks, first_tile, tiles = blocks_of(program, tiles_per_program, L, TILE)
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


@triton.jit(do_not_specialize=["M", "tiles_per_program", "num_programs"])
def item_moments(
    x_ptr,
    workspace_ptr,
    M,
    C,
    L,
    tiles_per_program,
    num_programs,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ (x - shift) and Σ (x - shift)(x - shift)ᵀ over a program's share of an item, as `partial_moments`."""
    BC: tl.constexpr = TILE.BC
    program = tl.program_id(0)
    group = tl.program_id(1)
    _features, valid, channels, _weights = rows_of(group, C, L, TILE)
    x_ptr += begin_of(group, C, L, TILE)
    follow(PDL)
    shift = tl.zeros([BC], dtype=tl.float32)
    if TILE.FLAT:
        _features, valid, channels = channels_of(group, C, L, TILE)
        gram, total, shift = sum_tiles(
            x_ptr, x_ptr, None, None, None, shift, channels, valid, program, tiles_per_program, L, C, L, TILE, True, None
        )
    else:
        gram, mixed = no_products(TILE)
        total = zero_tile(TILE)
        first_block, blocks, first_tile, tiles = blocks_of(program, tiles_per_program, L, TILE)
        for step in tl.range(0, blocks * tiles, num_stages=TILE.STAGES):
            _block, start, samples = tile_at(step, first_block, first_tile, tiles, C, L, TILE)
            tile = load_tile(x_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
            if step == 0:
                count = tl.minimum(L - start, TILE.BL // TILE.PACK) * TILE.PACK
                shift = rounded_pilot(over_samples(tile.to(tl.float32), TILE.ROWS) / count.to(tl.float32), TILE)
            x = shifted(tile, shift, start, L, valid, TILE, TILE.WHOLE)
            total += x
            gram, mixed = own_products(x, gram, mixed, TILE)
        gram = summed_products(gram, mixed, TILE)
    store_partials(workspace_ptr, gram, total, shift, program, group, num_programs, TILE, True, False)


@triton.jit(do_not_specialize=["M", "tiles_per_program", "num_programs"])
def item_cross_moments(
    grad_ptr,
    x_ptr,
    output_ptr,
    mean_ptr,
    whitening_ptr,
    weight_ptr,
    learned_ptr,
    workspace_ptr,
    M,
    C,
    L,
    tiles_per_program,
    num_programs,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    LEARNED: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ γ dy and Σ γ dy (x - mean)ᵀ over a program's share of an item; with `LEARNED`, its part of d(γ) and d(β) too.

    d(γ) is Σ dy W (x - mean) over the positions of a channel: of a block that is one channel of each row, the row sums
    of W ∘ Σ dy (x - mean)ᵀ. The parts are ``[items, shares, 2, C]``: a program that has some tiles of all blocks has a
    share of its own.
    """
    BD: tl.constexpr = TILE.BD
    D: tl.constexpr = TILE.D
    PACKED: tl.constexpr = TILE.PACK > 1
    ONE_BLOCK: tl.constexpr = TILE.SPAN == TILE.PACK
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels, weights = rows_of(group, C, L, TILE)
    begin = begin_of(group, C, L, TILE)
    grad_ptr += begin
    x_ptr += begin
    if PASSING.RELU:
        output_ptr += begin
    if TILE.FLAT:
        features, valid, channels = channels_of(group, C, L, TILE)
    i, j, inside = matrix_of(TILE)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    whitening = tl.load(whitening_ptr + group * D * D + i * D + j, mask=inside, other=0.0)
    if PACKED:
        operand = as_operand(whitening, TILE)
    if WEIGHT and not TILE.FLAT:
        scale = learned(weight_ptr, weights, 0, valid, TILE)
    if LEARNED:
        share = group // TILE.SETS
        if tiles_per_program < tiles_of(L, TILE):
            share = share * num_programs + program
        learned_ptr += share.to(tl.int64) * 2 * C
    follow(PDL)

    if TILE.FLAT:
        cross, by_bias, _ = sum_tiles(
            grad_ptr, x_ptr, output_ptr, None, None, mean, channels, valid, program, tiles_per_program, L, C, L, TILE,
            False, PASSING,
        )  # fmt: skip
        total = over_samples(by_bias, TILE.ROWS)
        if LEARNED:
            tl.store(learned_ptr + channels, tl.sum(cross * on_items(whitening, TILE), 1), mask=valid)
            tl.store(learned_ptr + C + channels, total, mask=valid)
        if WEIGHT:
            scale = load_vector(weight_ptr, channels, valid, True, 1.0)
            cross *= scale[:, None]
            total *= scale
    else:
        cross = tl.zeros([BD, BD], dtype=tl.float32)
        gram = tl.zeros([BD, BD], dtype=tl.float32)
        total = tl.zeros([BD], dtype=tl.float32)
        by_weight = zero_tile(TILE)
        by_bias = zero_tile(TILE)
        first_block, blocks, first_tile, tiles = blocks_of(program, tiles_per_program, L, TILE)
        for step in tl.range(0, blocks * tiles, num_stages=TILE.STAGES):
            block, start, samples = tile_at(step, first_block, first_tile, tiles, C, L, TILE)
            grad = load_tile(grad_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
            grad = passed(grad, output_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE, PASSING.RELU).to(tl.float32)
            x = load_tile(x_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
            x = shifted(x, mean, start, L, valid, TILE, TILE.WHOLE)
            by_bias += grad
            if PACKED:
                if LEARNED:
                    by_weight += grad * on_channels(operand, x, zero_tile(TILE), TILE.ROWS, TILE.PARTS)
                if WEIGHT:
                    if not ONE_BLOCK:
                        scale = learned(weight_ptr, weights, block, valid, TILE)
                    grad *= along_tile(scale, TILE)
            gram = outer_product(grad, x, gram, TILE)
            if step % tl.maximum(tiles, 1) == tiles - 1:
                # The block is complete.
                sums = over_positions(by_bias, TILE)
                if LEARNED:
                    if PACKED:
                        products = over_positions(by_weight, TILE)
                    else:
                        products = tl.sum(gram * whitening, 1)
                    store_learned(learned_ptr, weights, block, products, valid, TILE)
                    store_learned(learned_ptr + C, weights, block, sums, valid, TILE)
                    by_weight = zero_tile(TILE)
                by_bias = zero_tile(TILE)
                if WEIGHT:
                    if not PACKED:
                        if not ONE_BLOCK:
                            scale = learned(weight_ptr, weights, block, valid, TILE)
                        gram *= scale[:, None]
                    sums *= scale
                if PACKED:
                    sums = tl.sum(sums, 0)
                total += sums
                cross += gram
                gram = tl.zeros([BD, BD], dtype=tl.float32)
    store_partials(workspace_ptr, cross, total, mean, program, group, num_programs, TILE, False, True)
