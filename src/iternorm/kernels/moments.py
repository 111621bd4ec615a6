"""Moments of an activation: partial sums by block of samples, then their reduction. Forward and backward.

One program sums a run of tiles of one group. It writes its own partial matrix, so that no floating-point atomics are
needed and two runs give the same bits. A second, small kernel adds the partials, many rows at a time.

A tile is ``[BD, BL]`` (channels by samples) for contiguous memory and ``[BL, BD]`` for channels_last (`ROWS`). BD is the
group size rounded up to a power of two; what lies beyond the group is masked, not copied.
"""

import triton
import triton.language as tl


@triton.jit
def sample_offsets(start, L, C, BL: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr):
    """Where the samples of a tile begin: sample j is position j % L of item j // L."""
    j = start + tl.arange(0, BL)
    if ROWS:
        if BIG:
            return j.to(tl.int64) * C
        return j * C
    n = j // L
    position = j - n * L
    if BIG:
        return n.to(tl.int64) * (C * L) + position
    return n * (C * L) + position


@triton.jit
def load_tile(ptr, samples, in_range, channels, valid, ROWS: tl.constexpr):
    """A tile, zero outside the group and past the last sample. `channels` is scaled by the channel stride."""
    if ROWS:
        return tl.load(ptr + samples[:, None] + channels[None, :], mask=in_range[:, None] & valid[None, :], other=0.0)
    return tl.load(ptr + samples[None, :] + channels[:, None], mask=in_range[None, :] & valid[:, None], other=0.0)


@triton.jit
def shifted(tile, shift, in_range, ROWS: tl.constexpr):
    """tile - shift in fp32, zero past the last sample."""
    if ROWS:
        return tl.where(in_range[:, None], tile.to(tl.float32) - shift[None, :], 0.0)
    return tl.where(in_range[None, :], tile.to(tl.float32) - shift[:, None], 0.0)


@triton.jit(do_not_specialize=["M", "tiles_per_program", "num_programs"])
def partial_moments(
    a_ptr,
    x_ptr,
    mean_ptr,
    gram_ptr,
    sum_ptr,
    pilot_ptr,
    M,
    C,
    L,
    tiles_per_program,
    num_programs,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    SELF: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BIG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ a and Σ a (x - shift)ᵀ over a run of tiles.

    Forward (`SELF`): a is x - shift too, and the shift is the mean of the program's own first tile, so that a large
    mean costs no accuracy (math.md, Eq. 4). Backward: a is dy, and the shift is the mean of the batch (Eq. 21).
    `NATIVE` keeps the product's operands in the activation's own dtype (bfloat16).
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    index = tl.arange(0, BD)
    valid = index < tl.minimum(D, C - group * D)
    if ROWS:
        channels = group * D + index
    else:
        channels = (group * D + index) * L
    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)

    if SELF:
        in_range = first + tl.arange(0, BL) < last
        samples = sample_offsets(first, L, C, BL, ROWS, BIG)
        tile = load_tile(x_ptr, samples, in_range, channels, valid, ROWS).to(tl.float32)
        count = tl.minimum(last - first, BL).to(tl.float32)
        shift = tl.sum(tile, 0 if ROWS else 1) / count
        if NATIVE:
            # Taken from a bfloat16 value, a bfloat16 shift leaves a difference that rounds to bfloat16 with little loss.
            shift = shift.to(x_ptr.dtype.element_ty).to(tl.float32)
    else:
        shift = tl.load(mean_ptr + group * D + index, mask=valid, other=0.0)

    gram = tl.zeros([BD, BD], dtype=tl.float32)
    if ROWS:
        total = tl.zeros([BL, BD], dtype=tl.float32)
    else:
        total = tl.zeros([BD, BL], dtype=tl.float32)
    for start in tl.range(first, last, BL, num_stages=STAGES):
        in_range = start + tl.arange(0, BL) < last
        samples = sample_offsets(start, L, C, BL, ROWS, BIG)
        x = shifted(load_tile(x_ptr, samples, in_range, channels, valid, ROWS), shift, in_range, ROWS)
        if SELF:
            total += x
            if NATIVE:
                x = x.to(x_ptr.dtype.element_ty)
            a = x
        else:
            a = load_tile(a_ptr, samples, in_range, channels, valid, ROWS)
            total += a.to(tl.float32)
            if NATIVE:
                x = x.to(x_ptr.dtype.element_ty)
            else:
                a = a.to(tl.float32)
        if ROWS:
            gram = tl.dot(tl.trans(a), x, gram, input_precision=PRECISION)
        else:
            gram = tl.dot(a, tl.trans(x), gram, input_precision=PRECISION)

    slot = group * num_programs + program
    columns = tl.arange(0, BD)
    tl.store(gram_ptr + slot * BD * BD + index[:, None] * BD + columns[None, :], gram)
    tl.store(sum_ptr + slot * BD + index, tl.sum(total, 0 if ROWS else 1))
    if SELF:
        tl.store(pilot_ptr + slot * BD + index, shift)


