"""Moments of an activation: partial sums by block of samples, then their reduction. Forward and backward.

One program sums a run of tiles of one group. It writes its own partial matrix, so that no floating-point atomics are
needed and two runs give the same bits. A second, small kernel adds the partials, many rows at a time.

A tile is ``[BD, BL]`` (channels by samples) for contiguous memory and ``[BL, BD]`` for channels_last (`ROWS`). BD is
the group size rounded up to a power of two; what lies beyond the group is masked, not copied.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for the launch before, then let the next one be brought up: programmatic dependent launch.

    What the launch before that one wrote, and all that is older, may be read earlier than this: it was complete before
    the launch before let this one begin.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def sample_offsets(start, L, C, BL: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr):
    """Where the samples of a tile begin: sample j is position j % L of item j // L."""
    j = start + tl.arange(0, BL)
    if BIG:
        j = j.to(tl.int64)
    if ROWS:
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
def tile_mask(start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """What of a tile is there: channels of the group and, unless it is `FULL`, samples before the last."""
    if FULL:
        mask = along_channels(valid, ROWS)
    else:
        in_range = start + tl.arange(0, BL) < last
        if ROWS:
            mask = in_range[:, None] & valid[None, :]
        else:
            mask = in_range[None, :] & valid[:, None]
    return mask


@triton.jit
def load_tile(
    pointers, start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr
):
    """A tile, zero outside the group and past the last sample.

    `FULL` says that all its samples are there, `WHOLE` that its group fills it. A mask along the contiguous axis would
    make every load a scalar one, so no mask is given that is not needed.
    """
    if FULL and WHOLE:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=tile_mask(start, last, valid, BL, ROWS, FULL), other=0.0)
    return tile


@triton.jit
def passed(
    tile,
    output_ptr,
    samples,
    channels,
    start,
    last,
    valid,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
):
    """A tile of dy as it goes back through the activation: where the layer's output is positive."""
    if RELU:
        pointers = tile_pointers(output_ptr, samples, channels, ROWS)
        output = load_tile(pointers, start, last, valid, BL, ROWS, FULL, WHOLE)
        tile = tl.where(output > 0, tile, 0.0)
    return tile


