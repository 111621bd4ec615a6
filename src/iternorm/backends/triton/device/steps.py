"""The steps of Newton's iteration for groups above 64 channels, tile by tile of their matrices.

The same form as in `newton`. What follows a product in the iteration (a factor, a matrix to add) is done in passing.
`ends` is what comes before and after the products, and `iterate` has the kernels that put them together.

Matrices are ``[G, N, N]``, contiguous, fp32, and zero beyond the group. Whitening matrices are ``[G, D, D]``.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from typing import NamedTuple

import triton
import triton.language as tl


class Matrices(NamedTuple):
    """The matrices of a launch: the constants that a kernel is compiled for."""

    N: int  # rows
    D: int  # channels of a group, rows of a whitening matrix
    PADDED: int  # N, rounded up to a power of two
    SIDE: int  # of a tile
    TILES: int  # of a matrix
    EVEN: bool  # tiles fill the matrix: none is masked
    STEPS: int  # of the iteration; 2 stands for all above
    DEPTH: int  # of the blocks that a product goes through
    STAGES: int  # of that loop
    PRECISION: str  # of products, as `tl.dot` names it


@triton.jit
def load_block(ptr, rows, columns, N: tl.constexpr, EVEN: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if EVEN:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < N), other=0.0)
    return block


@triton.jit
def store_block(ptr, rows, columns, block, N: tl.constexpr, EVEN: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if EVEN:
        tl.store(pointers, block)
    else:
        tl.store(pointers, block, mask=(rows[:, None] < N) & (columns[None, :] < N))


@triton.jit
def load_matrix(ptr, rows, columns, MATRICES: tl.constexpr):
    """A block of a matrix ``[N, N]``."""
    return load_block(ptr, rows, columns, MATRICES.N, MATRICES.EVEN)


@triton.jit
def load_transposed(ptr, rows, columns, MATRICES: tl.constexpr):
    """A block of the transposed matrix, read along its rows."""
    return tl.trans(load_matrix(ptr, columns, rows, MATRICES))


@triton.jit
def store_matrix(ptr, rows, columns, block, MATRICES: tl.constexpr):
    store_block(ptr, rows, columns, block, MATRICES.N, MATRICES.EVEN)


@triton.jit
def store_whitening(ptr, group, rows, columns, block, MATRICES: tl.constexpr):
    D: tl.constexpr = MATRICES.D
    store_block(ptr + group * D * D, rows, columns, block, D, MATRICES.EVEN and D == MATRICES.N)


@triton.jit
def tile_at(index, N: tl.constexpr, SIDE: tl.constexpr):
    """Rows and columns of a tile of a matrix."""
    across = tl.cdiv(N, SIDE)
    side = tl.arange(0, SIDE)
    return index // across * SIDE + side, index % across * SIDE + side


@triton.jit
def tile_of(N: tl.constexpr, SIDE: tl.constexpr):
    """Rows and columns of this program's tile, and the number of its matrix."""
    rows, columns = tile_at(tl.program_id(0), N, SIDE)
    return rows, columns, tl.program_id(1).to(tl.int64)


@triton.jit
def place_of(tile, group, MATRICES: tl.constexpr):
    """Rows and columns of a tile of a group's matrix, and where the matrix begins."""
    rows, columns = tile_at(tile, MATRICES.N, MATRICES.SIDE)
    return rows, columns, group * MATRICES.N * MATRICES.N


@triton.jit
def trace_of(ptr, size, eps, MATRICES: tl.constexpr):
    """tr(Σ + eps I) of a group."""
    i = tl.arange(0, MATRICES.PADDED)
    diagonal = tl.load(ptr + i * (MATRICES.N + 1), mask=i < size, other=0.0)
    return tl.sum(tl.where(i < size, diagonal + eps, 0.0), 0)


@triton.jit
def add_product(a_ptr, b_ptr, matrix, rows, depth, columns, acc, MATRICES: tl.constexpr):
    """acc + A B for a block of their common depth; A and B begin at `matrix`."""
    left = load_matrix(a_ptr + matrix, rows, depth, MATRICES)
    right = load_matrix(b_ptr + matrix, depth, columns, MATRICES)
    return tl.dot(left, right, acc, input_precision=MATRICES.PRECISION)


