"""Moments of items that are whitened each by itself, and of their gradients, with what γ and β have to do with them."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import as_operand
from iternorm.backends.triton.device.items.tiles import (
    along_tile,
    begin_of,
    blocks_of,
    learned,
    on_items,
    over_positions,
    rows_of,
    store_learned,
    tile_at,
)
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
    channels_of,
    follow,
    load_tile,
    load_vector,
    matrix_of,
    over_samples,
    passed,
    shifted,
    zero_tile,
)


@triton.jit(do_not_specialize=["M", "num_programs"])
def item_moments(
    x_ptr,
    workspace_ptr,
    M,
    C,
    L,
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
            x_ptr, x_ptr, None, None, None, shift, channels, valid, program, num_programs, L, C, L, TILE, True,
            None,
        )  # fmt: skip
    else:
        gram, mixed = no_products(TILE)
        total = zero_tile(TILE)
        first_block, blocks, first_tile, tiles = blocks_of(program, num_programs, L, TILE)
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


@triton.jit(do_not_specialize=["M", "num_programs"])
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
    i, j, inside = matrix_of(group, C, TILE.D, TILE.BD, TILE.SHARED)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    whitening = tl.load(whitening_ptr + group * D * D + i * D + j, mask=inside, other=0.0)
    if PACKED:
        operand = as_operand(whitening, TILE)
    if WEIGHT and not TILE.FLAT:
        scale = learned(weight_ptr, weights, 0, valid, TILE)
    if LEARNED:
        share = group // TILE.SETS
        if not TILE.BY_BLOCK:
            share = share * num_programs + program
        learned_ptr += share.to(tl.int64) * 2 * C
    follow(PDL)

    if TILE.FLAT:
        cross, by_bias, _ = sum_tiles(
            grad_ptr, x_ptr, output_ptr, None, None, mean, channels, valid, program, num_programs, L, C, L, TILE,
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
        first_block, blocks, first_tile, tiles = blocks_of(program, num_programs, L, TILE)
        for step in tl.range(0, blocks * tiles, num_stages=TILE.STAGES):
            block, start, samples = tile_at(step, first_block, first_tile, tiles, C, L, TILE)
            grad = load_tile(grad_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE)
            grad = passed(grad, output_ptr, samples, channels, start, L, valid, TILE, TILE.WHOLE, PASSING.RELU)
            grad = grad.to(tl.float32)
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


@triton.jit(do_not_specialize=["num_parts"])
def sum_parts(
    parts_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    num_parts,
    C,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sums over the parts ``[num_parts, 2, C]`` of d(γ) and d(β), `COLUMNS` of them to a program.

    Rows of a block are added up at the end, always in one order.
    """
    follow(PDL)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < 2 * C
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_parts, ROWS):
        part = start + tl.arange(0, ROWS)
        places = part.to(tl.int64)[:, None] * (2 * C) + columns[None, :]
        total += tl.load(parts_ptr + places, mask=(part < num_parts)[:, None] & there[None, :], other=0.0)
    sums = tl.sum(total, 0)
    if WEIGHT:
        tl.store(grad_weight_ptr + columns, sums, mask=columns < C)
    tl.store(grad_bias_ptr + columns - C, sums, mask=there & (columns >= C))