@triton.jit
def shifted(tile, shift, start, last, valid, BL: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """tile - shift in fp32, zero past the last sample. Outside the group both are zero already."""
    tile = tile.to(tl.float32) - along_channels(shift, ROWS)
    if not FULL:
        tile = tl.where(tile_mask(start, last, valid, BL, ROWS, False), tile, 0.0)
    return tile


@triton.jit
def high(x):
    return x.to(tl.bfloat16)


@triton.jit
def low(x):
    """What bfloat16 leaves of x, in bfloat16."""
    return (x - x.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def rest(x):
    """What two bfloat16 leave of x, in bfloat16."""
    first = x.to(tl.bfloat16).to(tl.float32)
    second = (x - first).to(tl.bfloat16).to(tl.float32)
    return (x - first - second).to(tl.bfloat16)


@triton.jit
def split_dot(a, b, acc, PARTS: tl.constexpr):
    """acc + a b for fp32 a and b as products of `PARTS` bfloat16 parts each, in fp32; 0 is one product in fp32.

    Two parts (three products) are good to 2^-16, better than TF32; three (six products) to fp32's own rounding. Tensor
    cores take bfloat16 operands in either memory order, TF32 only in one.
    """
    if PARTS == 0:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        if PARTS == 3:
            acc = tl.dot(high(a), rest(b), acc)
            acc = tl.dot(rest(a), high(b), acc)
            acc = tl.dot(low(a), low(b), acc)
        if PARTS > 1:
            acc = tl.dot(high(a), low(b), acc)
            acc = tl.dot(low(a), high(b), acc)
        acc = tl.dot(high(a), high(b), acc)
    return acc


@triton.jit
def gram_tile(
    a_ptr,
    x_ptr,
    output_ptr,
    start,
    last,
    shift,
    channels,
    valid,
    C,
    L,
    gram,
    mixed,
    total,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    SELF: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
):
    """Add one tile to Σ a xᵀ and Σ a. With a = x, products of unlike parts are kept once, in `mixed`."""
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    tile = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
    x = shifted(tile, shift, start, last, valid, BL, ROWS, FULL)
    if SELF:
        total += x
        if PARTS < 2:
            if ROWS:
                gram = split_dot(tl.trans(x), x, gram, PARTS)
            else:
                gram = split_dot(x, tl.trans(x), gram, PARTS)
        else:
            first = high(x)
            second = low(x)
            if ROWS:
                gram = tl.dot(tl.trans(first), first, gram)
                mixed = tl.dot(tl.trans(first), second, mixed)
                if PARTS == 3:
                    gram = tl.dot(tl.trans(second), second, gram)
                    mixed = tl.dot(tl.trans(first), rest(x), mixed)
            else:
                gram = tl.dot(first, tl.trans(first), gram)
                mixed = tl.dot(first, tl.trans(second), mixed)
                if PARTS == 3:
                    gram = tl.dot(second, tl.trans(second), gram)
                    mixed = tl.dot(first, tl.trans(rest(x)), mixed)
    else:
        a = load_tile(tile_pointers(a_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
        a = a.to(tl.float32)
        a = passed(a, output_ptr, samples, channels, start, last, valid, BL, ROWS, FULL, WHOLE, RELU)
        total += a
        if ROWS:
            gram = split_dot(tl.trans(a), x, gram, PARTS)
        else:
            gram = split_dot(a, tl.trans(x), gram, PARTS)
    return gram, mixed, total


@triton.jit(do_not_specialize=["M", "tiles_per_program", "num_programs"])
def partial_moments(
    a_ptr,
    x_ptr,
    output_ptr,
    mean_ptr,
    workspace_ptr,
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
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ a and Σ a (x - shift)ᵀ over a run of tiles.

    Forward (`SELF`): a is x - shift too, and the shift is the mean of the program's own first tile, so that a large
    mean costs no accuracy (math.md, Eq. 4). Backward: a is dy, and the shift is the mean of the batch (Eq. 21); with an
    activation (`RELU`), dy where the output of the layer is positive.
    `WHOLE` says that every group fills its tile: no channel is masked.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    index = tl.arange(0, BD)
    valid = index < tl.minimum(D, C - group * D)
    channels = group * D + index
    if not ROWS:
        channels = channels * L
    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    if not SELF:
        shift = tl.load(mean_ptr + group * D + index, mask=valid, other=0.0)
    follow(PDL)

    if SELF:
        pointers = tile_pointers(x_ptr, sample_offsets(first, L, C, BL, ROWS, BIG), channels, ROWS)
        tile = load_tile(pointers, first, last, valid, BL, ROWS, False, WHOLE).to(tl.float32)
        count = tl.minimum(last - first, BL).to(tl.float32)
        shift = tl.sum(tile, 0 if ROWS else 1) / count
        if PARTS == 1:
            # A bfloat16 value less a bfloat16 shift rounds to bfloat16 with little loss.
            shift = shift.to(tl.bfloat16).to(tl.float32)

    gram = tl.zeros([BD, BD], dtype=tl.float32)
    mixed = tl.zeros([BD, BD], dtype=tl.float32)
    if ROWS:
        total = tl.zeros([BL, BD], dtype=tl.float32)
    else:
        total = tl.zeros([BD, BL], dtype=tl.float32)
    middle = first + (last - first) // BL * BL
    for start in tl.range(first, middle, BL, num_stages=STAGES):
        gram, mixed, total = gram_tile(
            a_ptr, x_ptr, output_ptr, start, last, shift, channels, valid, C, L, gram, mixed, total,
            BL, ROWS, SELF, PARTS, BIG, True, WHOLE, RELU,
        )  # fmt: skip
    if middle < last:
        gram, mixed, total = gram_tile(
            a_ptr, x_ptr, output_ptr, middle, last, shift, channels, valid, C, L, gram, mixed, total,
            BL, ROWS, SELF, PARTS, BIG, False, WHOLE, RELU,
        )  # fmt: skip
    if SELF:
        if PARTS > 1:
            gram += mixed + tl.trans(mixed)

    slot = group * num_programs + program
    slots = tl.num_programs(1) * num_programs
    columns = tl.arange(0, BD)
    tl.store(workspace_ptr + slot * BD * BD + index[:, None] * BD + columns[None, :], gram)
    sums = workspace_ptr + slots * BD * BD + slot * BD
    tl.store(sums + index, tl.sum(total, 0 if ROWS else 1))
    if SELF:
        tl.store(sums + slots * BD + index, shift)


@triton.jit(do_not_specialize=["M", "num_programs", "samples_per_program"])
def reduce_moments(
    workspace_ptr,
    matrix_ptr,
    vector_ptr,
    variance_ptr,
    M,
    C,
    num_programs,
    samples_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    PB: tl.constexpr,
    SELF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the partials of a group, one program a row: mean, covariance and variance, or Σ dy and Σ dy (x - mean)ᵀ.

    A partial about its own pilot p is moved to a common anchor q, the first program's pilot, by
    Σ (x-q)(x-q)ᵀ = G + s δᵀ + δ sᵀ + n δ δᵀ with δ = p - q, and the sum from there to the mean (math.md, Eq. 4).
    """
    follow(PDL)
    group = tl.program_id(0)
    row = tl.program_id(1)
    columns = tl.arange(0, BD)
    base = group * num_programs
    slots = tl.num_programs(0) * num_programs
    sums_ptr = workspace_ptr + slots * BD * BD
    pilots_ptr = sums_ptr + slots * BD

    line = tl.zeros([BD], dtype=tl.float32)
    total = tl.zeros([BD], dtype=tl.float32)
    if SELF:
        anchor = tl.load(pilots_ptr + base * BD + columns)
        anchor_row = tl.load(pilots_ptr + base * BD + row)
    for start in range(0, num_programs, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        slot = (base + p).to(tl.int64)
        mask = present[:, None]
        block = tl.load(workspace_ptr + (slot * BD + row)[:, None] * BD + columns[None, :], mask=mask, other=0.0)
        if SELF:
            wanted = mask
        else:
            wanted = mask & (row == 0)
        s = tl.load(sums_ptr + slot[:, None] * BD + columns[None, :], mask=wanted, other=0.0)
        if SELF:
            count = tl.maximum(tl.minimum(M - p * samples_per_program, samples_per_program), 0).to(tl.float32)
            delta = tl.load(pilots_ptr + slot[:, None] * BD + columns[None, :], mask=mask, other=0.0)
            delta = tl.where(mask, delta - anchor[None, :], 0.0)
            s_row = tl.load(sums_ptr + slot * BD + row, mask=present, other=0.0)
            delta_row = tl.load(pilots_ptr + slot * BD + row, mask=present, other=0.0)
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
    tl.store(matrix_ptr + (group * BD + row) * BD + columns, line)
    member = columns < tl.minimum(D, C - group * D)
    if row == 0:
        tl.store(vector_ptr + group * D + columns, total, mask=member)
    if SELF:
        tl.store(variance_ptr + group * D + columns, line, mask=member & (columns == row))