@triton.jit(do_not_specialize=["M", "num_programs", "samples_per_program"])
def reduce_moments(
    gram_ptr,
    sum_ptr,
    pilot_ptr,
    matrix_ptr,
    vector_ptr,
    variance_ptr,
    M,
    C,
    num_programs,
    samples_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    RB: tl.constexpr,
    PB: tl.constexpr,
    SELF: tl.constexpr,
):
    """Join the partials of a group: mean, covariance and variance (`SELF`), or Σ dy and Σ dy (x - mean)ᵀ.

    A partial about its own pilot p is moved to the common mean μ by Σ (x-μ)(x-μ)ᵀ = G + s δᵀ + δ sᵀ + n δ δᵀ with
    δ = p - μ (math.md, Eq. 4).
    """
    group = tl.program_id(0)
    rows = tl.program_id(1) * RB + tl.arange(0, RB)
    columns = tl.arange(0, BD)
    size = tl.minimum(D, C - group * D)
    base = group * num_programs

    vector = tl.zeros([BD], dtype=tl.float32)
    anchor = tl.zeros([BD], dtype=tl.float32)
    if SELF:
        anchor = tl.load(pilot_ptr + base * BD + columns)
    for start in range(0, num_programs, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        part = tl.load(sum_ptr + (base + p)[:, None] * BD + columns[None, :], mask=present[:, None], other=0.0)
        if SELF:
            count = tl.maximum(tl.minimum(M - p * samples_per_program, samples_per_program), 0).to(tl.float32)
            pilot = tl.load(pilot_ptr + (base + p)[:, None] * BD + columns[None, :], mask=present[:, None], other=0.0)
            part += tl.where(present[:, None], count[:, None] * (pilot - anchor[None, :]), 0.0)
        vector += tl.sum(part, 0)
    if SELF:
        vector = anchor + vector / M

    matrix = tl.zeros([RB, BD], dtype=tl.float32)
    for start in range(0, num_programs, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        slot = (base + p)[:, None, None]
        block = tl.load(
            gram_ptr + slot * (BD * BD) + rows[None, :, None] * BD + columns[None, None, :],
            mask=present[:, None, None],
            other=0.0,
        )
        if SELF:
            count = tl.maximum(tl.minimum(M - p * samples_per_program, samples_per_program), 0).to(tl.float32)
            count = tl.where(present, count, 0.0)
            flat = base + p
            mask = present[:, None]
            s_row = tl.load(sum_ptr + flat[:, None] * BD + rows[None, :], mask=mask, other=0.0)
            s_col = tl.load(sum_ptr + flat[:, None] * BD + columns[None, :], mask=mask, other=0.0)
            d_row = tl.load(pilot_ptr + flat[:, None] * BD + rows[None, :], mask=mask, other=0.0)
            d_col = tl.load(pilot_ptr + flat[:, None] * BD + columns[None, :], mask=mask, other=0.0)
            # The mean of these rows, picked out of the vector over all columns.
            pick = rows[:, None] == columns[None, :]
            mean_row = tl.sum(tl.where(pick, vector[None, :], 0.0), 1)
            d_row = tl.where(mask, d_row - mean_row[None, :], 0.0)
            d_col = tl.where(mask, d_col - vector[None, :], 0.0)
            block += s_row[:, :, None] * d_col[:, None, :] + d_row[:, :, None] * s_col[:, None, :]
            block += count[:, None, None] * d_row[:, :, None] * d_col[:, None, :]
        matrix += tl.sum(block, 0)
    if SELF:
        matrix = matrix / M
    tl.store(matrix_ptr + group * BD * BD + rows[:, None] * BD + columns[None, :], matrix)
    if tl.program_id(1) == 0:
        tl.store(vector_ptr + group * D + columns, vector, mask=columns < size)
    if SELF:
        diagonal = tl.sum(tl.where(rows[:, None] == columns[None, :], matrix, 0.0), 1)
        tl.store(variance_ptr + group * D + rows, diagonal, mask=rows < size)
