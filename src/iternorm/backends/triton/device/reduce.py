"""The reduction of moments: the partial matrices of all programs of a group, moved to one anchor and added."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import for_each
from iternorm.backends.triton.device.exchange import sent_places
from iternorm.backends.triton.device.running import copy_count
from iternorm.backends.triton.device.tiles import follow, samples_of


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
            present = present & (for_each(row, p) < BC // SPAN)
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
            wanted = mask & (for_each(row, columns)[None, :] == 0)
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
            inside = (columns < D) & (for_each(row, columns) < D)
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
