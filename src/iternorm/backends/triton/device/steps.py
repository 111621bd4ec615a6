"""Products of matrices too large for one program, a launch each: the steps of Newton's iteration for such groups.

The same form as in `newton`. A launch is a grid of tiles by matrices; what follows a product in the
iteration (a factor, a matrix to add, a sum) is done in passing. `ends` is what comes before and
after the products, `iternorm.backends.triton.iteration` puts the launches in order.

Matrices are ``[G, N, N]``, contiguous, fp32, and zero beyond the group. Whitening matrices are ``[G, D, D]``.
"""

import triton
import triton.language as tl

from iternorm.backends.triton.device.newton import total
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def load_block(ptr, rows, columns, N: tl.constexpr, WHOLE: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if WHOLE:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < N), other=0.0)
    return block


@triton.jit
def load_flipped(ptr, rows, columns, N: tl.constexpr, WHOLE: tl.constexpr):
    """The block of the transposed matrix, read along its rows."""
    return tl.trans(load_block(ptr, columns, rows, N, WHOLE))


@triton.jit
def store_block(ptr, rows, columns, block, N: tl.constexpr, WHOLE: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if WHOLE:
        tl.store(pointers, block)
    else:
        tl.store(pointers, block, mask=(rows[:, None] < N) & (columns[None, :] < N))


@triton.jit
def tile_of(N: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of this program's tile, and the number of its matrix."""
    across = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    return rows, columns, tl.program_id(1).to(tl.int64)


@triton.jit
def trace_of(ptr, size, eps, N: tl.constexpr, PADDED: tl.constexpr):
    """tr(Σ + eps I) of a group."""
    i = tl.arange(0, PADDED)
    return tl.sum(tl.where(i < size, tl.load(ptr + i * (N + 1), mask=i < size, other=0.0) + eps, 0.0), 0)


@triton.jit
def combine(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    e_ptr,
    scale_ptr,
    residual_ptr,
    sums_ptr,
    out_ptr,
    alpha,
    gamma,
    N: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    SECOND: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    SUMMED: tl.constexpr,
    WATCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """alpha (A B + C D) + gamma E, the second product and E where wanted.

    `SCALED`: times a factor of the group, stored as a whitening matrix. `SUMMED`: the sum of its products with the
    elements of R_0 is added to the tile's. `WATCHED`: B is an R, and where that has stopped the result is E.
    """
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    matrix = group * N * N
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for begin in tl.range(0, N, DEPTH, num_stages=STAGES):
        depth = begin + tl.arange(0, DEPTH)
        left = load_block(a_ptr + matrix, rows, depth, N, WHOLE)
        right = load_block(b_ptr + matrix, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if SECOND:
            left = load_block(c_ptr + matrix, rows, depth, N, WHOLE)
            right = load_block(d_ptr + matrix, depth, columns, N, WHOLE)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
    acc = alpha * acc
    if ADDED:
        added = load_block(e_ptr + matrix, rows, columns, N, WHOLE)
        acc += gamma * added
        if WATCHED:
            acc = tl.where(trace_of(b_ptr + matrix, N, 0.0, N, PADDED) < 0.5, added, acc)
    if SUMMED:
        place = sums_ptr + group * tl.num_programs(0) + tl.program_id(0)
        residual = load_block(residual_ptr + matrix, rows, columns, N, WHOLE)
        tl.store(place, tl.load(place) + total(acc * residual))
    if SCALED:
        acc *= tl.load(scale_ptr + group)
        store_block(out_ptr + group * D * D, rows, columns, acc, D, WHOLE and D == N)
    else:
        store_block(out_ptr + matrix, rows, columns, acc, N, WHOLE)


@triton.jit
def settle(
    following_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The R that follows another, or zero where its trace has fallen: see `device/newton.py`."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    matrix = group * N * N
    level = trace_of(following_ptr + matrix, N, 0.0, N, PADDED)
    stopped = level < tl.maximum(trace_of(residual_ptr + matrix, N, 0.0, N, PADDED) - 0.5, 0.5)
    block = load_block(following_ptr + matrix, rows, columns, N, WHOLE)
    store_block(out_ptr + matrix, rows, columns, tl.where(stopped, 0.0, block), N, WHOLE)


@triton.jit
def differentiate(
    shared_ptr,
    residual_ptr,
    d_residual_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """dR of the next step from S = dR R: 9/4 dR - 3/2 (S + Sᵀ) + 1/4 (S R + R (S + Sᵀ)), symmetric but for rounding."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    matrix = group * N * N
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for begin in tl.range(0, N, DEPTH, num_stages=STAGES):
        depth = begin + tl.arange(0, DEPTH)
        left = load_block(shared_ptr + matrix, rows, depth, N, WHOLE)
        right = load_block(residual_ptr + matrix, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        left = load_block(residual_ptr + matrix, rows, depth, N, WHOLE)
        right = load_block(shared_ptr + matrix, depth, columns, N, WHOLE)
        right += load_flipped(shared_ptr + matrix, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    both = load_block(shared_ptr + matrix, rows, columns, N, WHOLE)
    both += load_flipped(shared_ptr + matrix, rows, columns, N, WHOLE)
    acc = 0.25 * acc - 1.5 * both + 2.25 * load_block(d_residual_ptr + matrix, rows, columns, N, WHOLE)
    store_block(out_ptr + matrix, rows, columns, acc, N, WHOLE)


@triton.jit
def symmetrize(matrix_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):
    """The symmetric part. What rounding leaves of the other part in dR grows 2.5 times a step where R = I."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    matrix = group * N * N
    block = load_block(matrix_ptr + matrix, rows, columns, N, WHOLE)
    block += load_flipped(matrix_ptr + matrix, rows, columns, N, WHOLE)
    store_block(out_ptr + matrix, rows, columns, 0.5 * block, N, WHOLE)
