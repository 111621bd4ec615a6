"""Maps of groups too wide for one program: a program has a block of the output's channels, and some of the samples.

For groups above 128 channels, and for smaller matrices that a GPU has no room for. Blocks are those of `wide_moments`;
what `apply` does with matrices on chip is done here block by block, and a block is loaded for every tile. A launch is
of a kernel here or of its counterpart there, with the same arguments.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import as_operand, rounded_on
from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.steps import load_block
from iternorm.backends.triton.device.tiles import (
    along_channels,
    channels_of,
    finished,
    follow,
    load_tile,
    load_vector,
    passed,
    sample_offsets,
    share_of,
    shifted,
    store_tile,
    zero_tile,
)


@triton.jit
def add_block(tile, operand, acc, TILE: tl.constexpr):
    """acc + matrix tile for a block of the matrix, as `as_operand` gives it.

    Tensor cores truncate what they add to: in three parts blocks are added up outside of them.
    """
    if TILE.PARTS == 3:
        acc += on_channels(operand, tile, tl.zeros_like(acc), TILE.ROWS, TILE.PARTS)
    else:
        acc = on_channels(operand, tile, acc, TILE.ROWS, TILE.PARTS)
    return acc


@triton.jit
def wide_forward_tile(
    x_ptr,
    y_ptr,
    residual_ptr,
    whitening_ptr,
    mean_ptr,
    start,
    last,
    block,
    group,
    scale,
    offset,
    C,
    L,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    AFTER: tl.constexpr,
):
    samples = sample_offsets(start, L, C, TILE)
    rows = block * TILE.BC + tl.arange(0, TILE.BC)
    y = zero_tile(TILE)
    for depth in tl.range(0, TILE.BD, TILE.BC, num_stages=TILE.STAGES):
        features, valid, channels = channels_of(group, C, L, TILE, depth)
        matrix = load_block(whitening_ptr, rows, depth + tl.arange(0, TILE.BC), TILE.D, TILE.EVEN)
        x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
        if TILE.PARTS != 1:
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
            x = shifted(x, mean, start, last, valid, TILE, FULL)
        y = add_block(x, as_operand(matrix, TILE), y, TILE)
    y = y * along_channels(scale, TILE.ROWS) + along_channels(offset, TILE.ROWS)
    _, valid, channels = channels_of(group, C, L, TILE, block * TILE.BC)
    y = finished(y, residual_ptr, samples, channels, start, last, valid, TILE, FULL, AFTER)
    store_tile(y_ptr, samples, channels, y, start, last, valid, TILE, FULL)


@triton.jit(do_not_specialize=["M", "num_programs"])
def wide_apply(
    x_ptr,
    y_ptr,
    residual_ptr,
    whitening_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """`apply_forward` of a block of output channels."""
    BC: tl.constexpr = TILE.BC
    ACROSS: tl.constexpr = TILE.BD // BC
    block = tl.program_id(0) % ACROSS
    program = tl.program_id(0) // ACROSS
    group = tl.program_id(1)
    features, valid, _ = channels_of(group, C, L, TILE, block * BC)
    scale = load_vector(weight_ptr, features, valid, WEIGHT, 1.0)
    offset = load_vector(bias_ptr, features, valid, BIAS, 0.0)
    follow(PDL)
    whitening_ptr += group * TILE.D * TILE.D
    if TILE.PARTS == 1:
        taken = tl.zeros([BC], dtype=tl.float32)
        for depth in range(0, TILE.BD, BC):
            of_depth, there, _ = channels_of(group, C, L, TILE, depth)
            mean = tl.load(mean_ptr + of_depth, mask=there, other=0.0).to(tl.float32)
            columns = depth + tl.arange(0, BC)
            matrix = load_block(whitening_ptr, block * BC + tl.arange(0, BC), columns, TILE.D, TILE.EVEN)
            taken += rounded_on(matrix, mean)
        offset -= scale * taken
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in range(first, end, step):
        wide_forward_tile(
            x_ptr, y_ptr, residual_ptr, whitening_ptr, mean_ptr, start, M, block, group, scale, offset, C, L,
            TILE, True, AFTER,
        )  # fmt: skip
    if has_rest:
        wide_forward_tile(
            x_ptr, y_ptr, residual_ptr, whitening_ptr, mean_ptr, end, M, block, group, scale, offset, C, L,
            TILE, False, AFTER,
        )  # fmt: skip


@triton.jit
def first_block(
    whitening_ptr, weight_ptr, group, rows, columns, C, TILE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr
):
    """A block of Aᵀ, A = diag(γ) W, transposed where tiles are rows (`ROWS`)."""
    # Rows of Aᵀ are columns of W: where tiles are rows, the block is transposed once more, which is none at all.
    block = load_block(whitening_ptr, columns, rows, TILE.D, TILE.EVEN)
    if WEIGHT:
        there = columns < tl.minimum(TILE.D, C - group * TILE.D)
        block = block * tl.load(weight_ptr + group * TILE.D + columns, mask=there, other=0.0).to(tl.float32)[:, None]
    if not ROWS:
        block = tl.trans(block)
    return block


@triton.jit
def wide_backward_tile(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    whitening_ptr,
    second_ptr,
    mean_ptr,
    weight_ptr,
    start,
    last,
    block,
    group,
    offset,
    C,
    L,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    FULL: tl.constexpr,
    RELU: tl.constexpr,
):
    samples = sample_offsets(start, L, C, TILE)
    rows = block * TILE.BC + tl.arange(0, TILE.BC)
    dx = zero_tile(TILE)
    for depth in tl.range(0, TILE.BD, TILE.BC, num_stages=TILE.STAGES):
        features, valid, channels = channels_of(group, C, L, TILE, depth)
        columns = depth + tl.arange(0, TILE.BC)
        matrix = first_block(whitening_ptr, weight_ptr, group, rows, columns, C, TILE, WEIGHT, TILE.ROWS)
        grad = load_tile(grad_ptr, samples, channels, start, last, valid, TILE, FULL)
        grad = passed(grad, output_ptr, samples, channels, start, last, valid, TILE, FULL, RELU)
        x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
        second = load_block(second_ptr, rows, columns, TILE.BD, True)
        if TILE.PARTS == 1:
            matrix = matrix.to(tl.bfloat16)
        else:
            grad = grad.to(tl.float32)
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
            x = shifted(x, mean, start, last, valid, TILE, FULL)
        dx = add_block(grad, matrix, dx, TILE)
        dx = add_block(x, as_operand(second, TILE), dx, TILE)
    dx += along_channels(offset, TILE.ROWS)
    _, valid, channels = channels_of(group, C, L, TILE, block * TILE.BC)
    store_tile(dx_ptr, samples, channels, dx, start, last, valid, TILE, FULL)


@triton.jit(do_not_specialize=["M", "num_programs"])
def wide_apply_backward(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    whitening_ptr,
    second_ptr,
    mean_ptr,
    grad_sum_ptr,
    weight_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """`apply_backward` of a block of input channels."""
    BD: tl.constexpr = TILE.BD
    BC: tl.constexpr = TILE.BC
    ACROSS: tl.constexpr = BD // BC
    block = tl.program_id(0) % ACROSS
    program = tl.program_id(0) // ACROSS
    group = tl.program_id(1)
    rows = block * BC + tl.arange(0, BC)
    whitening_ptr += group * TILE.D * TILE.D
    second_ptr += group * BD * BD
    follow(PDL)
    offset = tl.zeros([BC], dtype=tl.float32)
    for depth in range(0, BD, BC):
        features, valid, _ = channels_of(group, C, L, TILE, depth)
        columns = depth + tl.arange(0, BC)
        grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
        matrix = first_block(whitening_ptr, weight_ptr, group, rows, columns, C, TILE, WEIGHT, True)
        offset -= tl.sum(matrix * (grad_sum / M)[:, None], 0)
        if TILE.PARTS == 1:
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
            second = load_block(second_ptr, rows, columns, BD, True)
            offset -= rounded_on(second, mean)
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in range(first, end, step):
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, whitening_ptr, second_ptr, mean_ptr, weight_ptr, start, M, block,
            group, offset, C, L, TILE, WEIGHT, True, RELU,
        )  # fmt: skip
    if has_rest:
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, whitening_ptr, second_ptr, mean_ptr, weight_ptr, end, M, block,
            group, offset, C, L, TILE, WEIGHT, False, RELU,
        )  # fmt: skip
