"""The steps of Newton's iteration for groups above 64 channels, tile by tile of their matrices.

The same form as in `newton`. What follows a product in the iteration (a factor, a matrix to add) is done in passing.
`ends` is what comes before and after the products, and `iterate` has the kernels that put them together.

Matrices are ``[G, N, N]``, contiguous, fp32, and zero beyond the group. Whitening matrices are ``[G, D, D]``. All
matrices of the iteration are polynomials of one symmetric matrix, or derivatives of such, so every result of a step is
symmetric: a program computes a tile on or below the diagonal and stores it twice.
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
    PAIRS: int  # of its tiles, those that lie on or below the diagonal
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
def below_diagonal(index):
    """Row and column of the tile of this index, of those on and below the diagonal."""
    # The row whose first tile is the k (k + 1) / 2 -th; a hundredth more than rounding could take away. Right for up to
    # 99 rows of tiles, where there are 32 at most.
    row = (0.5 * tl.sqrt(8.0 * tl.cast(index, tl.float32) + 1.0) - 0.49).to(tl.int32)
    return row, index - row * (row + 1) // 2


@triton.jit
def pair_at(pair, MATRICES: tl.constexpr):
    """Rows and columns of a tile on or below the diagonal, and its row and its column of tiles."""
    row, column = below_diagonal(pair)
    side = tl.arange(0, MATRICES.SIDE)
    return row * MATRICES.SIDE + side, column * MATRICES.SIDE + side, row, column


@triton.jit
def trace_of(ptr, size, eps, MATRICES: tl.constexpr):
    """tr(Σ + eps I) of a group."""
    i = tl.arange(0, MATRICES.PADDED)
    diagonal = tl.load(ptr + i * (MATRICES.N + 1), mask=i < size, other=0.0)
    return tl.sum(tl.where(i < size, diagonal + eps, 0.0), 0)


@triton.jit
def add_products(a_ptr, b_ptr, rows, columns, acc, MATRICES: tl.constexpr):
    """A tile of acc + A B."""
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        left = load_matrix(a_ptr, rows, depth, MATRICES)
        right = load_matrix(b_ptr, depth, columns, MATRICES)
        acc = tl.dot(left, right, acc, input_precision=MATRICES.PRECISION)
    return acc


@triton.jit
def combined(
    a_ptr, b_ptr, e_ptr, alpha, gamma, pair, shift,
    MATRICES: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a tile on or below the diagonal, and that of alpha A B + gamma E.

    `DERIVED` asks for its derivative, alpha (dA B + A dB) + gamma dE; that of a matrix lies `shift` behind it. With
    `WATCHED`, B is an R, and where that has stopped the result is E.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    rows, columns, row, column = pair_at(pair, MATRICES)
    acc = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    if DERIVED:
        acc = add_products(a_ptr + shift, b_ptr, rows, columns, acc, MATRICES)
        acc = add_products(a_ptr, b_ptr + shift, rows, columns, acc, MATRICES)
        added = load_matrix(e_ptr + shift, rows, columns, MATRICES)
    else:
        acc = add_products(a_ptr, b_ptr, rows, columns, acc, MATRICES)
        added = load_matrix(e_ptr, rows, columns, MATRICES)
    acc = alpha * acc + gamma * added
    if row == column:
        # A covariance that was summed in parts is symmetric up to rounding, which many steps would enlarge.
        acc = 0.5 * (acc + tl.trans(acc))
    if WATCHED:
        acc = tl.where(trace_of(b_ptr, MATRICES.N, 0.0, MATRICES) < 0.5, added, acc)
    return rows, columns, acc


@triton.jit
def store_symmetric(ptr, rows, columns, tile, MATRICES: tl.constexpr):
    """Store a tile of a symmetric matrix and its transpose."""
    store_matrix(ptr, rows, columns, tile, MATRICES)
    store_matrix(ptr, columns, rows, tl.trans(tile), MATRICES)


@triton.jit
def settle(following_ptr, residual_ptr, out_ptr, tile, group, MATRICES: tl.constexpr):
    """The R that follows another, or zero where its trace has fallen: see `device/newton.py`."""
    rows, columns, matrix = place_of(tile, group, MATRICES)
    level = trace_of(following_ptr + matrix, MATRICES.N, 0.0, MATRICES)
    stopped = level < tl.maximum(trace_of(residual_ptr + matrix, MATRICES.N, 0.0, MATRICES) - 0.5, 0.5)
    block = load_matrix(following_ptr + matrix, rows, columns, MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, tl.where(stopped, 0.0, block), MATRICES)
