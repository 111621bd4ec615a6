"""The last launch of a pass for groups of up to 64 channels: Newton's iteration, then the activation.

Every program computes the whitening matrix of its group, all to the same bits, and applies it to its share of the
samples: that takes no longer than one program doing it while the others wait, and spares a launch. Forward, one program
more has no samples: it writes the matrices that the backward wants and the running statistics, which would hold up one
that has (6 us of latencies where the others' samples take 8: 64x64x32x32, fp32, H200).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import backward_tiles, forward_tiles
from iternorm.backends.triton.device.items.tiles import backward_items, begin_of, forward_items, on_items, rows_of
from iternorm.backends.triton.device.newton import differentiate, iterate, total
from iternorm.backends.triton.device.running import (
    all_finite,
    blend_mean,
    blended,
    count_batch,
    finite,
    share_of_batch,
)
from iternorm.backends.triton.device.tiles import (
    channels_of,
    column_of,
    follow,
    load_vector,
    matrix_of,
    over_group,
)


@triton.jit
def regularized(raw, identity, eps, NEWTON: tl.constexpr):
    """A covariance with eps, and with ZCA's jitter, on its diagonal."""
    return raw + (eps + NEWTON.JITTER * raw) * identity


@triton.jit
def trace_of(covariance_ptr, eps, count, BD: tl.constexpr, NEWTON: tl.constexpr):
    """The trace of a `regularized` covariance of so many features, from a load of its diagonal.

    Every warp loads all of it, so that none waits for another.
    """
    WIDTH: tl.constexpr = BD if BD < 32 else 32
    i = tl.arange(0, WIDTH)[None, :]
    diagonal = tl.load(covariance_ptr + i * (BD + 1))
    for start in tl.static_range(WIDTH, BD, WIDTH):
        diagonal += tl.load(covariance_ptr + (start + i) * (BD + 1))
    return (1.0 + NEWTON.JITTER) * tl.sum(tl.sum(diagonal, 1), 0) + eps * count


@triton.jit
def traces_of(covariance, identity, SHARED: tl.constexpr):
    """The traces ``[BD, 1]`` of groups that share a tile, their covariances, and which of them can be whitened.

    A group that cannot, whose trace is zero or no number, is left out of the products: it would make all others NaN.
    """
    trace = over_group(covariance * identity, SHARED)
    sound = (trace > 0.0) & finite(trace)
    return tl.where(sound, trace, 1.0), tl.where(sound, covariance, 0.0), sound


