"""Moments of a batch of a stream: sums by program in fp32, then one join with what was seen before, in fp64.

A batch has thousands of samples for each program, and its moments are all that is wanted of it.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.products import halves
from iternorm.backends.triton.device.running import finite
from iternorm.backends.triton.device.tiles import (
    channels_of,
    follow,
    load_tile,
    over_samples,
    sample_offset,
    sample_offsets,
    samples_of,
    share_of,
    shifted,
    tile_pointers,
)


@triton.jit
def pilot_of(x_ptr, program, M, channels, valid, C, L, TILE: tl.constexpr, APART: tl.constexpr):
    """The mean of a few samples, so that a large mean costs no accuracy (math.md, Eq. 4).

    They are spread over the batch, of which one part may be unlike the others.
    """
    spacing = tl.maximum(M // APART, 1)
    j = tl.minimum(tl.arange(0, APART) * spacing + program * TILE.BL % spacing, M - 1)
    pointers = tile_pointers(x_ptr, sample_offset(j, L, C, TILE), channels, True)
    samples = tl.load(pointers, mask=(j < M)[:, None] & valid[None, :], other=0.0)
    return over_samples(samples.to(tl.float32), True) / APART


@triton.jit
def add_up(sums, tile, TILE: tl.constexpr):
    """Sums of samples of a tile, as many side by side as `sums` has: those that a thread has it adds up alone."""
    APART: tl.constexpr = sums.shape[0]
    BD: tl.constexpr = TILE.BD
    TIMES: tl.constexpr = TILE.BL // APART
    return sums + tl.sum(tile.reshape(TIMES, APART, BD), 0)


@triton.jit
def operands_of(
    x_ptr, start, last, shift, channels, valid, total, squares, C, L, TILE: tl.constexpr, FULL: tl.constexpr
):
    """A tile x = u + v as products take it: u and 2 v in bfloat16; with Σ x and Σ v² added to.

    In the interpreter u is x.
    """
    tile = load_tile(x_ptr, sample_offsets(start, L, C, TILE), channels, start, last, valid, TILE, FULL)
    x = shifted(tile, shift, start, last, valid, TILE, FULL)
    total = add_up(total, x, TILE)
    upper, twice = x, x
    if TILE.PARTS > 0:
        upper, lower = halves(x)
        squares = add_up(squares, lower * lower, TILE)
        twice = (2.0 * lower).to(tl.bfloat16)
    return upper, twice, total, squares


@triton.jit
def own_products(upper, twice, gram, TILE: tl.constexpr):
    """gram + Σ u (u + 2 v)ᵀ, in two products.

    The symmetric part of the sum is Σ x xᵀ less Σ v vᵀ, of which the squares are the diagonal. Besides it there is
    nothing but rounding, unless features are multiples of each other: 3e-6 of their covariance. Tensor cores truncate
    what they add to, so tiles are added outside, where sums are rounded.
    """
    if TILE.PARTS > 0:
        gram += tl.dot(tl.trans(upper), upper, tl.dot(tl.trans(upper), twice))
    else:
        gram = tl.dot(tl.trans(upper), upper, gram, input_precision="ieee")
    return gram


@triton.jit
def stream_tile(
    x_ptr,
    start,
    last,
    shift,
    valid,
    channels,
    gram,
    total,
    squares,
    C,
    L,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Add one tile to the sums."""
    upper, twice, total, squares = operands_of(
        x_ptr, start, last, shift, channels, valid, total, squares, C, L, TILE, FULL
    )
    return own_products(upper, twice, gram, TILE), total, squares


