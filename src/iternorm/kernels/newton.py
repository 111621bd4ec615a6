"""Newton's iteration for groups of up to 64 channels: one program a group, all steps on chip. Forward and backward.

The residual form of docs/math.md, Eq. 8-9, with M = (3 I - R)/2 multiplied out: Z <- 3/2 Z - 1/2 Z R and
R <- 9/4 R - 3/2 R² + 1/4 R³. R is small in the first steps, so rounding of its products matters less than of M's: on
an H200, TF32 products of 64x64 at T=5 gave errors of 1.3e-3 and 2.0e-3 (output, gradient) before, see DESIGN.md for
after. The forward keeps the R and Z of its steps, which spares the backward the forward's products. Matrices are
``[BD, BD]``, zero beyond the group.

Products are of whole fp32 matrices in the tensor cores' TF32 (`PARTS` 1), in fp32 in the interpreter (0), or to fp32's
accuracy of three bfloat16 parts each (3). Then the parts are what is kept: the backward's products take them from
shared memory as they come, where splitting them again would spill registers (41 us against 25, T=5, H200).
"""

import triton
import triton.language as tl

from iternorm.kernels.moments import follow, high, low, rest


@triton.jit
def finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def all_finite(mean_ptr, variance_ptr, C):
    """Whether every channel's mean and variance is finite: then so is every whitening matrix."""
    bad = 0
    for start in range(0, C, 512):
        c = start + tl.arange(0, 512)
        mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
        variance = tl.load(variance_ptr + c, mask=c < C, other=0.0)
        bad += tl.sum((~(finite(mean) & finite(variance))).to(tl.int32), 0)
    return bad == 0


@triton.jit
def split(a, PARTS: tl.constexpr):
    """The parts of a matrix that products take: itself, unless there are three."""
    if PARTS == 3:
        first, second, third = high(a), low(a), rest(a)
    else:
        first, second, third = a, a, a
    return first, second, third


@triton.jit
def product(a1, a2, a3, b1, b2, b3, PARTS: tl.constexpr):
    """a b of matrices in parts, in fp32."""
    if PARTS == 3:
        acc = tl.dot(a1, b3)
        acc = tl.dot(a3, b1, acc)
        acc = tl.dot(a2, b2, acc)
        acc = tl.dot(a1, b2, acc)
        acc = tl.dot(a2, b1, acc)
        acc = tl.dot(a1, b1, acc)
    elif PARTS == 1:
        acc = tl.dot(a1, b1, input_precision="tf32")
    else:
        acc = tl.dot(a1, b1, input_precision="ieee")
    return acc


@triton.jit
def mirrored(a1, a2, a3, b1, b2, b3, PARTS: tl.constexpr):
    """a b for a symmetric b. Tensor cores read a TF32 right operand by columns: given bᵀ it need not be turned."""
    if PARTS == 3:
        acc = product(a1, a2, a3, b1, b2, b3, PARTS)
    else:
        acc = product(a1, a2, a3, tl.trans(b1), tl.trans(b2), tl.trans(b3), PARTS)
    return acc


