"""Moments of an activation: partial sums by block of samples, then their reduction. Forward and backward.

One program sums a run of tiles of one group. It writes its own partial matrix, so that no floating-point atomics are
needed and two runs give the same bits. A second, small kernel adds the partials, many rows at a time.

A tile is ``[BD, BL]`` (channels by samples) for contiguous memory and ``[BL, BD]`` for channels_last (`ROWS`). BD is
the group size rounded up to a power of two; what lies beyond the group is masked, not copied.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false
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
def halves(x):
    """x rounded to bfloat16, and what that leaves of it in fp32. A NaN may become a zero, which leaves NaN.

    In integers: for a conversion there and back the compiler takes slow instructions.
    """
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return upper, x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """The bfloat16 parts of x, largest first; those that are not there stand for the last."""
    if PARTS == 1:
        first = x.to(tl.bfloat16)
        second, third = first, first
    else:
        first, left = halves(x)
        if PARTS == 2:
            second = left.to(tl.bfloat16)
            third = second
        else:
            second, left = halves(left)
            third = left.to(tl.bfloat16)
    return first, second, third


@triton.jit
def beside(a, b):
    """[a, b]. No data moves: each thread has the same place of both."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def above(a, b):
    """[a; b]."""
    return tl.join(a, b).permute(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


@triton.jit
def split_dot(a, b, acc, PARTS: tl.constexpr):
    """acc + a b for fp32 a and b as products of `PARTS` bfloat16 parts each, in fp32; 0 is one product in fp32.

    Two parts (three products) are good to 2^-16, better than TF32; three (six products) to fp32's own rounding. Tensor
    cores take bfloat16 operands in either memory order, TF32 only in one.
    """
    if PARTS == 0:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        a1, a2, a3 = in_parts(a, PARTS)
        b1, b2, b3 = in_parts(b, PARTS)
        if PARTS == 3:
            acc = tl.dot(a1, b3, acc)
            acc = tl.dot(a3, b1, acc)
            acc = tl.dot(a2, b2, acc)
        if PARTS > 1:
            acc = tl.dot(a1, b2, acc)
            acc = tl.dot(a2, b1, acc)
        acc = tl.dot(a1, b1, acc)
    return acc


@triton.jit
def gram_tile(
    a_ptr,
    x_ptr,
    output_ptr,
    start,
    first,
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
    """Add one tile to Σ a xᵀ and Σ a. With a = x, products of unlike parts are kept once, in `mixed`.

    The program's `first` tile gives the shift of a = x. Tensor cores cut off what they add to: in three parts they add
    up a tile alone, and the tiles are added outside, where sums are rounded.
    """
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    tile = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
    if SELF:
        if start == first:
            count = tl.minimum(last - first, BL).to(tl.float32)
            shift = tl.sum(tile.to(tl.float32), 0 if ROWS else 1) / count
            if PARTS == 1:
                # A bfloat16 value less a bfloat16 shift rounds to bfloat16 with little loss.
                shift = shift.to(tl.bfloat16).to(tl.float32)
    x = shifted(tile, shift, start, last, valid, BL, ROWS, FULL)
    if SELF:
        total += x
        if PARTS < 2:
            if ROWS:
                gram = split_dot(tl.trans(x), x, gram, PARTS)
            else:
                gram = split_dot(x, tl.trans(x), gram, PARTS)
        else:
            x1, x2, x3 = in_parts(x, PARTS)
            if ROWS:
                left1, right1, left2, right2, right3 = tl.trans(x1), x1, tl.trans(x2), x2, x3
            else:
                left1, right1, left2, right2, right3 = x1, tl.trans(x1), x2, tl.trans(x2), tl.trans(x3)
            mixed = tl.dot(left1, right2, mixed)
            if PARTS == 3:
                mixed = tl.dot(left1, right3, mixed)
                gram += tl.dot(left1, right1, tl.dot(left2, right2))
            else:
                gram = tl.dot(left1, right1, gram)
    else:
        a = load_tile(tile_pointers(a_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
        a = a.to(tl.float32)
        a = passed(a, output_ptr, samples, channels, start, last, valid, BL, ROWS, FULL, WHOLE, RELU)
        total += a
        left, right = a, x
        if ROWS:
            left = tl.trans(a)
        else:
            right = tl.trans(x)
        if PARTS == 3:
            gram += split_dot(left, right, tl.zeros_like(gram), PARTS)
        else:
            gram = split_dot(left, right, gram, PARTS)
    return gram, mixed, total, shift


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
        shift = tl.zeros([BD], dtype=tl.float32)
    gram = tl.zeros([BD, BD], dtype=tl.float32)
    mixed = tl.zeros([BD, BD], dtype=tl.float32)
    if ROWS:
        total = tl.zeros([BL, BD], dtype=tl.float32)
    else:
        total = tl.zeros([BD, BL], dtype=tl.float32)
    middle = first + (last - first) // BL * BL
    for start in tl.range(first, middle, BL, num_stages=STAGES):
        gram, mixed, total, shift = gram_tile(
            a_ptr, x_ptr, output_ptr, start, first, last, shift, channels, valid, C, L, gram, mixed, total,
            BL, ROWS, SELF, PARTS, BIG, True, WHOLE, RELU,
        )  # fmt: skip
    if middle < last:
        gram, mixed, total, shift = gram_tile(
            a_ptr, x_ptr, output_ptr, middle, first, last, shift, channels, valid, C, L, gram, mixed, total,
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
    num_batches_ptr,
    batches_ptr,
    M,
    C,
    num_programs,
    samples_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    PB: tl.constexpr,
    SELF: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the partials of a group, one program a row: mean, covariance and variance, or Σ dy and Σ dy (x - mean)ᵀ.

    A partial about its own pilot p is moved to a common anchor q, the first program's pilot, by
    Σ (x-q)(x-q)ᵀ = G + s δᵀ + δ sᵀ + n δ δᵀ with δ = p - q, and the sum from there to the mean (math.md, Eq. 4).
    With `COUNT` the number of batches so far is copied: a later launch counts this one while others of it read that.
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
        if COUNT:
            if group == 0:
                tl.store(batches_ptr, tl.load(num_batches_ptr))
    if SELF:
        tl.store(variance_ptr + group * D + columns, line, mask=member & (columns == row))
