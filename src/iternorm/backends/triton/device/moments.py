"""Moments of an activation: partial sums by block of samples, then their reduction. Forward and backward.

One program sums some tiles of one group. It writes its own partial matrix, so that no floating-point atomics are
needed and two runs give the same bits. A second, small kernel adds the partials, many rows at a time.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.exchange import sent_places
from iternorm.backends.triton.device.products import in_parts, split_dot
from iternorm.backends.triton.device.running import copy_count
from iternorm.backends.triton.device.tiles import (
    channels_of,
    follow,
    from_the_end,
    gradient_tile,
    load_tile,
    over_samples,
    sample_offsets,
    samples_of,
    share_of,
    shifted,
    zero_tile,
)


@triton.jit
def added(gram, product):
    """gram + product, rounded. Of a sum with a product the compiler would make one product, in the tensor cores."""
    return tl.fma(product, 1.0, gram)


@triton.jit
def outer_product(a, x, gram, TILE: tl.constexpr):
    """gram + Σ a xᵀ over the samples of two tiles.

    Tensor cores truncate what they add to: in three parts, and where there are many samples, they add up a tile alone,
    and tiles are added outside.
    """
    left, right = a, x
    if TILE.ROWS:
        left = tl.trans(a)
    else:
        right = tl.trans(x)
    if TILE.PARTS == 3 or (TILE.LONG and TILE.PARTS > 0):
        gram = added(gram, split_dot(left, right, tl.zeros_like(gram), TILE.PARTS))
    else:
        gram = split_dot(left, right, gram, TILE.PARTS)
    return gram


@triton.jit
def rounded_pilot(pilot, TILE: tl.constexpr):
    """A pilot as it is subtracted: a bfloat16 value less a bfloat16 shift rounds to bfloat16 with little loss."""
    if TILE.PARTS == 1:
        pilot = pilot.to(tl.bfloat16).to(tl.float32)
    return pilot


@triton.jit
def own_products(x, gram, mixed, TILE: tl.constexpr):
    """Σ x xᵀ with a tile added to it. Products of unlike parts are kept once, in `mixed`: see `gram_tile`."""
    if TILE.PARTS < 2:
        gram = outer_product(x, x, gram, TILE)
    else:
        x1, x2, x3 = in_parts(x, TILE.PARTS)
        if TILE.ROWS:
            left1, right1, left2, right2, right3 = tl.trans(x1), x1, tl.trans(x2), x2, x3
        else:
            left1, right1, left2, right2, right3 = x1, tl.trans(x1), x2, tl.trans(x2), tl.trans(x3)
        mixed = tl.dot(left1, right2, mixed)
        if TILE.PARTS == 3:
            mixed = tl.dot(left1, right3, mixed)
            gram += tl.dot(left1, right1, tl.dot(left2, right2))
        elif TILE.LONG:
            gram = added(gram, tl.dot(left1, right1))
        else:
            gram = tl.dot(left1, right1, gram)
    return gram, mixed


@triton.jit
def no_products(TILE: tl.constexpr):
    """Where `own_products` begins."""
    BC: tl.constexpr = TILE.BC
    return tl.zeros([BC, BC], dtype=tl.float32), tl.zeros([BC, BC], dtype=tl.float32)


@triton.jit
def summed_products(gram, mixed, TILE: tl.constexpr):
    """Σ x xᵀ of what `own_products` has added up."""
    if TILE.PARTS > 1:
        gram += mixed + tl.trans(mixed)
    return gram


@triton.jit
def store_partials(
    workspace_ptr, gram, total, shift, program, group, num_programs, TILE: tl.constexpr, SELF: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """A program's part of the sums: all matrices come first, then all sums, then all shifts.

    `total` is a tile, or with `SUMMED` the sums of its samples.
    """
    BC: tl.constexpr = TILE.BC
    index = tl.arange(0, BC)
    slot = group * num_programs + program
    slots = tl.num_programs(1) * num_programs
    columns = tl.arange(0, BC)
    tl.store(workspace_ptr + slot * BC * BC + index[:, None] * BC + columns[None, :], gram)
    sums = workspace_ptr + slots * BC * BC + slot * BC
    if not SUMMED:
        total = over_samples(total, TILE.ROWS)
    tl.store(sums + index, total)
    if SELF:
        tl.store(sums + slots * BC + index, shift)


@triton.jit
def gram_tile(
    a_ptr,
    x_ptr,
    output_ptr,
    more_ptr,
    kept_ptr,
    start,
    is_first,
    last,
    shift,
    channels,
    valid,
    C,
    L,
    gram,
    mixed,
    total,
    TILE: tl.constexpr,
    SELF: tl.constexpr,
    FULL: tl.constexpr,
    PASSING: tl.constexpr,
):
    """Add one tile to Σ a xᵀ and Σ a. With a = x, products of unlike parts are kept once, in `mixed`.

    The program's first tile gives the shift of a = x.
    """
    samples = sample_offsets(start, L, C, TILE)
    tile = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
    if SELF:
        if is_first:
            count = tl.minimum(last - start, TILE.BL).to(tl.float32)
            shift = rounded_pilot(over_samples(tile.to(tl.float32), TILE.ROWS) / count, TILE)
    x = shifted(tile, shift, start, last, valid, TILE, FULL)
    if SELF:
        total += x
        gram, mixed = own_products(x, gram, mixed, TILE)
    else:
        a = gradient_tile(
            a_ptr, more_ptr, output_ptr, kept_ptr, samples, channels, start, last, valid, True, TILE, FULL, PASSING
        )
        total += a
        gram = outer_product(a, x, gram, TILE)
    return gram, mixed, total, shift


@triton.jit
def sum_tiles(
    a_ptr,
    x_ptr,
    output_ptr,
    more_ptr,
    kept_ptr,
    shift,
    channels,
    valid,
    program,
    num_programs,
    M,
    C,
    L,
    TILE: tl.constexpr,
    SELF: tl.constexpr,
    PASSING: tl.constexpr,
):
    """Σ a (x - shift)ᵀ over a program's share of the tiles, a tile whose sum is Σ a, and the shift."""
    gram, mixed = no_products(TILE)
    total = zero_tile(TILE)
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for turn in tl.range(first, end, step, num_stages=TILE.STAGES):
        start = from_the_end(turn, first, end, step)
        gram, mixed, total, shift = gram_tile(
            a_ptr, x_ptr, output_ptr, more_ptr, kept_ptr, start, turn == first, M, shift, channels, valid, C, L, gram,
            mixed, total, TILE, SELF, True, PASSING,
        )  # fmt: skip
    if has_rest:
        gram, mixed, total, shift = gram_tile(
            a_ptr, x_ptr, output_ptr, more_ptr, kept_ptr, end, end <= first, M, shift, channels, valid, C, L, gram,
            mixed, total, TILE, SELF, False, PASSING,
        )  # fmt: skip
    if SELF:
        gram = summed_products(gram, mixed, TILE)
    return gram, total, shift