@triton.jit
def add_products(a_ptr, b_ptr, tile, group, acc, MATRICES: tl.constexpr):
    """A tile of acc + A B."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        acc = add_product(a_ptr, b_ptr, matrix, rows, depth, columns, acc, MATRICES)
    return acc


@triton.jit
def empty_tile(MATRICES: tl.constexpr):
    SIDE: tl.constexpr = MATRICES.SIDE
    return tl.zeros([SIDE, SIDE], dtype=tl.float32)


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, tile, group, MATRICES: tl.constexpr):
    """A B."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    acc = add_products(a_ptr, b_ptr, tile, group, empty_tile(MATRICES), MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, acc, MATRICES)


@triton.jit
def step(a_ptr, b_ptr, e_ptr, out_ptr, alpha, gamma, tile, group, MATRICES: tl.constexpr, WATCHED: tl.constexpr):
    """alpha A B + gamma E. `WATCHED`: B is an R, and where that has stopped the result is E."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    acc = add_products(a_ptr, b_ptr, tile, group, empty_tile(MATRICES), MATRICES)
    acc = finished_step(acc, b_ptr + matrix, e_ptr + matrix, alpha, gamma, rows, columns, MATRICES, WATCHED)
    store_matrix(out_ptr + matrix, rows, columns, acc, MATRICES)


@triton.jit
def finished_step(acc, residual_ptr, e_ptr, alpha, gamma, rows, columns, MATRICES: tl.constexpr, WATCHED: tl.constexpr):
    """Alpha times a tile of a product + gamma E, or E where the R at `residual_ptr` has stopped."""
    added = load_matrix(e_ptr, rows, columns, MATRICES)
    acc = alpha * acc + gamma * added
    if WATCHED:
        acc = tl.where(trace_of(residual_ptr, MATRICES.N, 0.0, MATRICES) < 0.5, added, acc)
    return acc


@triton.jit
def settle(following_ptr, residual_ptr, out_ptr, tile, group, MATRICES: tl.constexpr):
    """The R that follows another, or zero where its trace has fallen: see `device/newton.py`."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    level = trace_of(following_ptr + matrix, MATRICES.N, 0.0, MATRICES)
    stopped = level < tl.maximum(trace_of(residual_ptr + matrix, MATRICES.N, 0.0, MATRICES) - 0.5, 0.5)
    block = load_matrix(following_ptr + matrix, rows, columns, MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, tl.where(stopped, 0.0, block), MATRICES)


@triton.jit
def differentiate(shared_ptr, residual_ptr, d_residual_ptr, out_ptr, tile, group, MATRICES: tl.constexpr):
    """dR of the next step from S = dR R: 9/4 dR - 3/2 (S + Sᵀ) + 1/4 (S R + R (S + Sᵀ)), symmetric but for rounding."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    acc = empty_tile(MATRICES)
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        acc = add_product(shared_ptr, residual_ptr, matrix, rows, depth, columns, acc, MATRICES)
        left = load_matrix(residual_ptr + matrix, rows, depth, MATRICES)
        right = load_matrix(shared_ptr + matrix, depth, columns, MATRICES)
        right += load_transposed(shared_ptr + matrix, depth, columns, MATRICES)
        acc = tl.dot(left, right, acc, input_precision=MATRICES.PRECISION)
    both = load_matrix(shared_ptr + matrix, rows, columns, MATRICES)
    both += load_transposed(shared_ptr + matrix, rows, columns, MATRICES)
    acc = 0.25 * acc - 1.5 * both + 2.25 * load_matrix(d_residual_ptr + matrix, rows, columns, MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, acc, MATRICES)


@triton.jit
def symmetrize(matrix_ptr, out_ptr, tile, group, MATRICES: tl.constexpr):
    """The symmetric part. What rounding leaves of the other part in dR grows 2.5 times a step where R = I."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    block = load_matrix(matrix_ptr + matrix, rows, columns, MATRICES)
    block += load_transposed(matrix_ptr + matrix, rows, columns, MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, 0.5 * block, MATRICES)
