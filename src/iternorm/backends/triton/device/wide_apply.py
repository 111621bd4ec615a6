"""Maps of groups too wide for one program: a program has a block of the output's channels, and a run of samples.

For groups above 128 channels, and for matrices that a GPU has no room for as a whole. Blocks are those of
`wide_moments`; what `apply` does for smaller groups is done here block by block.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.steps import load_block
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
def matrix_block(ptr, rows, columns, D: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr):
    """A block of a matrix ``[D, D]`` as `on_channels` takes it."""
    block = load_block(ptr, rows, columns, D, WHOLE)
    if ROWS:
        block = tl.trans(block)
    return block


@triton.jit
def add_block(tile, matrix, acc, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """acc + matrix tile for a block; 16-bit tiles of one part go in as they are.

    Tensor cores cut off what they add to: in three parts blocks are added up outside of them.
    """
    if PARTS == 1:
        rounded = matrix.to(tl.bfloat16)
        if ROWS:
            acc = tl.dot(tile, rounded, acc)
        else:
            acc = tl.dot(rounded, tile, acc)
    elif PARTS == 3:
        acc += on_channels(matrix, tile, tl.zeros_like(acc), ROWS, PARTS)
    else:
        acc = on_channels(matrix, tile, acc, ROWS, PARTS)
    return acc


@triton.jit
def wide_forward_tile(
    x_ptr,
    y_ptr,
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
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
    STAGES: tl.constexpr,
):
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    rows = block * BC + tl.arange(0, BC)
    y = zero_tile(BC, BL, ROWS)
    for depth in tl.range(0, BD, BC, num_stages=STAGES):
        features, valid, channels = channels_of(group, C, L, D, BC, ROWS, depth)
        matrix = matrix_block(whitening_ptr, rows, depth + tl.arange(0, BC), D, WHOLE, ROWS)
        x = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
        if PARTS != 1:
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
            x = shifted(x, mean, start, last, valid, BL, ROWS, FULL)
        y = add_block(x, matrix, y, ROWS, PARTS)
    y = y * along_channels(scale, ROWS) + along_channels(offset, ROWS)
    if RELU:
        # A NaN stays one.
        y = tl.where(y < 0, 0.0, y)
    _, valid, channels = channels_of(group, C, L, D, BC, ROWS, block * BC)
    store_tile(tile_pointers(y_ptr, samples, channels, ROWS), y, start, last, valid, BL, ROWS, FULL, WHOLE)


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
def wide_apply(
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
    BC: tl.constexpr,
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
    """`apply_forward` of a block of output channels."""
    ACROSS: tl.constexpr = BD // BC
    block = tl.program_id(0) % ACROSS
    program = tl.program_id(0) // ACROSS
    group = tl.program_id(1)
    features, valid, _ = channels_of(group, C, L, D, BC, ROWS, block * BC)
    scale = tl.full([BC], 1.0, dtype=tl.float32)
    if WEIGHT:
        scale = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
    offset = tl.zeros([BC], dtype=tl.float32)
    if BIAS:
        offset = tl.load(bias_ptr + features, mask=valid, other=0.0).to(tl.float32)
    follow(PDL)
    whitening_ptr += group * D * D
    if PARTS == 1:
        taken = tl.zeros([BC], dtype=tl.float32)
        for depth in range(0, BD, BC):
            of_depth, there, _ = channels_of(group, C, L, D, BC, ROWS, depth)
            mean = tl.load(mean_ptr + of_depth, mask=there, other=0.0).to(tl.float32)
            columns = depth + tl.arange(0, BC)
            matrix = load_block(whitening_ptr, block * BC + tl.arange(0, BC), columns, D, WHOLE)
            taken += tl.sum(matrix.to(tl.bfloat16).to(tl.float32) * mean[None, :], 1)
        offset -= scale * taken
    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    middle = first + (last - first) // BL * BL
    for start in range(first, middle, BL):
        wide_forward_tile(
            x_ptr, y_ptr, whitening_ptr, mean_ptr, start, last, block, group, scale, offset, C, L,
            D, BD, BC, BL, ROWS, PARTS, BIG, True, WHOLE, RELU, STAGES,
        )  # fmt: skip
    if middle < last:
        wide_forward_tile(
            x_ptr, y_ptr, whitening_ptr, mean_ptr, middle, last, block, group, scale, offset, C, L,
            D, BD, BC, BL, ROWS, PARTS, BIG, False, WHOLE, RELU, STAGES,
        )  # fmt: skip


@triton.jit
def first_block(
    whitening_ptr,
    weight_ptr,
    group,
    rows,
    columns,
    C,
    D: tl.constexpr,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of Aᵀ, A = diag(γ) W, as `on_channels` takes it."""
    # Rows of Aᵀ are columns of W: where tiles are rows, the block is wanted the other way round once more.
    block = load_block(whitening_ptr, columns, rows, D, WHOLE)
    if WEIGHT:
        there = columns < tl.minimum(D, C - group * D)
        block = block * tl.load(weight_ptr + group * D + columns, mask=there, other=0.0).to(tl.float32)[:, None]
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
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    RELU: tl.constexpr,
    STAGES: tl.constexpr,
):
    samples = sample_offsets(start, L, C, BL, ROWS, BIG)
    rows = block * BC + tl.arange(0, BC)
    dx = zero_tile(BC, BL, ROWS)
    for depth in tl.range(0, BD, BC, num_stages=STAGES):
        features, valid, channels = channels_of(group, C, L, D, BC, ROWS, depth)
        columns = depth + tl.arange(0, BC)
        matrix = first_block(whitening_ptr, weight_ptr, group, rows, columns, C, D, WEIGHT, WHOLE, ROWS)
        grad = load_tile(tile_pointers(grad_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
        grad = passed(grad, output_ptr, samples, channels, start, last, valid, BL, ROWS, FULL, WHOLE, RELU)
        x = load_tile(tile_pointers(x_ptr, samples, channels, ROWS), start, last, valid, BL, ROWS, FULL, WHOLE)
        second = matrix_block(second_ptr, rows, columns, BD, True, ROWS)
        if PARTS != 1:
            grad = grad.to(tl.float32)
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
            x = shifted(x, mean, start, last, valid, BL, ROWS, FULL)
        dx = add_block(grad, matrix, dx, ROWS, PARTS)
        dx = add_block(x, second, dx, ROWS, PARTS)
    dx += along_channels(offset, ROWS)
    _, valid, channels = channels_of(group, C, L, D, BC, ROWS, block * BC)
    store_tile(tile_pointers(dx_ptr, samples, channels, ROWS), dx, start, last, valid, BL, ROWS, FULL, WHOLE)


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
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
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
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
    """`apply_backward` of a block of input channels."""
    ACROSS: tl.constexpr = BD // BC
    block = tl.program_id(0) % ACROSS
    program = tl.program_id(0) // ACROSS
    group = tl.program_id(1)
    rows = block * BC + tl.arange(0, BC)
    whitening_ptr += group * D * D
    second_ptr += group * BD * BD
    follow(PDL)
    offset = tl.zeros([BC], dtype=tl.float32)
    for depth in range(0, BD, BC):
        features, valid, _ = channels_of(group, C, L, D, BC, ROWS, depth)
        columns = depth + tl.arange(0, BC)
        grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
        matrix = first_block(whitening_ptr, weight_ptr, group, rows, columns, C, D, WEIGHT, WHOLE, True)
        offset -= tl.sum(matrix * (grad_sum / M)[:, None], 0)
        if PARTS == 1:
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
            second = load_block(second_ptr, rows, columns, BD, True)
            offset -= tl.sum(second.to(tl.bfloat16).to(tl.float32) * mean[None, :], 1)
    first = program * tiles_per_program * BL
    last = tl.minimum(first + tiles_per_program * BL, M)
    middle = first + (last - first) // BL * BL
    for start in range(first, middle, BL):
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, whitening_ptr, second_ptr, mean_ptr, weight_ptr, start, last, block,
            group, offset, C, L, D, BD, BC, BL, ROWS, WEIGHT, PARTS, BIG, True, WHOLE, RELU, STAGES,
        )  # fmt: skip
    if middle < last:
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, whitening_ptr, second_ptr, mean_ptr, weight_ptr, middle, last, block,
            group, offset, C, L, D, BD, BC, BL, ROWS, WEIGHT, PARTS, BIG, False, WHOLE, RELU, STAGES,
        )  # fmt: skip