@triton.jit
def keep_matrix(ptr, slot, tile, a1, a2, a3, BD: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 3:
        tl.store(ptr + slot * 3 * BD * BD + tile, a1)
        tl.store(ptr + (slot * 3 + 1) * BD * BD + tile, a2)
        tl.store(ptr + (slot * 3 + 2) * BD * BD + tile, a3)
    else:
        tl.store(ptr + slot * BD * BD + tile, a1)


@triton.jit
def kept_matrix(ptr, slot, tile, BD: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 3:
        first = tl.load(ptr + slot * 3 * BD * BD + tile)
        second = tl.load(ptr + (slot * 3 + 1) * BD * BD + tile)
        third = tl.load(ptr + (slot * 3 + 2) * BD * BD + tile)
    else:
        first = tl.load(ptr + slot * BD * BD + tile)
        second, third = first, first
    return first, second, third


@triton.jit
def newton_forward(
    covariance_ptr,
    mean_ptr,
    variance_ptr,
    whitening_ptr,
    iterates_ptr,
    running_mean_ptr,
    running_matrix_ptr,
    num_batches_ptr,
    finite_ptr,
    eps,
    momentum,
    C,
    T: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    STRIDE: tl.constexpr,
    RUNNING: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    RUNNING_COVARIANCE: tl.constexpr,
    SAVE: tl.constexpr,
    JITTER: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Covariance -> whitening matrix (Eq. 5-9), and the running statistics of a batch whose moments are finite.

    `JITTER` is added to the variances, relative to each: see `shapes.jitter`. The R and Z of a group are kept at its
    `STRIDE`: R_0..R_{T-1} and Z_1..Z_{T-1}.
    """
    group = tl.program_id(0)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    tile = i * BD + j
    size = tl.minimum(D, C - group * D)
    identity = tl.where((i == j) & (i < size), 1.0, 0.0)
    inside = (i < D) & (j < D)
    target = group * D * D + i * D + j
    c = tl.arange(0, BD)
    member = c < size
    if RUNNING:
        # Read early, while the launch before is at work; the last to write them was another batch.
        old = tl.load(running_matrix_ptr + target, mask=inside, other=0.0).to(tl.float32)
        old_mean = tl.load(running_mean_ptr + group * D + c, mask=member, other=0.0).to(tl.float32)
        if CUMULATIVE:
            momentum = 1.0 / (tl.load(num_batches_ptr) + 1).to(tl.float32)
    follow(PDL)

    if RUNNING:
        keep = all_finite(mean_ptr, variance_ptr, C)
        mean = tl.load(mean_ptr + group * D + c, mask=member, other=0.0)
    raw = tl.load(covariance_ptr + group * BD * BD + tile)
    covariance = raw + (eps + JITTER * raw) * identity
    trace = tl.sum(tl.sum(covariance * identity, 1), 0)
    if T == 0:
        iterate = identity
    else:
        residual = covariance / trace
        iterate = 1.5 * identity - 0.5 * residual
        kept = iterates_ptr + group * STRIDE
        if SAVE:
            if PARTS == 3:
                # Whole, it is the covariance over its trace, which the backward has.
                r1, r2, r3 = split(residual, PARTS)
                keep_matrix(kept, 0, tile, r1, r2, r3, BD, PARTS)
        for k in range(1, T):
            r1, r2, r3 = split(residual, PARTS)
            # Rounding leaves R a little asymmetric. Read transposed in this product too, that part would grow 2.5 times
            # a step past convergence; so it shrinks by half.
            square = mirrored(r1, r2, r3, r1, r2, r3, PARTS)
            s1, s2, s3 = split(0.25 * square - 1.5 * residual, PARTS)
            residual = 2.25 * residual + product(r1, r2, r3, s1, s2, s3, PARTS)
            r1, r2, r3 = split(residual, PARTS)
            z1, z2, z3 = split(iterate, PARTS)
            if SAVE:
                keep_matrix(kept, k, tile, r1, r2, r3, BD, PARTS)
                keep_matrix(kept, T + k - 1, tile, z1, z2, z3, BD, PARTS)
            iterate = 1.5 * iterate - 0.5 * mirrored(z1, z2, z3, r1, r2, r3, PARTS)
    whitening = iterate * tl.rsqrt(trace)
    tl.store(whitening_ptr + target, whitening, mask=inside)

    if RUNNING:
        if RUNNING_COVARIANCE:
            value = raw
        else:
            value = whitening
        tl.store(running_matrix_ptr + target, tl.where(keep, old + momentum * (value - old), old), mask=inside)
        new_mean = tl.where(keep, old_mean + momentum * (mean - old_mean), old_mean)
        tl.store(running_mean_ptr + group * D + c, new_mean, mask=member)
        if group == 0:
            # The counter itself moves in the next launch: other programs of this one may still read it.
            tl.store(finite_ptr, keep.to(tl.int32))


@triton.jit(do_not_specialize=["M"])
def newton_backward(
    cross_ptr,
    covariance_ptr,
    whitening_ptr,
    iterates_ptr,
    weight_ptr,
    grad_weight_ptr,
    second_ptr,
    eps,
    M,
    C,
    T: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    JITTER: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ dy (x-μ)ᵀ -> d(weight) and the matrix B of dx = Aᵀ dy + B (x-μ) + c (Eq. 10-12, 22-24)."""
    group = tl.program_id(0)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    tile = i * BD + j
    size = tl.minimum(D, C - group * D)
    identity = tl.where((i == j) & (i < size), 1.0, 0.0)
    c = tl.arange(0, BD)
    member = c < size
    whitening = tl.load(whitening_ptr + group * D * D + i * D + j, mask=(i < D) & (j < D), other=0.0)
    covariance = tl.load(covariance_ptr + group * BD * BD + tile)
    covariance += (eps + JITTER * covariance) * identity
    trace = tl.sum(tl.sum(covariance * identity, 1), 0)
    if AFFINE:
        weight = tl.load(weight_ptr + group * D + c, mask=member, other=0.0).to(tl.float32)
    follow(PDL)

    cross = tl.load(cross_ptr + group * BD * BD + tile)
    transposed = tl.load(cross_ptr + group * BD * BD + j * BD + i)
    if AFFINE:
        tl.store(grad_weight_ptr + group * D + c, tl.sum(cross * whitening, 1), mask=member)
        cross = cross * weight[:, None]
        transposed = transposed * weight[None, :]
    through_trace = 0.5 * tl.sum(tl.sum(cross * whitening, 1), 0)
    if T == 0:
        gradient = -through_trace * identity
    else:
        normalized = covariance / trace
        d_residual = 0.5 * (cross + transposed) * tl.rsqrt(trace)
        d_iterate = -0.5 * d_residual
        residual = normalized
        kept = iterates_ptr + group * STRIDE
        for k in tl.range(1, T, num_stages=2 if PARTS == 3 else 3):
            # dR <- M dR M - sym(dR R M) multiplied out: the terms share S = dR R, and one transpose makes it symmetric.
            # Two products and two transposes, or four products, took as long (T=5, H200).
            if PARTS == 3:
                r1, r2, r3 = kept_matrix(kept, k - 1, tile, BD, PARTS)
            else:
                r1, r2, r3 = split(residual, PARTS)
            n1, n2, n3 = kept_matrix(kept, k, tile, BD, PARTS)
            z1, z2, z3 = kept_matrix(kept, T + k - 1, tile, BD, PARTS)
            d1, d2, d3 = split(d_residual, PARTS)
            shared = mirrored(d1, d2, d3, r1, r2, r3, PARTS)
            s1, s2, s3 = split(shared, PARTS)
            half = 2.25 * d_residual - 3.0 * shared + 0.5 * mirrored(s1, s2, s3, r1, r2, r3, PARTS)
            half += 0.25 * product(r1, r2, r3, s1, s2, s3, PARTS)
            d_residual = 0.5 * (half + tl.trans(half))
            d1, d2, d3 = split(d_residual, PARTS)
            e1, e2, e3 = split(d_iterate, PARTS)
            mixed = mirrored(e1, e2, e3, n1, n2, n3, PARTS) + mirrored(z1, z2, z3, d1, d2, d3, PARTS)
            d_iterate = 1.5 * d_iterate - 0.5 * mixed
            if PARTS != 3:
                residual = n1
        through_trace += tl.sum(tl.sum(d_iterate * normalized, 1), 0)
        gradient = d_iterate - through_trace * identity
    tl.store(second_ptr + group * BD * BD + tile, gradient * (2.0 / (trace * M)))
