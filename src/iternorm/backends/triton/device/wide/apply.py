"""Maps of groups too wide for one program: a program has a block of the output's channels, and some of the samples.

For groups above 128 channels, and for smaller matrices that a GPU has no room for. What `apply` does with matrices on
chip is done here block by block: `BC` channels of the output from `DEPTH` of the input. A block is loaded for every
tile, so matrices come as products take them, from `wide.operands`.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import load_block
from iternorm.backends.triton.device.products import on_channels
from iternorm.backends.triton.device.tiles import (
    along_channels,
    channels_at,
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
def add_block(matrix_ptr, rows, columns, tile, acc, TILE: tl.constexpr):
    """acc + matrix tile for a block ``[BC, DEPTH]`` of a matrix ``[BD, BD]``.

    Tensor cores truncate what they add to: in three parts blocks are added up outside of them.
    """
    matrix = load_block(matrix_ptr, rows, columns, TILE.BD, True)
    if TILE.ROWS:
        matrix = tl.trans(matrix)
    if TILE.PARTS == 3:
        acc += on_channels(matrix, tile, tl.zeros_like(acc), TILE.ROWS, TILE.PARTS, True)
    else:
        acc = on_channels(matrix, tile, acc, TILE.ROWS, TILE.PARTS, True)
    return acc


@triton.jit
def wide_forward_tile(
    x_ptr,
    y_ptr,
    residual_ptr,
    matrix_ptr,
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
    for depth in tl.range(0, TILE.BD, TILE.DEPTH, num_stages=TILE.STAGES):
        columns = depth + tl.arange(0, TILE.DEPTH)
        features, valid, channels = channels_at(columns, group, C, L, TILE)
        x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
        if TILE.PARTS != 1:
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
            x = shifted(x, mean, start, last, valid, TILE, FULL)
        y = add_block(matrix_ptr, rows, columns, x, y, TILE)
    y = y * along_channels(scale, TILE.ROWS) + along_channels(offset, TILE.ROWS)
    _, valid, channels = channels_of(group, C, L, TILE, block * TILE.BC)
    y = finished(y, residual_ptr, samples, channels, start, last, valid, TILE, FULL, AFTER)
    store_tile(y_ptr, samples, channels, y, start, last, valid, TILE, FULL)


@triton.jit(do_not_specialize=["M", "num_programs"])
def wide_apply(
    x_ptr,
    y_ptr,
    residual_ptr,
    matrix_ptr,
    mean_ptr,
    weight_ptr,
    offset_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """`apply_forward` of a block of output channels."""
    BD: tl.constexpr = TILE.BD
    BC: tl.constexpr = TILE.BC
    ACROSS: tl.constexpr = BD // BC
    block = tl.program_id(0) % ACROSS
    program = tl.program_id(0) // ACROSS
    group = tl.program_id(1)
    features, valid, _ = channels_of(group, C, L, TILE, block * BC)
    scale = load_vector(weight_ptr, features, valid, WEIGHT, 1.0)
    follow(PDL)
    matrix_ptr += group * BD * BD
    offset = tl.load(offset_ptr + group * BD + block * BC + tl.arange(0, BC))
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in range(first, end, step):
        wide_forward_tile(
            x_ptr, y_ptr, residual_ptr, matrix_ptr, mean_ptr, start, M, block, group, scale, offset, C, L,
            TILE, True, AFTER,
        )  # fmt: skip
    if has_rest:
        wide_forward_tile(
            x_ptr, y_ptr, residual_ptr, matrix_ptr, mean_ptr, end, M, block, group, scale, offset, C, L,
            TILE, False, AFTER,
        )  # fmt: skip


@triton.jit
def wide_backward_tile(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    matrix_ptr,
    second_ptr,
    mean_ptr,
    start,
    last,
    block,
    group,
    offset,
    C,
    L,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    RELU: tl.constexpr,
):
    samples = sample_offsets(start, L, C, TILE)
    rows = block * TILE.BC + tl.arange(0, TILE.BC)
    dx = zero_tile(TILE)
    for depth in tl.range(0, TILE.BD, TILE.DEPTH, num_stages=TILE.STAGES):
        columns = depth + tl.arange(0, TILE.DEPTH)
        features, valid, channels = channels_at(columns, group, C, L, TILE)
        grad = load_tile(grad_ptr, samples, channels, start, last, valid, TILE, FULL)
        grad = passed(grad, output_ptr, samples, channels, start, last, valid, TILE, FULL, RELU)
        x = load_tile(x_ptr, samples, channels, start, last, valid, TILE, FULL)
        if TILE.PARTS != 1:
            grad = grad.to(tl.float32)
            mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
            x = shifted(x, mean, start, last, valid, TILE, FULL)
        dx = add_block(matrix_ptr, rows, columns, grad, dx, TILE)
        dx = add_block(second_ptr, rows, columns, x, dx, TILE)
    dx += along_channels(offset, TILE.ROWS)
    _, valid, channels = channels_of(group, C, L, TILE, block * TILE.BC)
    store_tile(dx_ptr, samples, channels, dx, start, last, valid, TILE, FULL)


@triton.jit(do_not_specialize=["M", "num_programs"])
def wide_apply_backward(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    matrix_ptr,
    second_ptr,
    mean_ptr,
    offset_ptr,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
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
    matrix_ptr += group * BD * BD
    second_ptr += group * BD * BD
    follow(PDL)
    offset = tl.load(offset_ptr + group * BD + block * BC + tl.arange(0, BC))
    first, end, step, has_rest = share_of(program, num_programs, M, TILE)
    for start in range(first, end, step):
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, matrix_ptr, second_ptr, mean_ptr, start, M, block, group, offset,
            C, L, TILE, True, RELU,
        )  # fmt: skip
    if has_rest:
        wide_backward_tile(
            grad_ptr, x_ptr, output_ptr, dx_ptr, matrix_ptr, second_ptr, mean_ptr, end, M, block, group, offset,
            C, L, TILE, False, RELU,
        )  # fmt: skip
