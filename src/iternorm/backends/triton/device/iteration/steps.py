"""The steps of Newton's iteration for groups above 64 channels, tile by tile of their matrices.

The same form as in `newton`. What follows a product in the iteration (a factor, a matrix to add) is done in passing.
`ends` is what comes before and after the products, `rounds` shares them among programs, and `iterate` has the kernels.

Matrices are ``[G, N, N]``, contiguous, and zero beyond the group. Whitening matrices are ``[G, D, D]``. All matrices of
the iteration are polynomials of one symmetric matrix, or derivatives of such, so every result of a step is symmetric: a
program computes a tile on or below the diagonal and stores it twice.

Products take matrices in fp32, or in float16 (`HALF`). What a step adds to a product is fp32 in either case: in float16
a matrix that later steps add to has a second copy, of which only the tiles on and below the diagonal are there.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from typing import NamedTuple

import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import below_diagonal, load_block, store_block


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
    JOINED: bool  # what needs the same R between two meetings is one item of work, see `rounds.joined_step`
    PRECISION: str  # of products in fp32, as `tl.dot` names it
    RAISED: float  # what R, S and Z in float16 are times what they stand for, see `precision.newton_raised`


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
def add_products(a_ptr, b_ptr, rows, columns, acc, MATRICES: tl.constexpr):
    """A tile of acc + A B. B is symmetric: its columns are read as rows, the order that tensor cores want."""
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        left = load_matrix(a_ptr, rows, depth, MATRICES)
        right = tl.trans(load_matrix(b_ptr, columns, depth, MATRICES))
        acc = tl.dot(left, right, acc, input_precision=MATRICES.PRECISION)
    return acc


@triton.jit
def rows_of_parts(index, shift, other, MATRICES: tl.constexpr, PARTS: tl.constexpr, DERIVED: tl.constexpr):
    """Where the rows of a row of tiles begin in so many matrices, and which rows they are.

    The second of the matrices is the first one's derivative, `shift` behind it, with `DERIVED`. Then comes the same of
    a matrix that is `other` behind the first.
    """
    i = tl.arange(0, PARTS * MATRICES.SIDE)
    part = tl.cast(i // MATRICES.SIDE, tl.int64)
    rows = index * MATRICES.SIDE + i % MATRICES.SIDE
    if DERIVED:
        offsets = part % 2 * shift + part // 2 * other
    else:
        offsets = part * other
    return offsets + rows * MATRICES.N, rows


@triton.jit
def load_rows(ptr, offsets, rows, columns, MATRICES: tl.constexpr):
    pointers = ptr + offsets[:, None] + columns[None, :]
    if MATRICES.EVEN:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(rows[:, None] < MATRICES.N) & (columns[None, :] < MATRICES.N), other=0.0)
    return block


@triton.jit
def stacked_products(
    a_ptr, b_ptr, row, column, shift, other, MATRICES: tl.constexpr, DERIVED: tl.constexpr, BOTH: tl.constexpr
):  # fmt: skip
    """Tiles of A B and dA B + A dB, and of C B and dC B + C dB, in one pass and one product: they share their rows.

    It is [A; dA; C; dC] [B, dB], of which the product of two derivatives is left over; the derivatives are there with
    `DERIVED`, and C, `other` behind A, if `BOTH` are asked for.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    RIGHT: tl.constexpr = 2 if DERIVED else 1
    LEFT: tl.constexpr = 2 * RIGHT if BOTH else RIGHT
    left_offsets, left_rows = rows_of_parts(row, shift, other, MATRICES, LEFT, DERIVED)
    right_offsets, right_rows = rows_of_parts(column, shift, other, MATRICES, RIGHT, DERIVED)
    acc = tl.zeros([LEFT * SIDE, RIGHT * SIDE], dtype=tl.float32)
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        left = load_rows(a_ptr, left_offsets, left_rows, depth, MATRICES)
        right = load_rows(b_ptr, right_offsets, right_rows, depth, MATRICES)
        acc = tl.dot(left, tl.trans(right), acc)
    first, second = acc, acc
    if BOTH:
        first, second = tl.split(acc.reshape(2, RIGHT * SIDE, RIGHT * SIDE).permute(1, 2, 0))
    tile, d_tile = parts_of_product(first, MATRICES, DERIVED)
    other_tile, d_other_tile = tile, d_tile
    if BOTH:
        other_tile, d_other_tile = parts_of_product(second, MATRICES, DERIVED)
    return tile, d_tile, other_tile, d_other_tile


@triton.jit
def parts_of_product(acc, MATRICES: tl.constexpr, DERIVED: tl.constexpr):
    """A B and dA B + A dB of [A; dA] [B, dB]; without `DERIVED` it is A B.

    A and B are `RAISED`, and their derivatives are not.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    DOWN: tl.constexpr = 1.0 / MATRICES.RAISED
    if DERIVED:
        left, right = tl.split(acc.reshape(2, SIDE, 2, SIDE).permute(1, 3, 0, 2))
        tile, d_tile = tl.split(left)
        more, _ = tl.split(right)
        d_tile += more
    else:
        tile, d_tile = acc, acc
    return (DOWN * DOWN) * tile, DOWN * d_tile


@triton.jit
def combined(
    a_ptr, b_ptr, e_ptr, alpha, gamma, pair, shift, e_shift,
    MATRICES: tl.constexpr, VALUE: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a tile on or below the diagonal, that of alpha A B + gamma E, and that of its derivative.

    Of the tiles those are there that are asked for, `VALUE` and `DERIVED`. The derivatives of A and B lie `shift`
    behind them, that of E `e_shift`. With `WATCHED`, B is an R, and where that has stopped the result is E.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    rows, columns, row, column = pair_at(pair, MATRICES)
    zeros = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    tile, d_tile, added, d_added = zeros, zeros, zeros, zeros
    # On their way while the product is computed.
    if VALUE:
        added = load_matrix(e_ptr, rows, columns, MATRICES)
    if DERIVED:
        d_added = load_matrix(e_ptr + e_shift, rows, columns, MATRICES)
    if MATRICES.HALF:
        tile, d_tile, _, _ = stacked_products(a_ptr, b_ptr, row, column, shift, 0, MATRICES, DERIVED, False)
    else:
        if VALUE:
            tile = add_products(a_ptr, b_ptr, rows, columns, zeros, MATRICES)
        if DERIVED:
            d_tile = add_products(a_ptr + shift, b_ptr, rows, columns, zeros, MATRICES)
            d_tile = add_products(a_ptr, b_ptr + shift, rows, columns, d_tile, MATRICES)
    if VALUE:
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