@triton.jit(do_not_specialize=["M", "num_programs"])
def partial_moments(
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
    """Σ a and Σ a (x - shift)ᵀ over a program's tiles.

    Forward (`SELF`): a is x - shift too, and the shift is the mean of the program's own first tile, so that a large
    mean costs no accuracy (math.md, Eq. 4). Backward: a is dy, and the shift is the mean of the batch (Eq. 21);
    `PASSING` says what dy is made of.
    """
    BD: tl.constexpr = TILE.BD
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, TILE)
    if not SELF:
        shift = tl.load(mean_ptr + features, mask=valid, other=0.0)
    follow(PDL)

    if SELF:
        shift = tl.zeros([BD], dtype=tl.float32)
    gram, total, shift = sum_tiles(
        a_ptr, x_ptr, output_ptr, more_ptr, kept_ptr, shift, channels, valid, program, num_programs, M, C, L,
        TILE, SELF, PASSING,
    )  # fmt: skip
    store_partials(workspace_ptr, gram, total, shift, program, group, num_programs, TILE, SELF, False)


@triton.jit
def joined_row(
    workspace_ptr,
    M,
    num_programs,
    unit,
    group,
    row,
    BD: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    PB: tl.constexpr,
    SELF: tl.constexpr,
):
    """A row of a group's matrix ``[BD]`` and its vector, from the partials: see `reduce_moments`."""
    columns = tl.arange(0, BD)
    first_row = row * SPAN
    firsts = columns * SPAN
    # Past the rows that a matrix has, any place will do.
    PADDED: tl.constexpr = BD * SPAN > BC
    if PADDED:
        first_row = first_row % BC
        firsts = firsts % BC
    base = group * num_programs
    slots = tl.num_programs(0) * num_programs
    sums_ptr = workspace_ptr + slots * BC * BC
    pilots_ptr = sums_ptr + slots * BC

    line = tl.zeros([BD], dtype=tl.float32)
    total = tl.zeros([BD], dtype=tl.float32)
    if SELF:
        anchor = tl.load(pilots_ptr + base * BC + firsts)
        anchor_row = tl.load(pilots_ptr + base * BC + first_row)
    for start in range(0, num_programs * SPAN, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs * SPAN
        mask = present[:, None]
        if PADDED:
            present = present & (row < BC // SPAN)
            mask = present[:, None] & (columns < BC // SPAN)[None, :]
        program = p // SPAN
        slot = (base + program).to(tl.int64)
        channels = (p % SPAN)[:, None] + firsts[None, :]
        place = (slot * BC)[:, None] + channels
        row_place = slot * BC + first_row + p % SPAN
        block = tl.load(workspace_ptr + row_place[:, None] * BC + channels, mask=mask, other=0.0)
        if SELF:
            wanted = mask
        else:
            # A mask of one shape: the interpreter of Triton 3.9 takes no other.
            wanted = mask & (row + tl.zeros_like(columns)[None, :] == 0)
        s = tl.load(sums_ptr + place, mask=wanted, other=0.0)
        if SELF:
            count = samples_of(program, num_programs, M // SPAN, unit).to(tl.float32)
            delta = tl.load(pilots_ptr + place, mask=mask, other=0.0)
            delta = tl.where(mask, delta - anchor[None, :], 0.0)
            s_row = tl.load(sums_ptr + row_place, mask=present, other=0.0)
            delta_row = tl.load(pilots_ptr + row_place, mask=present, other=0.0)
            delta_row = tl.where(present, delta_row - anchor_row, 0.0)
            block += s_row[:, None] * delta + delta_row[:, None] * (s + count[:, None] * delta)
            s += count[:, None] * delta
        line += tl.sum(block, 0)
        total += tl.sum(s, 0)
    if SELF:
        total = total / M
        total_row = tl.sum(tl.where(columns == row, total, 0.0), 0)
        line = line / M - total_row * total
        total += anchor
    return line, total


@triton.jit(do_not_specialize=["M", "num_programs", "unit"])
def reduce_moments(
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
    SPAN: tl.constexpr,
    PB: tl.constexpr,
    EACH: tl.constexpr,
    SELF: tl.constexpr,
    COUNT: tl.constexpr,
    SENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the partials of a group: mean, covariance and variance, or Σ dy and Σ dy (x - mean)ᵀ.

    A program joins `EACH` rows, one after the other.
    A partial about its own pilot p is moved to a common anchor q, the first program's pilot, by
    Σ (x-q)(x-q)ᵀ = G + s δᵀ + δ sᵀ + n δ δᵀ with δ = p - q, and the sum from there to the mean (math.md, Eq. 4).
    Where a row is `SPAN` channels, a program's matrix ``[BC, BC]`` is that of all channels of an item. The first ones
    of all rows are a partial, the second ones another.
    With `COUNT` the number of batches so far is copied: a later launch counts this one while others of it read that.
    With `SENT` the matrix is what other ranks are sent (`device/exchange.py`), and `WEIGHT` asks for d(γ) too.
    """
    follow(PDL)
    group = tl.program_id(0)
    columns = tl.arange(0, BD)
    member = columns < tl.minimum(D, C - group * D)
    for turn in tl.static_range(EACH):
        row = tl.program_id(1) * EACH + turn
        line, total = joined_row(workspace_ptr, M, num_programs, unit, group, row, BD, BC, SPAN, PB, SELF)
        if SENT:
            vector, matrices = sent_places(matrix_ptr, C, SELF)
            inside = (columns < D) & (row < D)
            tl.store(matrices + (group * D + row) * D + columns, line, mask=inside)
            if WEIGHT:
                whitening = tl.load(whitening_ptr + (group * D + row) * D + columns, mask=inside, other=0.0)
                gradient = tl.sum(line * whitening, 0)
                tl.store(grad_weight_ptr + group * D + row, gradient, mask=row < tl.minimum(D, C - group * D))
            if row == 0:
                tl.store(vector + group * D + columns, total, mask=member)
                if SELF:
                    if group == 0:
                        tl.store(matrix_ptr, M.to(tl.float32))
        else:
            tl.store(matrix_ptr + (group * BD + row) * BD + columns, line)
        if row == 0:
            if not (SENT and SELF):
                tl.store(vector_ptr + group * D + columns, total, mask=member)
            if COUNT:
                if group == 0:
                    copy_count(num_batches_ptr, batches_ptr)
        if SELF and not SENT:
            tl.store(variance_ptr + group * D + columns, line, mask=member & (columns == row))
