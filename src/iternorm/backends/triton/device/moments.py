"""Moments of an activation: partial sums by block of samples. Forward and backward.

One program sums some tiles of one group. It writes its own partial matrix, so that no floating-point atomics are
needed and two runs give the same bits. `reduce` adds the partials.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.products import in_parts, split_dot
from iternorm.backends.triton.device.tiles import (
    channels_of,
    follow,
    from_the_end,
    gradient_tile,
    load_tile,
    over_samples,
    sample_offsets,
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
