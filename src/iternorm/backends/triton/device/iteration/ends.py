"""What comes before and after the products of `steps`, tile by tile as there.

A group has D channels, the last one what is left of C: beyond it matrices ``[G, N, N]`` are zero. Whitening matrices
and running statistics are ``[G, D, D]``.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import load_block
from iternorm.backends.triton.device.iteration.steps import (
    load_matrix,
    load_transposed,
    pair_at,
    store_matrix,
    store_symmetric,
    store_whitening,
    symmetrized,
    trace_of,
)
from iternorm.backends.triton.device.newton import power_for, total


@triton.jit
def identity_of(rows, columns, size):
    """A tile of the identity of the channels that a group has."""
    return tl.where((rows[:, None] == columns[None, :]) & (rows[:, None] < size), 1.0, 0.0)


@triton.jit
def size_of(group, C, MATRICES: tl.constexpr):
    """The channels that a group has."""
    return tl.minimum(MATRICES.D, C - group * MATRICES.D)


@triton.jit
def times_of(row, column):
    """How often a tile on or below the diagonal is in its matrix, itself and transposed."""
    return tl.where(row == column, 1.0, 2.0)


@triton.jit
def normalized(covariance_ptr, rows, columns, trace, eps, identity, MATRICES: tl.constexpr):
    """A tile of R_0 = Σ / tr Σ."""
    return (load_matrix(covariance_ptr, rows, columns, MATRICES) + eps * identity) / trace


@triton.jit
def trace_of_group(covariance_ptr, eps, C, group, MATRICES: tl.constexpr):
    """tr(Σ + eps I) of a group."""
    return trace_of(covariance_ptr + group * MATRICES.N * MATRICES.N, size_of(group, C, MATRICES), eps, MATRICES)


@triton.jit
def start(
    covariance_ptr,
    exact_ptr,
    residual_ptr,
    out_ptr,
    trace,
    eps,
    C,
    pair,
    group,
    MATRICES: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """R_0 and Z_1 = (3 I - R_0)/2; for less than two `STEPS` only the whitening matrix.

    With `HALF` their copies in fp32 too, R's at `exact_ptr` and Z's after it.
    """
    size = size_of(group, C, MATRICES)
    rows, columns, row, column = pair_at(pair, MATRICES)
    matrix = group * MATRICES.N * MATRICES.N
    identity = identity_of(rows, columns, size)
    iterate = identity
    if MATRICES.STEPS > 0:
        # A covariance that was summed in parts is symmetric up to rounding.
        residual = symmetrized(
            normalized(covariance_ptr + matrix, rows, columns, trace, eps, identity, MATRICES), row, column
        )  # fmt: skip
        iterate = 1.5 * identity - 0.5 * residual
    if MATRICES.STEPS > 1:
        store_symmetric(residual_ptr + matrix, rows, columns, MATRICES.RAISED * residual, MATRICES)
        store_symmetric(out_ptr + matrix, rows, columns, MATRICES.RAISED * iterate, MATRICES)
        if MATRICES.HALF:
            store_matrix(exact_ptr + matrix, rows, columns, residual, MATRICES)
            store_matrix(exact_ptr + STRIDE + matrix, rows, columns, iterate, MATRICES)
    else:
        store_whitening(out_ptr, group, rows, columns, tl.rsqrt(trace) * iterate, MATRICES)


@triton.jit
def weight_rows(gradient_ptr, whitening_ptr, grad_weight_ptr, row, C, group, MATRICES: tl.constexpr):
    """d(γ) of a row of tiles: the diagonal of the gradient for diag(γ) W times W."""
    N: tl.constexpr = MATRICES.N
    D: tl.constexpr = MATRICES.D
    SIDE: tl.constexpr = MATRICES.SIDE
    rows = row * SIDE + tl.arange(0, SIDE)
    acc = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for begin in range(0, N, SIDE):
        columns = begin + tl.arange(0, SIDE)
        gradient = load_matrix(gradient_ptr + group * N * N, rows, columns, MATRICES)
        acc += gradient * load_block(whitening_ptr + group * D * D, rows, columns, D, MATRICES.EVEN and D == N)
    tl.store(grad_weight_ptr + group * D + rows, tl.sum(acc, 1), mask=rows < size_of(group, C, MATRICES))


@triton.jit
def prepare(
    gradient_ptr,
    covariance_ptr,
    whitening_ptr,
    weight_ptr,
    grad_weight_ptr,
    d_residual_ptr,
    d_iterate_ptr,
    sums_ptr,
    levels_ptr,
    trace,
    eps,
    C,
    pair,
    group,
    MATRICES: tl.constexpr,
    AFFINE: tl.constexpr,
):
    """dR_0 = sym(dW) tr(Σ)^-1/2 and dZ_1 = -dR_0/2 of a gradient for W, and what each tile adds to that for the trace.

    With `AFFINE` the gradient is that for diag(γ) W, and gives d(γ) too. With `HALF` only the copy of dR_0 in fp32 is
    written, and the largest magnitude of each tile, for `scale`.
    """
    N: tl.constexpr = MATRICES.N
    D: tl.constexpr = MATRICES.D
    size = size_of(group, C, MATRICES)
    rows, columns, row, column = pair_at(pair, MATRICES)
    matrix = group * N * N
    gradient = load_matrix(gradient_ptr + matrix, rows, columns, MATRICES)
    transposed = load_transposed(gradient_ptr + matrix, rows, columns, MATRICES)
    if AFFINE:
        if column == 0:
            weight_rows(gradient_ptr, whitening_ptr, grad_weight_ptr, row, C, group, MATRICES)
        weight_ptr += group * D
        gradient *= tl.load(weight_ptr + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
        transposed *= tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
    gradient = 0.5 * (gradient + transposed)
    whitening = load_block(whitening_ptr + group * D * D, rows, columns, D, MATRICES.EVEN and D == N)
    through_trace = 0.5 * total(gradient * whitening)
    if MATRICES.STEPS > 0:
        d_residual = gradient * tl.rsqrt(trace)
        if MATRICES.STEPS == 1:
            identity = identity_of(rows, columns, size)
            residual = normalized(covariance_ptr + matrix, rows, columns, trace, eps, identity, MATRICES)
            through_trace += total(-0.5 * d_residual * residual)
            store_matrix(d_iterate_ptr + matrix, rows, columns, -0.5 * d_residual, MATRICES)
        elif MATRICES.HALF:
            store_matrix(d_residual_ptr + matrix, rows, columns, d_residual, MATRICES)
            tl.store(levels_ptr + group * MATRICES.PAIRS + pair, tl.max(tl.max(tl.abs(d_residual), 1), 0))
        else:
            store_symmetric(d_residual_ptr + matrix, rows, columns, d_residual, MATRICES)
            store_symmetric(d_iterate_ptr + matrix, rows, columns, -0.5 * d_residual, MATRICES)
    tl.store(sums_ptr + group * MATRICES.PAIRS + pair, times_of(row, column) * through_trace)


@triton.jit
def scale(
    exact_ptr,
    d_residual_ptr,
    d_iterate_ptr,
    levels_ptr,
    scale_ptr,
    pair,
    group,
    MATRICES: tl.constexpr,
    STRIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """dR_0 and dZ_1 in float16, scaled to entries of at most `LARGEST`, which float16 holds on all their way.

    Their copies in fp32 too, and the scale, which the result is divided by.
    """
    rows, columns, _, _ = pair_at(pair, MATRICES)
    matrix = group * MATRICES.N * MATRICES.N
    level = 0.0
    for begin in range(0, MATRICES.PAIRS, TOGETHER):
        part = begin + tl.arange(0, TOGETHER)
        there = part < MATRICES.PAIRS
        level = tl.maximum(level, tl.max(tl.load(levels_ptr + group * MATRICES.PAIRS + part, mask=there, other=0.0), 0))
    power = power_for(level, LARGEST)
    tile = load_matrix(exact_ptr + matrix, rows, columns, MATRICES) * power
    # All of the tile has been read.
    tl.debug_barrier()
    store_matrix(exact_ptr + matrix, rows, columns, tile, MATRICES)
    store_matrix(exact_ptr + STRIDE + matrix, rows, columns, -0.5 * tile, MATRICES)
    store_symmetric(d_residual_ptr + matrix, rows, columns, tile, MATRICES)
    store_symmetric(d_iterate_ptr + matrix, rows, columns, -0.5 * tile, MATRICES)
    if pair == 0:
        tl.store(scale_ptr + group, power)


@triton.jit
def finish_trace(covariance_ptr, sums_ptr, d_iterate, trace, eps, C, pair, group, MATRICES: tl.constexpr):
    """Add <dZ_T, R_0> of a tile, and of its mirror image, to what the tile adds to the gradient of the trace."""
    size = size_of(group, C, MATRICES)
    rows, columns, row, column = pair_at(pair, MATRICES)
    covariance_ptr += group * MATRICES.N * MATRICES.N
    residual = normalized(covariance_ptr, rows, columns, trace, eps, identity_of(rows, columns, size), MATRICES)
    place = sums_ptr + group * MATRICES.PAIRS + pair
    tl.store(place, tl.load(place) + times_of(row, column) * total(d_iterate * residual))


@triton.jit
def finish(
    d_iterate_ptr,
    sums_ptr,
    out_ptr,
    trace,
    factor,
    C,
    pair,
    group,
    MATRICES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor: (dZ - t I) / tr(Σ), t the sum of the tiles' `sums`.

    So many of these are added `TOGETHER`.
    """
    size = size_of(group, C, MATRICES)
    rows, columns, _, _ = pair_at(pair, MATRICES)
    matrix = group * MATRICES.N * MATRICES.N
    through_trace = 0.0
    for begin in range(0, MATRICES.PAIRS, TOGETHER):
        part = begin + tl.arange(0, TOGETHER)
        there = part < MATRICES.PAIRS
        through_trace += tl.sum(tl.load(sums_ptr + group * MATRICES.PAIRS + part, mask=there, other=0.0), 0)
    gradient = -through_trace * identity_of(rows, columns, size)
    if MATRICES.STEPS > 0:
        gradient += load_matrix(d_iterate_ptr + matrix, rows, columns, MATRICES)
    store_symmetric(out_ptr + matrix, rows, columns, gradient * (factor / trace), MATRICES)
