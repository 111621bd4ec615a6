"""Matrices of wide groups as the products of `wide.apply` take them, and what is added to those products.

A program of `wide.apply` loads the blocks of a matrix again for every tile. What is done to the matrix is done here,
once: a loop that multiplies what it has loaded, and no more, overlaps its loads with its products
(docs/decisions/prepared-operands.md).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import load_block, store_block
from iternorm.backends.triton.device.products import as_tf32
from iternorm.backends.triton.device.tiles import follow, load_vector


@triton.jit
def as_stored(block, TILE: tl.constexpr):
    """A part of a matrix, rounded to what the tensor cores will read of it. In three parts it is split later."""
    if TILE.PARTS == 1:
        block = block.to(tl.bfloat16)
    elif TILE.ROWS and TILE.PARTS == 2:
        block = as_tf32(block)
    return block


@triton.jit
def lines_of(C, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's rows of the matrix of a group, all columns, and how many channels the group has."""
    group = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return group, rows, tl.arange(0, COLUMNS), tl.minimum(TILE.D, C - group * TILE.D)


@triton.jit
def forward_operands(
    whitening_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    operand_ptr,
    offset_ptr,
    C,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """W as `wide_apply` takes it, and its offset: β, or for bfloat16, which is not centred, β - γ W μ."""
    group, rows, columns, channels = lines_of(C, TILE, ROWS, COLUMNS)
    first = group * TILE.D
    scale = load_vector(weight_ptr, first + rows, rows < channels, WEIGHT, 1.0)
    offset = load_vector(bias_ptr, first + rows, rows < channels, BIAS, 0.0)
    follow(PDL)
    stored = as_stored(load_block(whitening_ptr + first * TILE.D, rows, columns, TILE.D, False), TILE)
    store_block(operand_ptr + group * TILE.BD * TILE.BD, rows, columns, stored, TILE.BD, False)
    if TILE.PARTS == 1:
        mean = tl.load(mean_ptr + first + columns, mask=columns < channels, other=0.0)
        offset -= scale * tl.sum(stored.to(tl.float32) * mean[None, :], 1)
    tl.store(offset_ptr + group * TILE.BD + rows, offset)


@triton.jit(do_not_specialize=["M"])
def backward_operands(
    whitening_ptr,
    second_ptr,
    mean_ptr,
    grad_sum_ptr,
    weight_ptr,
    operand_ptr,
    second_operand_ptr,
    offset_ptr,
    M,
    C,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Aᵀ = W diag(γ), W being symmetric, and the second matrix B as `wide_apply_backward` takes them, and its offset.

    That is -Aᵀ Σ dy / M, or for bfloat16, which is not centred, -Aᵀ Σ dy / M - B μ.
    """
    group, rows, columns, channels = lines_of(C, TILE, ROWS, COLUMNS)
    first = group * TILE.D
    scale = load_vector(weight_ptr, first + columns, columns < channels, WEIGHT, 1.0)
    follow(PDL)
    place = group * TILE.BD * TILE.BD
    matrix = load_block(whitening_ptr + first * TILE.D, rows, columns, TILE.D, False) * scale[None, :]
    second = load_block(second_ptr + place, rows, columns, TILE.BD, False)
    grad_sum = tl.load(grad_sum_ptr + first + columns, mask=columns < channels, other=0.0)
    offset = -tl.sum(matrix * (grad_sum / M)[None, :], 1)
    stored = as_stored(second, TILE)
    store_block(operand_ptr + place, rows, columns, as_stored(matrix, TILE), TILE.BD, False)
    store_block(second_operand_ptr + place, rows, columns, stored, TILE.BD, False)
    if TILE.PARTS == 1:
        mean = tl.load(mean_ptr + first + columns, mask=columns < channels, other=0.0)
        offset -= tl.sum(stored.to(tl.float32) * mean[None, :], 1)
    tl.store(offset_ptr + group * TILE.BD + rows, offset)
