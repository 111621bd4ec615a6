"""y = A (x - shift) + offset, and dx = Aᵀ dy + B (x - shift) + offset: the passes that write an activation.

A program keeps the matrices on chip and runs through its share of the tiles. fp32 input is centred before the product,
so that rounding to TF32 meets small numbers; bfloat16 goes into the product as it is, and the offset takes the mean
through the same rounded matrix.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.tiles import (
    along_channels,
    channels_of,
    follow,
    load_tile,
    passed,
    sample_offsets,
    shifted,
    store_tile,
    tile_pointers,
    zero_tile,
)


@triton.jit
def forward_tile(
    x_ptr,
    y_ptr,
    start,
    last,
    matrix,
    mean,
    offset,
    channels,
    valid,
    C,
    L,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
):
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    x = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
    y = zero_tile(BD, BL, ROWS)
    if PARTS == 1:
        if ROWS:
            y = tl.dot(x, matrix, y)
        else:
            y = tl.dot(matrix, x, y)
    else:
        y = on_channels(matrix, shifted(x, mean, start, last, valid, BL, ROWS, FULL), y, ROWS, PARTS)
    y += along_channels(offset, ROWS)
    if RELU:
        # A NaN stays one.
        y = tl.where(y < 0, 0.0, y)
    store_tile(tile_pointers(y_ptr, samples, channels, ROWS), y, start, last, valid, BL, ROWS, FULL, WHOLE)


@triton.jit
def forward_tiles(
    x_ptr,
    y_ptr,
    matrix,
    mean,
    offset,
    channels,
    valid,
    program,
    tiles_per_program,
    M,
    C,
    L,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = matrix (x - mean) + offset over a program's share of the tiles."""
    if PARTS == 1:
        rounded = matrix.to(tl.bfloat16)
        offset -= tl.sum(rounded.to(tl.float32) * mean[None, :], 1)
    else:
        rounded = matrix
    if ROWS:
        rounded = tl.trans(rounded)
    first = program * tiles_per_program * BL
    # A program may have no share.
    last = tl.maximum(tl.minimum(first + tiles_per_program * BL, M), first)
    middle = first + (last - first) // BL * BL
    for start in tl.range(first, middle, BL, num_stages=STAGES):
        forward_tile(
            x_ptr, y_ptr, start, last, rounded, mean, offset, channels, valid,
            C, L, BD, BL, ROWS, PARTS, BIG, True, WHOLE, RELU,
        )  # fmt: skip
    if middle < last:
        forward_tile(
            x_ptr, y_ptr, middle, last, rounded, mean, offset, channels, valid,
            C, L, BD, BL, ROWS, PARTS, BIG, False, WHOLE, RELU,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
def apply_forward(
    x_ptr,
    y_ptr,
    whitening_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
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
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = diag(γ) W (x - μ) + β (math.md, Eq. 1), and what is positive of it with an activation."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, D, BD, ROWS)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
    offset = tl.zeros([BD], dtype=tl.float32)
    if BIAS:
        offset = tl.load(bias_ptr + features, mask=valid, other=0.0).to(tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
    follow(PDL)
    matrix = tl.load(whitening_ptr + group * D * D + i * D + j, mask=(i < D) & (j < D), other=0.0).to(tl.float32)
    if WEIGHT:
        matrix = matrix * weight[:, None]
    forward_tiles(
        x_ptr, y_ptr, matrix, mean, offset, channels, valid, program, tiles_per_program, M, C, L,
        BD, BL, ROWS, PARTS, BIG, WHOLE, RELU, STAGES,
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
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
):
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    grad = load_tile(tile_pointers(grad_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
    grad = passed(grad, output_ptr, samples, channels, start, last, valid, BL, ROWS, FULL, WHOLE, RELU)
    x = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
    dx = zero_tile(BD, BL, ROWS)
    if PARTS == 1:
        if ROWS:
            dx = tl.dot(grad, first_matrix, dx)
            dx = tl.dot(x, second_matrix, dx)
        else:
            dx = tl.dot(first_matrix, grad, dx)
            dx = tl.dot(second_matrix, x, dx)
    else:
        dx = on_channels(first_matrix, grad.to(tl.float32), dx, ROWS, PARTS)
        dx = on_channels(second_matrix, shifted(x, mean, start, last, valid, BL, ROWS, FULL), dx, ROWS, PARTS)
    dx += along_channels(offset, ROWS)
    store_tile(tile_pointers(dx_ptr, samples, channels, ROWS), dx, start, last, valid, BL, ROWS, FULL, WHOLE)


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
    tiles_per_program,
    M,
    C,
    L,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = first dy + second (x - mean) + offset over a program's share of the tiles."""
    if PARTS == 1:
        first_rounded = first_matrix.to(tl.bfloat16)
        second_rounded = second_matrix.to(tl.bfloat16)
        offset -= tl.sum(second_rounded.to(tl.float32) * mean[None, :], 1)
    else:
        first_rounded = first_matrix
        second_rounded = second_matrix
    if ROWS:
        first_rounded = tl.trans(first_rounded)
        second_rounded = tl.trans(second_rounded)
    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    middle = first + (last - first) // BL * BL
    for start in tl.range(first, middle, BL, num_stages=STAGES):
        backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, start, last, first_rounded, second_rounded, mean, offset, channels,
            valid, C, L, BD, BL, ROWS, PARTS, BIG, True, WHOLE, RELU,
        )  # fmt: skip
    if middle < last:
        backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, middle, last, first_rounded, second_rounded, mean, offset, channels,
            valid, C, L, BD, BL, ROWS, PARTS, BIG, False, WHOLE, RELU,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
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
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """dx = Aᵀ dy + B (x - μ) - Aᵀ Σdy / m (math.md, Eq. 23); dy where the output is positive with an activation."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, D, BD, ROWS)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    # Row i of Aᵀ: column i of W, scaled by γ of the output channel.
    first_matrix = tl.load(whitening_ptr + group * D * D + j * D + i, mask=(i < D) & (j < D), other=0.0)
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
        tiles_per_program, M, C, L, BD, BL, ROWS, PARTS, BIG, WHOLE, RELU, STAGES,
    )  # fmt: skip