@triton.jit(do_not_specialize=["M", "num_programs"])
def stream_moments(
    x_ptr,
    workspace_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ (x - shift) and Σ (x - shift)(x - shift)ᵀ over a program's tiles.

    The shift is the mean of `APART` samples. Sums of as many samples side by side are kept.
    """
    BD: tl.constexpr = TILE.BD
    program = tl.program_id(0)
    _, valid, channels = channels_of(0, C, L, TILE)
    follow(PDL)

    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    shift = pilot_of(x_ptr, program, M, channels, valid, C, L, TILE, APART)
    gram = tl.zeros([BD, BD], dtype=tl.float32)
    total = tl.zeros([APART, BD], dtype=tl.float32)
    squares = total
    # First, while there is nothing else in registers.
    if has_rest:
        gram, total, squares = stream_tile(
            x_ptr, end, M, shift, valid, channels, gram, total, squares, C, L, TILE, False
        )
    for start in tl.range(first, end, step, num_stages=TILE.STAGES):
        gram, total, squares = stream_tile(
            x_ptr, start, M, shift, valid, channels, gram, total, squares, C, L, TILE, True
        )
    index = tl.arange(0, BD)
    sums = over_samples(total, True)
    if TILE.PARTS > 0:
        diagonal = tl.where(index[:, None] == index[None, :], over_samples(squares, True)[:, None], 0.0)
        gram = 0.5 * (gram + tl.trans(gram)) + diagonal
    # Whoever reads a sum is to see that the batch or one of its squares is not finite.
    bad = tl.sum(tl.sum((~finite(gram)).to(tl.int32), 1), 0)
    sums = tl.where(bad > 0, float("nan"), sums)
    # The partials lie as those of `store_partials`.
    tl.store(workspace_ptr + (program * BD + index)[:, None] * BD + index[None, :], gram)
    place = workspace_ptr + num_programs * BD * BD + program * BD + index
    tl.store(place, sums)
    tl.store(place + num_programs * BD, shift)


@triton.jit
def moved_sums(sums_ptr, pilots_ptr, p, features, there, count, anchor, BD: tl.constexpr):
    """Sums of partials about a common anchor, those about their own pilots, and how far these are from the anchor."""
    places = p[:, None] * BD + features[None, :]
    s = tl.load(sums_ptr + places, mask=there, other=0.0).to(tl.float64)
    pilot = tl.load(pilots_ptr + places, mask=there, other=0.0).to(tl.float64)
    delta = tl.where(there, pilot - anchor[None, :], 0.0)
    return s + count * delta, s, delta


@triton.jit(do_not_specialize=["seen", "M", "num_programs", "unit"])
def join_stream(
    workspace_ptr,
    before_ptr,
    joined_ptr,
    seen,
    M,
    num_programs,
    unit,
    D: tl.constexpr,
    BD: tl.constexpr,
    RB: tl.constexpr,
    CB: tl.constexpr,
    PB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Covariance ``[D, D]``, mean ``[D]`` and how many samples were left out: `RB` x `CB` entries to a program.

    They are those of `seen` samples before and of a batch of M, which is left out if it is not finite. The partials of
    `stream_moments` are moved to a common anchor as in `reduce_moments`. In fp64 the mean keeps all digits of the
    anchor and of the sums about it, however many deviations it is from zero. Sums are added up over the partials at the
    end: in the loop that would be a meeting of the warps at every turn.
    """
    rows = tl.program_id(0) * RB + tl.arange(0, RB)
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    member, member_rows = columns < D, rows < D
    # The mean begins at 16 bytes.
    mean_at = D * D + D % 2
    # What was written by the batch before, and may be read while this one's moments are at work.
    places = rows[:, None] * D + columns[None, :]
    inside = member_rows[:, None] & member[None, :]
    before = tl.load(before_ptr + places, mask=inside, other=0.0)
    old = tl.load(before_ptr + mean_at + columns, mask=member, other=0.0)
    old_rows = tl.load(before_ptr + mean_at + rows, mask=member_rows, other=0.0)
    left_out = tl.load(before_ptr + mean_at + D)
    follow(PDL)

    sums_ptr = workspace_ptr + num_programs * BD * BD
    pilots_ptr = sums_ptr + num_programs * BD
    lines = tl.zeros([PB, RB, CB], dtype=tl.float64)
    total = tl.zeros([PB, CB], dtype=tl.float64)
    total_rows = tl.zeros([PB, RB], dtype=tl.float64)
    anchor = tl.load(pilots_ptr + columns).to(tl.float64)
    anchor_rows = tl.load(pilots_ptr + rows).to(tl.float64)
    for start in tl.range(0, num_programs, PB, num_stages=3):
        p = start + tl.arange(0, PB)
        there = p[:, None] < num_programs
        count = samples_of(p, num_programs, M, unit).to(tl.float64)[:, None]
        moved, _, delta = moved_sums(sums_ptr, pilots_ptr, p, columns, there, count, anchor, BD)
        moved_rows, s_rows, delta_rows = moved_sums(sums_ptr, pilots_ptr, p, rows, there, count, anchor_rows, BD)
        place = (p[:, None, None] * BD + rows[None, :, None]) * BD + columns[None, None, :]
        block = tl.load(workspace_ptr + place, mask=there[:, :, None], other=0.0).to(tl.float64)
        lines += block + (s_rows[:, :, None] * delta[:, None, :] + delta_rows[:, :, None] * moved[:, None, :])
        total += moved
        total_rows += moved_rows

    mean = tl.sum(total, 0) / M
    mean_rows = tl.sum(total_rows, 0) / M
    covariance = tl.sum(lines, 0) / M - mean_rows[:, None] * mean[None, :]
    # As all programs see it.
    is_finite = tl.sum((~finite(mean_rows)).to(tl.int32), 0) == 0
    share = M / ((seen + M).to(tl.float64) - left_out)
    change = anchor + mean - old
    change_rows = anchor_rows + mean_rows - old_rows
    covariance = before + share * (covariance - before + (1.0 - share) * change_rows[:, None] * change[None, :])
    tl.store(joined_ptr + places, tl.where(is_finite, covariance, before), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(joined_ptr + mean_at + columns, tl.where(is_finite, old + share * change, old), mask=member)
        if tl.program_id(1) == 0:
            tl.store(joined_ptr + mean_at + D, tl.where(is_finite, left_out, left_out + M))