@triton.jit(do_not_specialize=["M", "num_programs"])
def whiten_forward(
    x_ptr,
    y_ptr,
    residual_ptr,
    covariance_ptr,
    mean_ptr,
    variance_ptr,
    whitening_ptr,
    iterates_ptr,
    weight_ptr,
    bias_ptr,
    running_mean_ptr,
    running_matrix_ptr,
    num_batches_ptr,
    batches_ptr,
    eps,
    momentum,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    NEWTON: tl.constexpr,
    AVERAGE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = diag(γ) W (x - μ) + β (math.md, Eq. 1) with W of the batch, and the running statistics if it is finite.

    `AVERAGE` is what is kept of them, None without any.
    """
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    # Of a whitening matrix.
    ROW: tl.constexpr = TILE.SHARED if TILE.SHARED > 0 else TILE.D
    program = tl.program_id(0)
    group = tl.program_id(1)
    if TILE.SPAN > 0:
        features, valid, channels, weights = rows_of(group, C, L, TILE)
        begin = begin_of(group, C, L, TILE)
    else:
        features, valid, channels = channels_of(group, C, L, TILE)
    i, j, inside = matrix_of(group, C, TILE.D, TILE.BD, TILE.SHARED)
    identity = tl.where((i == j) & valid[:, None], 1.0, 0.0)
    target = group * D * ROW + i * ROW + column_of(j, TILE.SHARED)
    count = tl.sum(valid.to(tl.float32), 0)
    if TILE.SPAN == 0:
        offset = load_vector(bias_ptr, features, valid, BIAS, 0.0)
        weight = load_vector(weight_ptr, features, valid, WEIGHT, 1.0)
    follow(PDL)

    if TILE.SHARED > 0:
        raw = tl.load(covariance_ptr + group * BD * BD + i * BD + j, mask=inside, other=0.0)
    else:
        trace = trace_of(covariance_ptr + group * BD * BD, eps, count, BD, NEWTON)
        raw = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    covariance = regularized(raw, identity, eps, NEWTON)
    if TILE.SHARED > 0:
        trace, covariance, sound = traces_of(covariance, identity, TILE.SHARED)
    keeps = program == tl.num_programs(0) - 1
    z = iterate(covariance, trace, identity, iterates_ptr + group * NEWTON.STRIDE, keeps, BD, NEWTON)
    whitening = z * tl.rsqrt(trace)
    if TILE.SHARED > 0:
        whitening = tl.where(sound | ~valid[:, None], whitening, float("nan"))
    if keeps:
        tl.store(whitening_ptr + target, whitening, mask=inside)
        if AVERAGE is not None:
            keep = all_finite(mean_ptr, variance_ptr, eps, C, AVERAGE)
            share = share_of_batch(momentum, batches_ptr, AVERAGE)
            if AVERAGE.COVARIANCE:
                value = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
            else:
                value = whitening
            old = tl.load(running_matrix_ptr + target, mask=inside, other=0.0).to(tl.float32)
            tl.store(running_matrix_ptr + target, blended(old, value, share, keep), mask=inside)
            blend_mean(running_mean_ptr, features, valid, mean, share, keep)
            if AVERAGE.COUNT:
                if group == 0:
                    count_batch(num_batches_ptr, batches_ptr, keep)

    if TILE.FLAT:
        features, valid, channels = channels_of(group, C, L, TILE)
        mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
        offset = load_vector(bias_ptr, channels, valid, BIAS, 0.0)
        weight = load_vector(weight_ptr, channels, valid, WEIGHT, 1.0)
        whitening = on_items(whitening, TILE)
        x_ptr += begin
        y_ptr += begin
        M = L
    if TILE.SPAN > 0 and not TILE.FLAT:
        forward_items(
            x_ptr + begin, y_ptr + begin, weight_ptr, bias_ptr, whitening, mean, channels, weights, valid, program,
            num_programs, C, L, TILE, WEIGHT, BIAS, AFTER,
        )  # fmt: skip
    else:
        if WEIGHT:
            whitening = whitening * weight[:, None]
        forward_tiles(
            x_ptr, y_ptr, residual_ptr, whitening, mean, offset, channels, valid, program, num_programs, M, C, L,
            TILE, AFTER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_programs"])
def whiten_backward(
    grad_ptr,
    x_ptr,
    output_ptr,
    dx_ptr,
    cross_ptr,
    covariance_ptr,
    mean_ptr,
    whitening_ptr,
    iterates_ptr,
    grad_sum_ptr,
    weight_ptr,
    grad_weight_ptr,
    eps,
    M,
    C,
    L,
    num_programs,
    TILE: tl.constexpr,
    NEWTON: tl.constexpr,
    WEIGHT: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ dy (x-μ)ᵀ -> d(γ), and dx = Aᵀ dy + B (x-μ) - Aᵀ Σdy / m (Eq. 10-12, 22-24).

    With an activation, dy where the output is positive.
    """
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    # Of a whitening matrix.
    ROW: tl.constexpr = TILE.SHARED if TILE.SHARED > 0 else TILE.D
    program = tl.program_id(0)
    group = tl.program_id(1)
    # Of an item, γ is in the cross moments already.
    FOLDED: tl.constexpr = WEIGHT and TILE.SPAN == 0
    if TILE.SPAN > 0:
        features, valid, channels, weights = rows_of(group, C, L, TILE)
        begin = begin_of(group, C, L, TILE)
    else:
        features, valid, channels = channels_of(group, C, L, TILE)
    i, j, inside = matrix_of(group, C, TILE.D, TILE.BD, TILE.SHARED)
    identity = tl.where((i == j) & valid[:, None], 1.0, 0.0)
    whitening_ptr += group * D * ROW
    cross_ptr += group * BD * BD
    whitening = tl.load(whitening_ptr + i * ROW + column_of(j, TILE.SHARED), mask=inside, other=0.0)
    if TILE.SHARED > 0:
        raw = tl.load(covariance_ptr + group * BD * BD + i * BD + j, mask=inside, other=0.0)
    else:
        raw = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
    covariance = regularized(raw, identity, eps, NEWTON)
    if TILE.SHARED > 0:
        trace, covariance, _ = traces_of(covariance, identity, TILE.SHARED)
    else:
        trace = total(covariance * identity)
    weight = load_vector(weight_ptr, features, valid, FOLDED, 1.0)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    follow(PDL)

    grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
    if TILE.SHARED > 0:
        cross = tl.load(cross_ptr + i * BD + j, mask=inside, other=0.0)
        transposed = tl.load(cross_ptr + j * BD + i, mask=inside, other=0.0)
    else:
        cross = tl.load(cross_ptr + i * BD + j)
        transposed = tl.load(cross_ptr + j * BD + i)
    if FOLDED:
        if program == 0:
            tl.store(grad_weight_ptr + features, tl.sum(cross * whitening, 1), mask=valid)
        cross = cross * weight[:, None]
        transposed = transposed * weight[None, :]
    through_trace = 0.5 * over_group(cross * whitening, TILE.SHARED)
    gradient = 0.5 * (cross + transposed)
    kept_ptr = iterates_ptr + group * NEWTON.STRIDE
    second_matrix = differentiate(gradient, covariance, trace, through_trace, identity, kept_ptr, BD, NEWTON)
    # One after the other: the product of the trace and the samples may be infinite.
    second_matrix = (2.0 / M) * second_matrix * (1.0 / trace)
    # Row i of Aᵀ: column i of W, scaled by γ of the output channel.
    first_matrix = tl.load(whitening_ptr + j * ROW + column_of(i, TILE.SHARED), mask=inside, other=0.0)
    if FOLDED:
        first_matrix = first_matrix * weight[None, :]
    if TILE.FLAT:
        features, valid, channels = channels_of(group, C, L, TILE)
        mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
        grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
        first_matrix = on_items(first_matrix, TILE)
        second_matrix = on_items(second_matrix, TILE)
    offset = -tl.sum(first_matrix * (grad_sum / M)[None, :], 1)
    if TILE.FLAT:
        first_matrix *= load_vector(weight_ptr, channels, valid, WEIGHT, 1.0)[None, :]
        M = L
    if TILE.SPAN > 0:
        grad_ptr += begin
        x_ptr += begin
        dx_ptr += begin
        if RELU:
            output_ptr += begin
    if TILE.SPAN > 0 and not TILE.FLAT:
        backward_items(
            grad_ptr, x_ptr, output_ptr, dx_ptr, weight_ptr, first_matrix, second_matrix, mean, offset, channels,
            weights, valid, program, num_programs, C, L, TILE, WEIGHT, RELU,
        )  # fmt: skip
    else:
        backward_tiles(
            grad_ptr, x_ptr, output_ptr, dx_ptr, first_matrix, second_matrix, mean, offset, channels, valid, program,
            num_programs, M, C, L, TILE, RELU,
        )  # fmt: skip


@triton.jit
def weight_gradient(
    cross_ptr,
    whitening_ptr,
    grad_weight_ptr,
    C,
    D: tl.constexpr,
    BD: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """d(γ) alone, for an activation that wants no gradient."""
    ROW: tl.constexpr = SHARED if SHARED > 0 else D
    follow(PDL)
    group = tl.program_id(0)
    i, j, inside = matrix_of(group, C, D, BD, SHARED)
    cross = tl.load(cross_ptr + group * BD * BD + i * BD + j)
    whitening = tl.load(whitening_ptr + group * D * ROW + i * ROW + column_of(j, SHARED), mask=inside, other=0.0)
    c = tl.arange(0, BD)
    tl.store(grad_weight_ptr + group * D + c, tl.sum(cross * whitening, 1), mask=c < tl.minimum(D, C - group * D))
