"""y = A (x - shift) + offset, and dx = Aᵀ dy + B (x - shift) + offset: the passes that write an activation.

A program keeps the matrices on chip and runs through its share of the tiles. fp32 input is centred before the product,
so that rounding to TF32 meets small numbers; bfloat16 goes into the product as it is, and the offset takes the mean
through the same rounded matrix.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.tiles import (
    along_channels,
    channels_of,
    column_of,
    finished,
    follow,
    load_tile,
    load_vector,
    matrix_of,
    passed,
    sample_offsets,
    share_of,
    shifted,
    store_tile,
    zero_tile,
)


@triton.jit
def as_operand(matrix, TILE: tl.constexpr):
    """A matrix as `on_channels` takes it: rounded for one part, transposed where tiles are rows."""
    if TILE.PARTS == 1:
        matrix = matrix.to(tl.bfloat16)
    if TILE.ROWS:
        matrix = tl.trans(matrix)
    return matrix


@triton.jit
def rounded_on(matrix, vector):
    """The matrix, rounded as in products of one part, times a vector."""
    return tl.sum(matrix.to(tl.bfloat16).to(tl.float32) * vector[None, :], 1)


@triton.jit
def forward_tile(
    x_ptr,
    y_ptr,
    residual_ptr,
    start,
    last,
    matrix,
    mean,
    offset,
    channels,
    valid,
    C,
    L,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    AFTER: tl.constexpr,
):
    samples = sample_offsets(start, L, C, TILE)
    x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
    y = zero_tile(TILE)
    if TILE.PARTS != 1:
        x = shifted(x, mean, start, last, valid, TILE, FULL)
    y = on_channels(matrix, x, y, TILE.ROWS, TILE.PARTS)
    y += along_channels(offset, TILE.ROWS)
    y = finished(y, residual_ptr, samples, channels, start, last, valid, TILE, FULL, AFTER)
    store_tile(y_ptr, samples, channels, y, start, last, valid, TILE, FULL)


@triton.jit
def forward_tiles(
    x_ptr,
    y_ptr,
    residual_ptr,
    matrix,
    mean,
    offset,
    channels,
    valid,
    program,
    num_programs,
    M,
    C,
    L,
    TILE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """y = matrix (x - mean) + offset over a program's share of the tiles."""
    if TILE.PARTS == 1:
        offset -= rounded_on(matrix, mean)
    operand = as_operand(matrix, TILE)
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in tl.range(first, end, step, num_stages=TILE.STAGES):
        forward_tile(
            x_ptr, y_ptr, residual_ptr, start, M, operand, mean, offset, channels, valid, C, L, TILE, True, AFTER
        )
    if has_rest:
        forward_tile(
            x_ptr, y_ptr, residual_ptr, end, M, operand, mean, offset, channels, valid, C, L, TILE, False, AFTER
        )


@triton.jit(do_not_specialize=["M", "num_programs"])
def apply_forward(
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
    """y = diag(γ) W (x - μ) + β (math.md, Eq. 1), and what follows."""
    D: tl.constexpr = TILE.D
    ROW: tl.constexpr = TILE.SHARED if TILE.SHARED > 0 else TILE.D
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, TILE)
    i, j, inside = matrix_of(group, C, TILE.D, TILE.BD, TILE.SHARED)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
    offset = load_vector(bias_ptr, features, valid, BIAS, 0.0)
    weight = load_vector(weight_ptr, features, valid, WEIGHT, 1.0)
    follow(PDL)
    whitening_ptr += group * D * ROW
    matrix = tl.load(whitening_ptr + i * ROW + column_of(j, TILE.SHARED), mask=inside, other=0.0).to(tl.float32)
    if WEIGHT:
        matrix = matrix * weight[:, None]
    forward_tiles(
        x_ptr, y_ptr, residual_ptr, matrix, mean, offset, channels, valid, program, num_programs, M, C, L,
        TILE, AFTER,
    )  # fmt: skip


@triton.jit
def backward_tile(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    start,
    last,
    first_matrix,
    second_matrix,
    mean,
    offset,
    channels,
    valid,
    C,
    L,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    RELU: tl.constexpr,
):
    samples = sample_offsets(start, L, C, TILE)
    grad = load_tile(grad_ptr, samples, channels, start, last, valid, TILE, FULL)
    grad = passed(grad, output_ptr, samples, channels, start, last, valid, TILE, FULL, RELU)
    x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
    dx = zero_tile(TILE)
    if TILE.PARTS != 1:
        grad = grad.to(tl.float32)
    dx = on_channels(first_matrix, grad, dx, TILE.ROWS, TILE.PARTS)
    if TILE.PARTS != 1:
        x = shifted(x, mean, start, last, valid, TILE, FULL)
    dx = on_channels(second_matrix, x, dx, TILE.ROWS, TILE.PARTS)
    dx += along_channels(offset, TILE.ROWS)
    store_tile(dx_ptr, samples, channels, dx, start, last, valid, TILE, FULL)


@triton.jit
def backward_tiles(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    first_matrix,
    second_matrix,
    mean,
    offset,
    channels,
    valid,
    program,
    num_programs,
    M,
    C,
    L,
    TILE: tl.constexpr,
    RELU: tl.constexpr,
):
    """dx = first dy + second (x - mean) + offset over a program's share of the tiles."""
    of_grad = as_operand(first_matrix, TILE)
    of_x = as_operand(second_matrix, TILE)
    if TILE.PARTS == 1:
        offset -= rounded_on(second_matrix, mean)
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in tl.range(first, end, step, num_stages=TILE.STAGES):
        backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, start, M, of_grad, of_x, mean, offset, channels, valid, C, L,
            TILE, True, RELU,
        )  # fmt: skip
    if has_rest:
        backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, end, M, of_grad, of_x, mean, offset, channels, valid, C, L,
            TILE, False, RELU,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_programs"])
def apply_backward(
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
    """dx = Aᵀ dy + B (x - μ) - Aᵀ Σdy / m (math.md, Eq. 23); dy where the output is positive with an activation."""
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, TILE)
    i, j, inside = matrix_of(group, C, TILE.D, TILE.BD, TILE.SHARED)
    # Row i of Aᵀ: column i of W, scaled by γ of the output channel.
    first_matrix = tl.load(whitening_ptr + group * D * D + j * D + i, mask=inside, other=0.0)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
        first_matrix = first_matrix * weight[None, :]
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
    offset = -tl.sum(first_matrix * (grad_sum / M)[None, :], 1)
    follow(PDL)
    second_matrix = tl.load(second_ptr + group * BD * BD + i * BD + j)
    backward_tiles(
        grad_ptr, x_ptr, output_ptr, dx_ptr, first_matrix, second_matrix, mean, offset, channels, valid, program,
        num_programs, M, C, L, TILE, RELU,
    )  # fmt: skip
