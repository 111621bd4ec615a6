"""What comes before and after the products of `iternorm.backends.triton.device.steps`, and the running statistics.

A group has D channels, the last one what is left of C: beyond it matrices ``[G, N, N]`` are zero. Whitening matrices
and running statistics are ``[G, D, D]``.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.newton import all_finite, total
from iternorm.backends.triton.device.steps import load_block, load_flipped, store_block, tile_of, trace_of
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def identity_of(rows, columns, size):
    """A tile of the identity of the channels that a group has."""
    return tl.where((rows[:, None] == columns[None, :]) & (rows[:, None] < size), 1.0, 0.0)


@triton.jit
def start(
    covariance_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    eps,
    C,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """R_0 = Σ / tr Σ, Z_1 = (3 I - R_0)/2 and tr(Σ)^-1/2; for less than two `STEPS` only the whitening matrix."""
    follow(PDL)
    size = tl.minimum(D, C - tl.program_id(1) * D)
    rows, columns, group = tile_of(N, BLOCK)
    covariance_ptr += group * N * N
    trace = trace_of(covariance_ptr, size, eps, N, PADDED)
    iterate = identity_of(rows, columns, size)
    if STEPS > 0:
        residual = (load_block(covariance_ptr, rows, columns, N, WHOLE) + eps * iterate) / trace
        iterate = 1.5 * iterate - 0.5 * residual
    if STEPS > 1:
        store_block(residual_ptr + group * N * N, rows, columns, residual, N, WHOLE)
        store_block(out_ptr + group * N * N, rows, columns, iterate, N, WHOLE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + group, tl.rsqrt(trace))
    else:
        store_block(out_ptr + group * D * D, rows, columns, tl.rsqrt(trace) * iterate, D, WHOLE and D == N)


@triton.jit
def blend(
    value_ptr,
    mean_ptr,
    variance_ptr,
    running_mean_ptr,
    running_matrix_ptr,
    num_batches_ptr,
    batches_ptr,
    momentum,
    C,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The running statistics of a batch whose moments are finite; `value` is its whitening or covariance, of N rows."""
    size = tl.minimum(D, C - tl.program_id(1) * D)
    rows, columns, group = tile_of(D, BLOCK)
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    matrix_ptrs = running_matrix_ptr + group * D * D + rows[:, None] * D + columns[None, :]
    # Older than the launch before: another batch's, and the moments, from which the whitening matrix was computed.
    old = tl.load(matrix_ptrs, mask=inside, other=0.0).to(tl.float32)
    if CUMULATIVE:
        momentum = 1.0 / (tl.load(batches_ptr) + 1).to(tl.float32)
    keep = all_finite(mean_ptr, variance_ptr, C)
    follow(PDL)

    value = load_block(value_ptr + group * N * N, rows, columns, N, False)
    tl.store(matrix_ptrs, tl.where(keep, old + momentum * (value - old), old), mask=inside)
    if tl.program_id(0) < tl.cdiv(D, BLOCK):
        # As many programs as the matrix has tiles in a row share the channels.
        member = columns < size
        channels = group * D + columns
        mean = tl.load(mean_ptr + channels, mask=member, other=0.0)
        old_mean = tl.load(running_mean_ptr + channels, mask=member, other=0.0).to(tl.float32)
        tl.store(running_mean_ptr + channels, tl.where(keep, old_mean + momentum * (mean - old_mean), old_mean), member)
    if COUNT:
        if (tl.program_id(0) == 0) & (group == 0):
            tl.store(num_batches_ptr, tl.load(batches_ptr) + keep.to(tl.int64))


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
    STEPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    AFFINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """dR_0 = sym(dW) tr(Σ)^-1/2 and dZ_1 = -dR_0/2 of a gradient for W, and what each tile adds to that for the trace.

    With `AFFINE` the gradient is that for diag(γ) W, and gives d(γ) too.
    """
    # Of a chain that begins here the launch before may have written anything that is read.
    follow(PDL)
    size = tl.minimum(D, C - tl.program_id(1) * D)
    rows, columns, group = tile_of(N, BLOCK)
    covariance_ptr += group * N * N
    gradient_ptr += group * N * N
    whitening_ptr += group * D * D
    gradient = load_block(gradient_ptr, rows, columns, N, WHOLE)
    flipped = load_flipped(gradient_ptr, rows, columns, N, WHOLE)
    if AFFINE:
        weight_ptr += group * D
        if tl.program_id(0) % tl.cdiv(N, BLOCK) == 0:
            line = tl.arange(0, PADDED)
            whole_rows = load_block(gradient_ptr, rows, line, N, WHOLE and PADDED == N)
            whole_rows *= load_block(whitening_ptr, rows, line, D, WHOLE and PADDED == D)
            tl.store(grad_weight_ptr + group * D + rows, tl.sum(whole_rows, 1), mask=rows < size)
        gradient *= tl.load(weight_ptr + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
        flipped *= tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
    through_trace = 0.5 * total(gradient * load_block(whitening_ptr, rows, columns, D, WHOLE and D == N))
    if STEPS > 0:
        trace = trace_of(covariance_ptr, size, eps, N, PADDED)
        d_residual = 0.5 * (gradient + flipped) * tl.rsqrt(trace)
        store_block(d_iterate_ptr + group * N * N, rows, columns, -0.5 * d_residual, N, WHOLE)
        if STEPS > 1:
            store_block(d_residual_ptr + group * N * N, rows, columns, d_residual, N, WHOLE)
        else:
            covariance = load_block(covariance_ptr, rows, columns, N, WHOLE) + eps * identity_of(rows, columns, size)
            through_trace += total(-0.5 * d_residual * (covariance / trace))
    tl.store(sums_ptr + group * tl.num_programs(0) + tl.program_id(0), through_trace)


@triton.jit
def finish(
    d_iterate_ptr,
    covariance_ptr,
    sums_ptr,
    out_ptr,
    eps,
    factor,
    C,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor: (dZ - t I) / tr(Σ), t the sum of the tiles' `sums`."""
    size = tl.minimum(D, C - tl.program_id(1) * D)
    rows, columns, group = tile_of(N, BLOCK)
    # The forward's, so older than the launch before.
    trace = trace_of(covariance_ptr + group * N * N, size, eps, N, PADDED)
    follow(PDL)
    count = tl.num_programs(0)
    through_trace = 0.0
    for begin in range(0, count, TILES):
        tile = begin + tl.arange(0, TILES)
        through_trace += tl.sum(tl.load(sums_ptr + group * count + tile, mask=tile < count, other=0.0), 0)
    gradient = -through_trace * identity_of(rows, columns, size)
    if STEPS > 0:
        gradient += load_block(d_iterate_ptr + group * N * N, rows, columns, N, WHOLE)
    store_block(out_ptr + group * N * N, rows, columns, gradient * (factor / trace), N, WHOLE)
