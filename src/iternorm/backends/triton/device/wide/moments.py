"""Moments of groups too wide for one program: a program has a pair of blocks of channels, and some tiles.

For groups above 128 channels. Their matrices are divided into blocks of `BC` channels; `BD` is the group size rounded
up to full blocks. What `moments` does for other groups is done here block by block. Programs that read the same samples
are launched next to each other, so that most of what they read is in the cache. A launch is of a kernel here or of its
counterpart there, with the same arguments.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import below_diagonal, for_each, store_block, tile_of
from iternorm.backends.triton.device.exchange import sent_places
from iternorm.backends.triton.device.moments import outer_product, rounded_pilot
from iternorm.backends.triton.device.running import copy_count
from iternorm.backends.triton.device.tiles import (
    channels_of,
    follow,
    from_the_end,
    gradient_tile,
    load_tile,
    over_samples,
    sample_offset,
    sample_offsets,
    samples_of,
    share_of,
    shifted,
    zero_tile,
)

# Samples whose mean is taken out of a program's tiles before their products.
PILOTS = tl.constexpr(16)


@triton.jit
def pilot_of(x_ptr, first, last, channels, valid, C, L, TILE: tl.constexpr):
    """The mean of the first samples, added one by one: the same bits in every program that has these tiles."""
    BC: tl.constexpr = TILE.BC
    pilot = tl.zeros([BC], dtype=tl.float32)
    for k in tl.static_range(PILOTS):
        offset = sample_offset(first + k, L, C, TILE)
        there = for_each(first + k, channels) < last
        pilot += tl.load(x_ptr + offset + channels, mask=valid & there, other=0.0).to(tl.float32)
    return rounded_pilot(pilot / tl.minimum(last - first, PILOTS).to(tl.float32), TILE)


@triton.jit
def product_tile(
    a_ptr,
    x_ptr,
    output_ptr,
    more_ptr,
    kept_ptr,
    start,
    last,
    left_shift,
    right_shift,
    left_channels,
    right_channels,
    left_valid,
    right_valid,
    C,
    L,
    gram,
    total,
    keeps,
    TILE: tl.constexpr,
    SELF: tl.constexpr,
    FULL: tl.constexpr,
    PASSING: tl.constexpr,
):
    """Add one tile of two blocks to Σ a xᵀ and Σ a."""
    samples = sample_offsets(start, L, C, TILE)
    x = load_tile(x_ptr, samples, right_channels, start, last, right_valid, TILE, FULL)
    x = shifted(x, right_shift, start, last, right_valid, TILE, FULL)
    if SELF:
        a = load_tile(a_ptr, samples, left_channels, start, last, left_valid, TILE, FULL)
        a = shifted(a, left_shift, start, last, left_valid, TILE, FULL)
    else:
        a = gradient_tile(
            a_ptr, more_ptr, output_ptr, kept_ptr, samples, left_channels, start, last, left_valid, keeps,
            TILE, FULL, PASSING,
        )  # fmt: skip
    total += a
    return outer_product(a, x, gram, TILE), total


@triton.jit(do_not_specialize=["M", "num_programs"])
def wide_moments(
    a_ptr,
    x_ptr,
    output_ptr,
    more_ptr,
    kept_ptr,
    mean_ptr,
    workspace_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    SELF: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """`partial_moments` of a pair of blocks. Forward (`SELF`), of pairs on and below the diagonal."""
    BD: tl.constexpr = TILE.BD
    BC: tl.constexpr = TILE.BC
    ACROSS: tl.constexpr = BD // BC
    PAIRS: tl.constexpr = ACROSS * (ACROSS + 1) // 2 if SELF else ACROSS * ACROSS
    pair = tl.program_id(0) % PAIRS
    program = tl.program_id(0) // PAIRS
    group = tl.program_id(1)
    if SELF:
        row, column = below_diagonal(pair)
    else:
        row = pair // ACROSS
        column = pair % ACROSS
    _, left_valid, left_channels = channels_of(group, C, L, TILE, row * BC)
    right_features, right_valid, right_channels = channels_of(group, C, L, TILE, column * BC)
    left_shift = tl.zeros([BC], dtype=tl.float32)
    if not SELF:
        right_shift = tl.load(mean_ptr + right_features, mask=right_valid, other=0.0)
    follow(PDL)

    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    if SELF:
        left_shift = pilot_of(x_ptr, first, M, left_channels, left_valid, C, L, TILE)
        right_shift = pilot_of(x_ptr, first, M, right_channels, right_valid, C, L, TILE)
    gram = tl.zeros([BC, BC], dtype=tl.float32)
    total = zero_tile(TILE)
    for turn in tl.range(first, end, step, num_stages=TILE.STAGES):
        start = from_the_end(turn, first, end, step)
        gram, total = product_tile(
            a_ptr, x_ptr, output_ptr, more_ptr, kept_ptr, start, M, left_shift, right_shift, left_channels,
            right_channels, left_valid, right_valid, C, L, gram, total, column == 0, TILE, SELF, True, PASSING,
        )  # fmt: skip
    if has_rest:
        gram, total = product_tile(
            a_ptr, x_ptr, output_ptr, more_ptr, kept_ptr, end, M, left_shift, right_shift, left_channels,
            right_channels, left_valid, right_valid, C, L, gram, total, column == 0, TILE, SELF, False, PASSING,
        )  # fmt: skip

    slot = (group * num_programs + program).to(tl.int64)
    slots = tl.num_programs(1) * num_programs
    rows = row * BC + tl.arange(0, BC)
    columns = column * BC + tl.arange(0, BC)
    tl.store(workspace_ptr + (slot * BD + rows[:, None]) * BD + columns[None, :], gram)
    sums = workspace_ptr + (slots.to(tl.int64) * BD + slot) * BD
    if column == (row if SELF else 0):
        tl.store(sums + rows, over_samples(total, TILE.ROWS))
        if SELF:
            tl.store(sums + slots * BD + rows, left_shift)


@triton.jit(do_not_specialize=["M", "num_programs", "unit"])
def wide_reduce(
    workspace_ptr,
    matrix_ptr,
    vector_ptr,
    variance_ptr,
    num_batches_ptr,
    batches_ptr,
    whitening_ptr,
    grad_weight_ptr,
    M,
    C,
    num_programs,
    unit,
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    SELF: tl.constexpr,
    COUNT: tl.constexpr,
    SENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """`reduce_moments` by tiles of the matrix, `PB` partials at a time, but without d(γ): a tile has no whole row."""
    follow(PDL)
    rows, columns, group = tile_of(BD, SIDE)
    across: tl.constexpr = BD // SIDE
    slots = (tl.num_programs(1) * num_programs).to(tl.int64)
    sums_ptr = workspace_ptr + slots * BD * BD
    pilots_ptr = sums_ptr + slots * BD
    base = group * num_programs
    places = rows[:, None] * BD + columns[None, :]
    if SELF:
        # Above the diagonal of blocks there are none: those below are read the other way round.
        if tl.program_id(0) // across * SIDE // BC < tl.program_id(0) % across * SIDE // BC:
            places = columns[None, :] * BD + rows[:, None]
        anchor_rows = tl.load(pilots_ptr + base * BD + rows)
        anchor_columns = tl.load(pilots_ptr + base * BD + columns)
    tile = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    total_rows = tl.zeros([SIDE], dtype=tl.float32)
    total_columns = tl.zeros([SIDE], dtype=tl.float32)
    for start in range(0, num_programs, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        slot = base + p
        block = tl.load(
            workspace_ptr + (slot * (BD * BD))[:, None, None] + places[None, :, :],
            mask=present[:, None, None],
            other=0.0,
        )
        mask = present[:, None]
        row_sums = tl.load(sums_ptr + slot[:, None] * BD + rows[None, :], mask=mask, other=0.0)
        if SELF:
            count = samples_of(p, num_programs, M, unit).to(tl.float32)
            column_sums = tl.load(sums_ptr + slot[:, None] * BD + columns[None, :], mask=mask, other=0.0)
            row_delta = tl.load(pilots_ptr + slot[:, None] * BD + rows[None, :], mask=mask, other=0.0)
            row_delta = tl.where(mask, row_delta - anchor_rows[None, :], 0.0)
            column_delta = tl.load(pilots_ptr + slot[:, None] * BD + columns[None, :], mask=mask, other=0.0)
            column_delta = tl.where(mask, column_delta - anchor_columns[None, :], 0.0)
            moved = column_sums + count[:, None] * column_delta
            block += row_sums[:, :, None] * column_delta[:, None, :] + row_delta[:, :, None] * moved[:, None, :]
            total_columns += tl.sum(moved, 0)
            row_sums += count[:, None] * row_delta
        tile += tl.sum(block, 0)
        total_rows += tl.sum(row_sums, 0)
    if SELF:
        total_rows = total_rows / M
        total_columns = total_columns / M
        tile = tile / M - total_rows[:, None] * total_columns[None, :]
        total_rows += anchor_rows
    member = rows < tl.minimum(D, C - group * D)
    first = tl.program_id(0) % across == 0
    if SENT:
        vector, matrices = sent_places(matrix_ptr, C, SELF)
        store_block(matrices + group * D * D, rows, columns, tile, D, D == BD)
        if first:
            tl.store(vector + group * D + rows, total_rows, mask=member)
        if SELF:
            if (tl.program_id(0) == 0) & (group == 0):
                tl.store(matrix_ptr, M.to(tl.float32))
    else:
        tl.store(matrix_ptr + group * BD * BD + rows[:, None] * BD + columns[None, :], tile)
    if not (SENT and SELF):
        if first:
            tl.store(vector_ptr + group * D + rows, total_rows, mask=member)
    if COUNT:
        if (tl.program_id(0) == 0) & (group == 0):
            copy_count(num_batches_ptr, batches_ptr)
    if SELF and not SENT:
        if tl.program_id(0) // across == tl.program_id(0) % across:
            diagonal = tl.sum(tl.where(rows[:, None] == columns[None, :], tile, 0.0), 1)
            tl.store(variance_ptr + group * D + rows, diagonal, mask=member)
