"""The last launch of a pass for groups of up to 64 channels: Newton's iteration, then the activation.

Every program computes the whitening matrix of its group, all to the same bits, and applies it to its share of the
samples: that takes no longer than one program doing it while the others wait, and spares a launch. Forward, one program
more has no samples: it writes the matrices that the backward wants and the running statistics, which would hold up one
that has (6 us of latencies where the others' samples take 8: 64x64x32x32, fp32, H200).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.apply import backward_tiles, forward_tiles
from iternorm.backends.triton.device.newton import all_finite, differentiate, iterate
from iternorm.backends.triton.device.tiles import channels_of, follow


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
def whiten_forward(
    x_ptr,
    y_ptr,
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
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    RUNNING: tl.constexpr,
    COUNT: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    RUNNING_COVARIANCE: tl.constexpr,
    RELU: tl.constexpr,
    JITTER: tl.constexpr,
    NEWTON: tl.constexpr,
    WATCHED: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = diag(γ) W (x - μ) + β (math.md, Eq. 1) with W of the batch, and the running statistics if it is finite.

    `JITTER` is added to the variances, relative to each: see `layout.jitter`. `NEWTON` is the iteration's number of
    parts, `PARTS` that of the activation. The matrices that the backward wants are kept at a group's `STRIDE`.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, D, BD, ROWS)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    identity = tl.where((i == j) & valid[:, None], 1.0, 0.0)
    inside = (i < D) & (j < D)
    target = group * D * D + i * D + j
    offset = tl.zeros([BD], dtype=tl.float32)
    if BIAS:
        offset = tl.load(bias_ptr + features, mask=valid, other=0.0).to(tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
    follow(PDL)

    raw = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    covariance = raw + (eps + JITTER * raw) * identity
    trace = tl.sum(tl.sum(covariance * identity, 1), 0)
    keeps = program == tl.num_programs(0) - 1
    z = iterate(covariance, trace, identity, iterates_ptr + group * STRIDE, keeps, BD, T, NEWTON, WATCHED)
    whitening = z * tl.rsqrt(trace)
    if keeps:
        tl.store(whitening_ptr + target, whitening, mask=inside)
        if RUNNING:
            keep = all_finite(mean_ptr, variance_ptr, C)
            if CUMULATIVE:
                momentum = 1.0 / (tl.load(batches_ptr) + 1).to(tl.float32)
            if RUNNING_COVARIANCE:
                value = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
            else:
                value = whitening
            old = tl.load(running_matrix_ptr + target, mask=inside, other=0.0).to(tl.float32)
            tl.store(running_matrix_ptr + target, tl.where(keep, old + momentum * (value - old), old), mask=inside)
            old_mean = tl.load(running_mean_ptr + features, mask=valid, other=0.0).to(tl.float32)
            new_mean = tl.where(keep, old_mean + momentum * (mean - old_mean), old_mean)
            tl.store(running_mean_ptr + features, new_mean, mask=valid)
            if COUNT:
                if group == 0:
                    tl.store(num_batches_ptr, tl.load(batches_ptr) + keep.to(tl.int64))

    if WEIGHT:
        whitening = whitening * weight[:, None]
    forward_tiles(
        x_ptr, y_ptr, whitening, mean, offset, channels, valid, program, tiles_per_program, M, C, L,
        BD, BL, ROWS, PARTS, BIG, WHOLE, RELU, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles_per_program"])
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
    tiles_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BL: tl.constexpr,
    ROWS: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    WEIGHT: tl.constexpr,
    RELU: tl.constexpr,
    JITTER: tl.constexpr,
    NEWTON: tl.constexpr,
    WATCHED: tl.constexpr,
    NEWTON_STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    BIG: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ dy (x-μ)ᵀ -> d(γ), and dx = Aᵀ dy + B (x-μ) - Aᵀ Σdy / m (Eq. 10-12, 22-24).

    With an activation, dy where the output is positive.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    features, valid, channels = channels_of(group, C, L, D, BD, ROWS)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    identity = tl.where((i == j) & valid[:, None], 1.0, 0.0)
    inside = (i < D) & (j < D)
    whitening_ptr += group * D * D
    cross_ptr += group * BD * BD
    whitening = tl.load(whitening_ptr + i * D + j, mask=inside, other=0.0)
    covariance = tl.load(covariance_ptr + group * BD * BD + i * BD + j)
    covariance += (eps + JITTER * covariance) * identity
    trace = tl.sum(tl.sum(covariance * identity, 1), 0)
    if WEIGHT:
        weight = tl.load(weight_ptr + features, mask=valid, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + features, mask=valid, other=0.0)
    follow(PDL)

    grad_sum = tl.load(grad_sum_ptr + features, mask=valid, other=0.0)
    cross = tl.load(cross_ptr + i * BD + j)
    transposed = tl.load(cross_ptr + j * BD + i)
    if WEIGHT:
        if program == 0:
            tl.store(grad_weight_ptr + features, tl.sum(cross * whitening, 1), mask=valid)
        cross = cross * weight[:, None]
        transposed = transposed * weight[None, :]
    through_trace = 0.5 * tl.sum(tl.sum(cross * whitening, 1), 0)
    gradient = 0.5 * (cross + transposed)
    second_matrix = differentiate(
        gradient,
        covariance,
        trace,
        through_trace,
        identity,
        iterates_ptr + group * STRIDE,
        BD,
        T,
        NEWTON,
        WATCHED,
        LARGEST,
        NEWTON_STAGES,
    )
    second_matrix *= 2.0 / (trace * M)
    # Row i of Aᵀ: column i of W, scaled by γ of the output channel.
    first_matrix = tl.load(whitening_ptr + j * D + i, mask=inside, other=0.0)
    if WEIGHT:
        first_matrix = first_matrix * weight[None, :]
    offset = -tl.sum(first_matrix * (grad_sum / M)[None, :], 1)
    backward_tiles(
        grad_ptr, x_ptr, output_ptr, dx_ptr, first_matrix, second_matrix, mean, offset, channels, valid, program,
        tiles_per_program, M, C, L, BD, BL, ROWS, PARTS, BIG, WHOLE, RELU, STAGES,
    )  # fmt: skip


@triton.jit
def weight_gradient(cross_ptr, whitening_ptr, grad_weight_ptr, C, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """d(γ) alone, for an activation that wants no gradient."""
    follow(PDL)
    group = tl.program_id(0)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    cross = tl.load(cross_ptr + group * BD * BD + i * BD + j)
    whitening = tl.load(whitening_ptr + group * D * D + i * D + j, mask=(i < D) & (j < D), other=0.0)
    c = tl.arange(0, BD)
    tl.store(grad_weight_ptr + group * D + c, tl.sum(cross * whitening, 1), mask=c < tl.minimum(D, C - group * D))
