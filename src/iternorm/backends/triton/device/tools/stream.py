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
def pilot_of(x_ptr, first, last, channels, valid, C, L, TILE: tl.constexpr, APART: tl.constexpr):
    """The mean of a program's first samples, so that a large mean costs no accuracy (math.md, Eq. 4).

    Few of them: the loop begins after this.
    """
    j = first + tl.arange(0, APART)
    pointers = tile_pointers(x_ptr, sample_offset(j, L, C, TILE), channels, True)
    samples = tl.load(pointers, mask=(j < last)[:, None] & valid[None, :], other=0.0)
    return over_samples(samples.to(tl.float32), True) / tl.minimum(last - first, APART).to(tl.float32)


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

    The shift is the mean of the program's first samples. Sums of `APART` samples side by side are kept.
    """
    BD: tl.constexpr = TILE.BD
    program = tl.program_id(0)
    _, valid, channels = channels_of(0, C, L, TILE)
    follow(PDL)

    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    shift = pilot_of(x_ptr, first, M, channels, valid, C, L, TILE, APART)
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
    CB: tl.constexpr,
    PB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Covariance ``[D, D]``, mean ``[D]`` and how many samples were left out: `CB` columns of a row to a program.

    They are those of `seen` samples before and of a batch of M, which is left out if it is not finite. The partials of
    `stream_moments` are moved to a common anchor as in `reduce_moments`. In fp64 the mean keeps all digits of the
    anchor and of the sums about it, however many deviations it is from zero. Sums are added up over the partials at the
    end: in the loop that would be a meeting of the warps at every turn.
    """
    follow(PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    member = columns < D
    sums_ptr = workspace_ptr + num_programs * BD * BD
    pilots_ptr = sums_ptr + num_programs * BD
    # The mean begins at 16 bytes.
    mean_at = D * D + D % 2
    line = tl.zeros([PB, CB], dtype=tl.float64)
    total = tl.zeros([PB, CB], dtype=tl.float64)
    total_row = tl.zeros([PB], dtype=tl.float64)
    anchor = tl.load(pilots_ptr + columns).to(tl.float64)
    anchor_row = tl.load(pilots_ptr + row).to(tl.float64)
    for start in tl.range(0, num_programs, PB, num_stages=3):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        mask = present[:, None] & member[None, :]
        place = p[:, None] * BD + columns[None, :]
        block = tl.load(workspace_ptr + (p * BD + row)[:, None] * BD + columns[None, :], mask=mask, other=0.0)
        s = tl.load(sums_ptr + place, mask=mask, other=0.0).to(tl.float64)
        delta = tl.load(pilots_ptr + place, mask=mask, other=0.0).to(tl.float64)
        delta = tl.where(mask, delta - anchor[None, :], 0.0)
        s_row = tl.load(sums_ptr + p * BD + row, mask=present, other=0.0).to(tl.float64)
        delta_row = tl.load(pilots_ptr + p * BD + row, mask=present, other=0.0).to(tl.float64)
        delta_row = tl.where(present, delta_row - anchor_row, 0.0)
        count = samples_of(p, num_programs, M, unit).to(tl.float64)
        moved = s + count[:, None] * delta
        line += block.to(tl.float64) + (s_row[:, None] * delta + delta_row[:, None] * moved)
        total += moved
        total_row += s_row + count * delta_row

    total = tl.sum(total, 0) / M
    mean_row = tl.sum(total_row, 0) / M
    covariance = tl.sum(line, 0) / M - mean_row * total
    # As all programs see it.
    is_finite = finite(mean_row)
    left_out = tl.load(before_ptr + mean_at + D)
    share = M / ((seen + M).to(tl.float64) - left_out)
    old = tl.load(before_ptr + mean_at + columns, mask=member, other=0.0)
    change = anchor + total - old
    change_row = anchor_row + mean_row - tl.load(before_ptr + mean_at + row)
    before = tl.load(before_ptr + row * D + columns, mask=member, other=0.0)
    covariance = before + share * (covariance - before + (1.0 - share) * change_row * change)
    tl.store(joined_ptr + row * D + columns, tl.where(is_finite, covariance, before), mask=member)
    if row == 0:
        tl.store(joined_ptr + mean_at + columns, tl.where(is_finite, old + share * change, old), mask=member)
        if tl.program_id(1) == 0:
            tl.store(joined_ptr + mean_at + D, tl.where(is_finite, left_out, left_out + M))
