"""What comes before and after the products of `iternorm.backends.triton.device.steps`, tile by tile as there.

A group has D channels, the last one what is left of C: beyond it matrices ``[G, N, N]`` are zero. Whitening matrices
and running statistics are ``[G, D, D]``.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.newton import total
from iternorm.backends.triton.device.steps import (
    load_block,
    load_matrix,
    load_transposed,
    pair_at,
    place_of,
    store_matrix,
    store_whitening,
    trace_of,
)


@triton.jit
def identity_of(rows, columns, size):
    """A tile of the identity of the channels that a group has."""
    return tl.where((rows[:, None] == columns[None, :]) & (rows[:, None] < size), 1.0, 0.0)


@triton.jit
def size_of(group, C, MATRICES: tl.constexpr):
    """The channels that a group has."""
    return tl.minimum(MATRICES.D, C - group * MATRICES.D)


@triton.jit
def normalized(covariance_ptr, rows, columns, trace, eps, identity, MATRICES: tl.constexpr):
    """A tile of R_0 = Σ / tr Σ."""
    return (load_matrix(covariance_ptr, rows, columns, MATRICES) + eps * identity) / trace


@triton.jit
def start(
    covariance_ptr,
    residual_ptr,
    out_ptr,
    scale_ptr,
    eps,
    C,
    tile,
    group,
    MATRICES: tl.constexpr,
):
    """R_0, Z_1 = (3 I - R_0)/2 and tr(Σ)^-1/2; for less than two `STEPS` only the whitening matrix."""
    size = size_of(group, C, MATRICES)
    rows, columns, matrix = place_of(tile, group, MATRICES)
    covariance_ptr += matrix
    trace = trace_of(covariance_ptr, size, eps, MATRICES)
    identity = identity_of(rows, columns, size)
    iterate = identity
    if MATRICES.STEPS > 0:
        residual = normalized(covariance_ptr, rows, columns, trace, eps, identity, MATRICES)
        iterate = 1.5 * identity - 0.5 * residual
    if MATRICES.STEPS > 1:
        store_matrix(residual_ptr + matrix, rows, columns, residual, MATRICES)
        store_matrix(out_ptr + matrix, rows, columns, iterate, MATRICES)
        if tile == 0:
            tl.store(scale_ptr + group, tl.rsqrt(trace))
    else:
        store_whitening(out_ptr, group, rows, columns, tl.rsqrt(trace) * iterate, MATRICES)


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
    eps,
    C,
    tile,
    group,
    MATRICES: tl.constexpr,
    AFFINE: tl.constexpr,
):
    """dR_0 = sym(dW) tr(Σ)^-1/2 and dZ_1 = -dR_0/2 of a gradient for W, and what each tile adds to that for the trace.

    With `AFFINE` the gradient is that for diag(γ) W, and gives d(γ) too.
    """
    N: tl.constexpr = MATRICES.N
    D: tl.constexpr = MATRICES.D
    EVEN: tl.constexpr = MATRICES.EVEN
    size = size_of(group, C, MATRICES)
    rows, columns, matrix = place_of(tile, group, MATRICES)
    covariance_ptr += matrix
    gradient_ptr += matrix
    whitening_ptr += group * D * D
    gradient = load_matrix(gradient_ptr, rows, columns, MATRICES)
    transposed = load_transposed(gradient_ptr, rows, columns, MATRICES)
    if AFFINE:
        weight_ptr += group * D
        if tile % tl.cdiv(N, MATRICES.SIDE) == 0:
            line = tl.arange(0, MATRICES.PADDED)
            full_rows = load_block(gradient_ptr, rows, line, N, EVEN and MATRICES.PADDED == N)
            full_rows *= load_block(whitening_ptr, rows, line, D, EVEN and MATRICES.PADDED == D)
            tl.store(grad_weight_ptr + group * D + rows, tl.sum(full_rows, 1), mask=rows < size)
        gradient *= tl.load(weight_ptr + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
        transposed *= tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
    through_trace = 0.5 * total(gradient * load_block(whitening_ptr, rows, columns, D, EVEN and D == N))
    if MATRICES.STEPS > 0:
        trace = trace_of(covariance_ptr, size, eps, MATRICES)
        d_residual = 0.5 * (gradient + transposed) * tl.rsqrt(trace)
        store_matrix(d_iterate_ptr + matrix, rows, columns, -0.5 * d_residual, MATRICES)
        if MATRICES.STEPS > 1:
            store_matrix(d_residual_ptr + matrix, rows, columns, d_residual, MATRICES)
        else:
            residual = normalized(covariance_ptr, rows, columns, trace, eps, identity_of(rows, columns, size), MATRICES)
            through_trace += total(-0.5 * d_residual * residual)
    tl.store(sums_ptr + group * MATRICES.TILES + tile, through_trace)


@triton.jit
def finish_trace(covariance_ptr, sums_ptr, d_iterate, eps, C, pair, group, MATRICES: tl.constexpr):
    """Add <dZ_T, R_0> of a tile, and of its mirror image, to what the tile adds to the gradient of the trace."""
    size = size_of(group, C, MATRICES)
    rows, columns, row, column = pair_at(pair, MATRICES)
    covariance_ptr += group * MATRICES.N * MATRICES.N
    trace = trace_of(covariance_ptr, size, eps, MATRICES)
    residual = normalized(covariance_ptr, rows, columns, trace, eps, identity_of(rows, columns, size), MATRICES)
    place = sums_ptr + group * MATRICES.TILES + row * tl.cdiv(MATRICES.N, MATRICES.SIDE) + column
    times = tl.where(row == column, 1.0, 2.0)
    tl.store(place, tl.load(place) + times * total(d_iterate * residual))


@triton.jit
def finish(
    d_iterate_ptr,
    covariance_ptr,
    sums_ptr,
    out_ptr,
    eps,
    factor,
    C,
    tile,
    group,
    MATRICES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor: (dZ - t I) / tr(Σ), t the sum of the tiles' `sums`.

    So many of these are added `TOGETHER`.
    """
    size = size_of(group, C, MATRICES)
    rows, columns, matrix = place_of(tile, group, MATRICES)
    trace = trace_of(covariance_ptr + matrix, size, eps, MATRICES)
    count: tl.constexpr = MATRICES.TILES
    through_trace = 0.0
    for begin in range(0, count, TOGETHER):
        part = begin + tl.arange(0, TOGETHER)
        through_trace += tl.sum(tl.load(sums_ptr + group * count + part, mask=part < count, other=0.0), 0)
    gradient = -through_trace * identity_of(rows, columns, size)
    if MATRICES.STEPS > 0:
        gradient += load_matrix(d_iterate_ptr + matrix, rows, columns, MATRICES)
    store_matrix(out_ptr + matrix, rows, columns, gradient * (factor / trace), MATRICES)
