"""The steps of Newton's iteration for groups above 64 channels, tile by tile of their matrices.

The same form as in `newton`. What follows a product in the iteration (a factor, a matrix to add) is done in passing.
`ends` is what comes before and after the products, and `iterate` has the kernels that put them together.

Matrices are ``[G, N, N]``, contiguous, and zero beyond the group. Whitening matrices are ``[G, D, D]``. All matrices of
the iteration are polynomials of one symmetric matrix, or derivatives of such, so every result of a step is symmetric: a
program computes a tile on or below the diagonal and stores it twice.

Products take matrices in fp32, or in float16 (`HALF`). What a step adds to a product is fp32 in either case: in float16
a matrix that later steps add to has a second copy, of which only the tiles on and below the diagonal are there.
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
    PAIRS: int  # of the tiles of a matrix, those that lie on or below the diagonal
    EVEN: bool  # tiles fill the matrix: none is masked
    STEPS: int  # of the iteration; 2 stands for all above
    DEPTH: int  # of the blocks that a product goes through
    STAGES: int  # of that loop
    HALF: bool  # products take float16
    JOINED: bool  # what needs the same R between two meetings is one item of work, see `iterate.joined_step`
    PRECISION: str  # of products in fp32, as `tl.dot` names it


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
def store_whitening(ptr, group, rows, columns, tile, MATRICES: tl.constexpr):
    """Store a tile of a whitening matrix and its transpose."""
    D: tl.constexpr = MATRICES.D
    EVEN: tl.constexpr = MATRICES.EVEN and D == MATRICES.N
    store_block(ptr + group * D * D, rows, columns, tile, D, EVEN)
    store_block(ptr + group * D * D, columns, rows, tl.trans(tile), D, EVEN)


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
def symmetrized(tile, row, column):
    """A tile, made exactly symmetric if it lies on the diagonal: rounding's asymmetry grows in many steps."""
    if row == column:
        tile = 0.5 * (tile + tl.trans(tile))
    return tile


@triton.jit
def products(
    a_ptr, c_ptr, b_ptr, rows, columns, shift, MATRICES: tl.constexpr, DERIVED: tl.constexpr, BOTH: tl.constexpr
):  # fmt: skip
    """Tiles of A B and dA B + A dB, and of C B and dC B + C dB, in one pass: they share the rows that they read.

    The second two are there if `BOTH` are asked for, derivatives with `DERIVED`; that of a matrix lies `shift` behind
    it. B is symmetric: its columns are read as rows, the order in memory that tensor cores want.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    PRECISION: tl.constexpr = MATRICES.PRECISION
    ab = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    d_ab = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    cb = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    d_cb = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        a = load_matrix(a_ptr, rows, depth, MATRICES)
        b = tl.trans(load_matrix(b_ptr, columns, depth, MATRICES))
        ab = tl.dot(a, b, ab, input_precision=PRECISION)
        if BOTH:
            c = load_matrix(c_ptr, rows, depth, MATRICES)
            cb = tl.dot(c, b, cb, input_precision=PRECISION)
        if DERIVED:
            d_a = load_matrix(a_ptr + shift, rows, depth, MATRICES)
            d_b = tl.trans(load_matrix(b_ptr + shift, columns, depth, MATRICES))
            d_ab = tl.dot(d_a, b, d_ab, input_precision=PRECISION)
            d_ab = tl.dot(a, d_b, d_ab, input_precision=PRECISION)
            if BOTH:
                d_c = load_matrix(c_ptr + shift, rows, depth, MATRICES)
                d_cb = tl.dot(d_c, b, d_cb, input_precision=PRECISION)
                d_cb = tl.dot(c, d_b, d_cb, input_precision=PRECISION)
    return ab, d_ab, cb, d_cb


@triton.jit
def combined(
    a_ptr, b_ptr, e_ptr, alpha, gamma, pair, shift, e_shift,
    MATRICES: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a tile on or below the diagonal, that of alpha A B + gamma E, and its derivative.

    The derivative is there with `DERIVED`; those of A and B lie `shift` behind them, that of E `e_shift`. With
    `WATCHED`, B is an R, and where that has stopped the result is E.
    """
    rows, columns, row, column = pair_at(pair, MATRICES)
    # On their way while the product is computed.
    added = load_matrix(e_ptr, rows, columns, MATRICES)
    d_added = added
    if DERIVED:
        d_added = load_matrix(e_ptr + e_shift, rows, columns, MATRICES)
    tile, d_tile, _, _ = products(a_ptr, a_ptr, b_ptr, rows, columns, shift, MATRICES, DERIVED, False)
    tile = symmetrized(alpha * tile + gamma * added, row, column)
    if DERIVED:
        d_tile = symmetrized(alpha * d_tile + gamma * d_added, row, column)
    if WATCHED:
        stopped = trace_of(b_ptr, MATRICES.N, 0.0, MATRICES) < 0.5
        tile = tl.where(stopped, added, tile)
        d_tile = tl.where(stopped, d_added, d_tile)
    return rows, columns, tile, d_tile


@triton.jit
def store_symmetric(ptr, rows, columns, tile, MATRICES: tl.constexpr):
    """Store a tile of a symmetric matrix and its transpose, in the matrix's precision."""
    tile = tile.to(ptr.dtype.element_ty)
    store_matrix(ptr, rows, columns, tile, MATRICES)
    store_matrix(ptr, columns, rows, tl.trans(tile), MATRICES)


@triton.jit
def settle(following_ptr, residual_ptr, out_ptr, pair, group, MATRICES: tl.constexpr):
    """The R that follows another, or zero where its trace has fallen: see `device/newton.py`."""
    rows, columns, _, _ = pair_at(pair, MATRICES)
    matrix = group * MATRICES.N * MATRICES.N
    level = trace_of(following_ptr + matrix, MATRICES.N, 0.0, MATRICES)
    stopped = level < tl.maximum(trace_of(residual_ptr + matrix, MATRICES.N, 0.0, MATRICES) - 0.5, 0.5)
    block = load_matrix(following_ptr + matrix, rows, columns, MATRICES)
    store_symmetric(out_ptr + matrix, rows, columns, tl.where(stopped, 0.0, block), MATRICES)
