"""Inverse roots of symmetric matrices: products of commuting matrices, half of whose tiles are transposes of the rest.

All matrices of the iteration X <- X h(M), M <- M h(M)^p are polynomials of one matrix, so every product is symmetric:
a program computes a tile on or below the diagonal and stores it twice. A matrix is kept as two float16 parts,
``[B, 2, N + 1, N]``, times a power of two that the host chooses: products take their operands as they lie in memory. N
is D rounded up to full tiles, and what lies beyond D is zero. The diagonal is row N of a part, and zero in its place
(`product_of`).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from typing import NamedTuple

import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import below_diagonal
from iternorm.backends.triton.device.newton import total
from iternorm.backends.triton.device.tiles import follow


class Halves(NamedTuple):
    """The matrices of a launch: the constants that a kernel is compiled for."""

    D: int  # rows
    N: int  # rows, rounded up to full tiles
    SIDE: int  # of a tile
    DEPTH: int  # of the blocks that a product goes through
    STAGES: int  # of that loop
    TILES: int  # of a matrix, on and below its diagonal
    ROWS: int  # that a program of `bound` looks at
    BOUNDS: int  # how many programs those are for a matrix


@triton.jit
def place_of(MATRICES: tl.constexpr):
    """Rows and columns of this program's tile, whether they are the same, and the number of its matrix."""
    tile = tl.program_id(0) % MATRICES.TILES
    row, column = below_diagonal(tile)
    side = tl.arange(0, MATRICES.SIDE)
    matrix = (tl.program_id(0) // MATRICES.TILES).to(tl.int64)
    return row * MATRICES.SIDE + side, column * MATRICES.SIDE + side, row == column, matrix


@triton.jit
def part_of(ptr, matrix, part: tl.constexpr, rows, columns, MATRICES: tl.constexpr):
    """Where a block of one part of a matrix is."""
    N: tl.constexpr = MATRICES.N
    return ptr + (2 * matrix + part) * (N + 1) * N + rows[:, None] * N + columns[None, :]


@triton.jit
def block_of(ptr, matrix, rows, columns, MATRICES: tl.constexpr):
    """A block of a matrix in fp32, without its diagonal."""
    upper = tl.load(part_of(ptr, matrix, 0, rows, columns, MATRICES)).to(tl.float32)
    return upper + tl.load(part_of(ptr, matrix, 1, rows, columns, MATRICES)).to(tl.float32)


@triton.jit
def diagonal_places(ptr, matrix, rows, MATRICES: tl.constexpr):
    """Where the two parts of some entries of a diagonal are."""
    N: tl.constexpr = MATRICES.N
    upper = ptr + 2 * matrix * (N + 1) * N + N * N + rows
    return upper, upper + (N + 1) * N


@triton.jit
def diagonal_of(ptr, matrix, rows, MATRICES: tl.constexpr):
    """Some entries of a diagonal, in fp32."""
    upper, lower = diagonal_places(ptr, matrix, rows, MATRICES)
    return tl.load(upper).to(tl.float32) + tl.load(lower).to(tl.float32)


@triton.jit
def in_halves(tile):
    """The sum of two float16 that is nearest to a tile."""
    upper = tile.to(tl.float16)
    return upper, (tile - upper.to(tl.float32)).to(tl.float16)


@triton.jit
def store_halves(ptr, matrix, rows, columns, is_diagonal, tile, MATRICES: tl.constexpr):
    """Store a tile of a symmetric matrix and its transpose, in two parts and with the diagonal apart."""
    if is_diagonal:
        on_diagonal = rows[:, None] == columns[None, :]
        upper, lower = in_halves(tl.sum(tl.where(on_diagonal, tile, 0.0), 1))
        upper_ptr, lower_ptr = diagonal_places(ptr, matrix, rows, MATRICES)
        tl.store(upper_ptr, upper)
        tl.store(lower_ptr, lower)
        tile = tl.where(on_diagonal, 0.0, tile)
    upper, lower = in_halves(tile)
    tl.store(part_of(ptr, matrix, 0, rows, columns, MATRICES), upper)
    tl.store(part_of(ptr, matrix, 1, rows, columns, MATRICES), lower)
    tl.store(part_of(ptr, matrix, 0, columns, rows, MATRICES), tl.trans(upper))
    tl.store(part_of(ptr, matrix, 1, columns, rows, MATRICES), tl.trans(lower))


@triton.jit
def product_of(a_ptr, b_ptr, matrix, rows, columns, is_diagonal, alpha, beta, offset, MATRICES: tl.constexpr):
    """A tile of alpha A B + beta A + offset I, exactly symmetric on the diagonal.

    Tensor cores truncate: what they add to, and every term to the last places of the largest. A diagonal is larger than
    the rest of its row, and on the diagonal of a product all other terms may have one sign: with it, every eigenvalue
    would be off by as much, the small ones too. So the tensor cores multiply what is beside the diagonals, and what the
    diagonals do is added outside. They add up a block alone, its small products first, and blocks are added outside.
    The product of the lower parts, 2^-22 of the whole, is left out.
    """
    SIDE: tl.constexpr = MATRICES.SIDE
    acc = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for begin in tl.range(0, MATRICES.N, MATRICES.DEPTH, num_stages=MATRICES.STAGES):
        depth = begin + tl.arange(0, MATRICES.DEPTH)
        a_upper = tl.load(part_of(a_ptr, matrix, 0, rows, depth, MATRICES))
        a_lower = tl.load(part_of(a_ptr, matrix, 1, rows, depth, MATRICES))
        b_upper = tl.load(part_of(b_ptr, matrix, 0, depth, columns, MATRICES))
        b_lower = tl.load(part_of(b_ptr, matrix, 1, depth, columns, MATRICES))
        block = tl.dot(a_upper, b_lower)
        block = tl.dot(a_lower, b_upper, block)
        acc += tl.dot(a_upper, b_upper, block)
    identity = identity_of(rows, columns, MATRICES)
    a_diagonal = diagonal_of(a_ptr, matrix, rows, MATRICES)[:, None]
    b_diagonal = diagonal_of(b_ptr, matrix, columns, MATRICES)[None, :]
    tile = alpha * acc + (alpha * a_diagonal) * block_of(b_ptr, matrix, rows, columns, MATRICES)
    a = block_of(a_ptr, matrix, rows, columns, MATRICES) + a_diagonal * identity
    tile += a * (alpha * b_diagonal + beta) + offset * identity
    if is_diagonal:
        tile = 0.5 * (tile + tl.trans(tile))
    return tile


@triton.jit
def identity_of(rows, columns, MATRICES: tl.constexpr):
    return tl.where((rows[:, None] == columns[None, :]) & (rows[:, None] < MATRICES.D), 1.0, 0.0)


@triton.jit
def rows_of(ptr, matrix, rows, columns, MATRICES: tl.constexpr):
    """A block of the given matrices ``[B, D, D]``, zero beyond them."""
    D: tl.constexpr = MATRICES.D
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    return tl.load(ptr + matrix * D * D + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def bound(matrix_ptr, bounds_ptr, smallest, MATRICES: tl.constexpr, PDL: tl.constexpr):
    """Of some rows: the largest magnitude, and beside it the largest row sum of magnitudes and the sum of squares."""
    follow(PDL)
    ROWS: tl.constexpr = MATRICES.ROWS
    DEPTH: tl.constexpr = MATRICES.DEPTH
    matrix = (tl.program_id(0) // MATRICES.BOUNDS).to(tl.int64)
    rows = tl.program_id(0) % MATRICES.BOUNDS * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    for begin in range(0, MATRICES.N, DEPTH):
        block = rows_of(matrix_ptr, matrix, rows, begin + tl.arange(0, DEPTH), MATRICES)
        largest = tl.maximum(largest, tl.abs(block))
    top = tl.maximum(tl.max(tl.max(largest, 1), 0), smallest)
    sums = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    squares = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    for begin in range(0, MATRICES.N, DEPTH):
        block = rows_of(matrix_ptr, matrix, rows, begin + tl.arange(0, DEPTH), MATRICES) / top
        sums += tl.abs(block)
        squares += block * block
    place = bounds_ptr + 3 * tl.program_id(0)
    tl.store(place, top)
    tl.store(place + 1, tl.max(tl.sum(sums, 1), 0))
    tl.store(place + 2, total(squares))


@triton.jit
def begin(
    matrix_ptr,
    bounds_ptr,
    scale_ptr,
    out_ptr,
    root_ptr,
    smallest,
    damping,
    size,
    slope,
    offset,
    MATRICES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """M = sym(A) / scale + damping I, times `size`, and the first root, slope M + offset I.

    The scale is an upper bound of the norm: the smaller of the largest row sum and the Frobenius norm.
    """
    follow(PDL)
    rows, columns, is_diagonal, matrix = place_of(MATRICES)
    part = tl.arange(0, PADDED)
    there = part < MATRICES.BOUNDS
    place = bounds_ptr + 3 * (matrix * MATRICES.BOUNDS + part)
    tops = tl.load(place, mask=there, other=0.0)
    top = tl.max(tops, 0)
    share = tops / top
    sums = tl.max(share * tl.load(place + 1, mask=there, other=0.0), 0)
    squares = tl.sum(share * share * tl.load(place + 2, mask=there, other=0.0), 0)
    scale = tl.maximum(top * tl.minimum(sums, tl.sqrt(squares)), smallest)
    if tl.program_id(0) % MATRICES.TILES == 0:
        tl.store(scale_ptr + matrix, scale)
    block = rows_of(matrix_ptr, matrix, rows, columns, MATRICES)
    block = 0.5 * (block / scale + tl.trans(rows_of(matrix_ptr, matrix, columns, rows, MATRICES)) / scale)
    identity = identity_of(rows, columns, MATRICES)
    block = size * (block + damping * identity)
    store_halves(out_ptr, matrix, rows, columns, is_diagonal, block, MATRICES)
    root = slope * block + offset * identity
    store_halves(root_ptr, matrix, rows, columns, is_diagonal, root, MATRICES)


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, alpha, beta, offset, MATRICES: tl.constexpr, PDL: tl.constexpr):
    """alpha A B + beta A + offset I."""
    follow(PDL)
    rows, columns, is_diagonal, matrix = place_of(MATRICES)
    tile = product_of(a_ptr, b_ptr, matrix, rows, columns, is_diagonal, alpha, beta, offset, MATRICES)
    store_halves(out_ptr, matrix, rows, columns, is_diagonal, tile, MATRICES)


@triton.jit
def finish(root_ptr, power_ptr, scale_ptr, out_ptr, alpha, beta, MATRICES: tl.constexpr, PDL: tl.constexpr):
    """The result ``[B, D, D]``: a factor of each matrix times alpha X Y + beta X."""
    follow(PDL)
    rows, columns, is_diagonal, matrix = place_of(MATRICES)
    D: tl.constexpr = MATRICES.D
    tile = product_of(root_ptr, power_ptr, matrix, rows, columns, is_diagonal, alpha, beta, 0.0, MATRICES)
    tile *= tl.load(scale_ptr + matrix)
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    out_ptr += matrix * D * D
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], tile, mask=inside)
    tl.store(out_ptr + columns[:, None] * D + rows[None, :], tl.trans(tile), mask=tl.trans(inside))
