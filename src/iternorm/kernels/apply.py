"""y = A (x - shift) + offset, and dx = Aᵀ dy + B (x - shift) + offset: the passes that write an activation.

A program keeps the matrices on chip and runs through its share of the tiles. fp32 input is centred before the product,
so that rounding to TF32 meets small numbers; bfloat16 goes into the product as it is, and the offset takes the mean
through the same rounded matrix.
"""

import triton
import triton.language as tl

from iternorm.kernels.moments import load_tile, sample_offsets, shifted


@triton.jit
def store_tile(ptr, value, samples, in_range, channels, valid, ROWS: tl.constexpr):
    if ROWS:
        mask = in_range[:, None] & valid[None, :]
        tl.store(ptr + samples[:, None] + channels[None, :], value.to(ptr.dtype.element_ty), mask=mask)
    else:
        mask = in_range[None, :] & valid[:, None]
        tl.store(ptr + samples[None, :] + channels[:, None], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def operand(tile, NATIVE: tl.constexpr):
    if NATIVE:
        return tile
    return tile.to(tl.float32)


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
def apply_forward(
    x_ptr,
    y_ptr,
    whitening_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    num_batches_ptr,
    finite_ptr,
    M,
    C,
    L,
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    COUNT: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BIG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = diag(γ) W (x - μ) + β (math.md, Eq. 2)."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    index = tl.arange(0, BD)
    valid = index < tl.minimum(D, C - group * D)
    features = group * D + index
    channels = features
    if not ROWS:
        channels = features * L
    i = index[:, None]
    j = index[None, :]
    matrix = tl.load(whitening_ptr + group * D * D + i * D + j, mask=(i < D) & (j < D), other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
        matrix = matrix * weight[:, None]
    offset = tl.zeros([BD], dtype=tl.float32)
    if BIAS:
        offset = tl.load(bias_ptr + features, mask=valid, other=0.0).to(tl.float32)
    if NATIVE:
        matrix = matrix.to(x_ptr.dtype.element_ty)
        offset -= tl.sum(matrix.to(tl.float32) * mean[None, :], 1)
    if ROWS:
        matrix = tl.trans(matrix)

    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    for start in tl.range(first, last, BL, num_stages=STAGES):
        in_range = start + tl.arange(0, BL) < last
        samples = sample_offsets(start, L, C, BL, ROWS, BIG)
        x = load_tile(x_ptr, samples, in_range, channels, valid, ROWS)
        if not NATIVE:
            x = shifted(x, mean, in_range, ROWS)
        if ROWS:
            y = tl.dot(x, matrix, input_precision=PRECISION) + offset[None, :]
        else:
            y = tl.dot(matrix, x, input_precision=PRECISION) + offset[:, None]
        store_tile(y_ptr, y, samples, in_range, channels, valid, ROWS)
    if COUNT:
        if (program == 0) & (group == 0):
            tl.store(num_batches_ptr, tl.load(num_batches_ptr) + tl.load(finite_ptr))


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
def apply_backward(
    grad_ptr,
    x_ptr,
    dx_ptr,
    whitening_ptr,
    second_ptr,
    mean_ptr,
    grad_sum_ptr,
    weight_ptr,
    M,
    C,
    L,
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BIG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = Aᵀ dy + B (x - μ) - Aᵀ Σdy / m (math.md, Eq. 24)."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    index = tl.arange(0, BD)
    valid = index < tl.minimum(D, C - group * D)
    features = group * D + index
    channels = features
    if not ROWS:
        channels = features * L
    i = index[:, None]
    j = index[None, :]
    # Row i of Aᵀ: column i of W, scaled by γ of the output channel.
    first_matrix = tl.load(whitening_ptr + group * D * D + j * D + i, mask=(i < D) & (j < D), other=0.0)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
        first_matrix = first_matrix * weight[None, :]
    second_matrix = tl.load(second_ptr + group * BD * BD + i * BD + j)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
    offset = -tl.sum(first_matrix * (grad_sum / M)[None, :], 1)
    if NATIVE:
        first_matrix = first_matrix.to(x_ptr.dtype.element_ty)
        second_matrix = second_matrix.to(x_ptr.dtype.element_ty)
        offset -= tl.sum(second_matrix.to(tl.float32) * mean[None, :], 1)
    if ROWS:
        first_matrix = tl.trans(first_matrix)
        second_matrix = tl.trans(second_matrix)

    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    for start in tl.range(first, last, BL, num_stages=STAGES):
        in_range = start + tl.arange(0, BL) < last
        samples = sample_offsets(start, L, C, BL, ROWS, BIG)
        grad = operand(load_tile(grad_ptr, samples, in_range, channels, valid, ROWS), NATIVE)
        x = load_tile(x_ptr, samples, in_range, channels, valid, ROWS)
        if not NATIVE:
            x = shifted(x, mean, in_range, ROWS)
        if ROWS:
            dx = tl.dot(grad, first_matrix, input_precision=PRECISION)
            dx = tl.dot(x, second_matrix, dx, input_precision=PRECISION) + offset[None, :]
        else:
            dx = tl.dot(first_matrix, grad, input_precision=PRECISION)
            dx = tl.dot(second_matrix, x, dx, input_precision=PRECISION) + offset[:, None]
        store_tile(dx_ptr, dx, samples, in_range, channels, valid, ROWS)
