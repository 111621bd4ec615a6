"""Newton's iteration for groups of up to 64 channels: all steps of a group on chip. Forward and backward.

Small groups may share a tile: they are the blocks on the diagonal of its matrices. Products of such matrices are such
matrices, and only traces are taken of each group by itself.

The residual form of docs/math.md, Eq. 8-9, with M = (3 I - R)/2 multiplied out: Z <- 3/2 Z - 1/2 Z R and
R <- 9/4 R - 3/2 R² + 1/4 R³. R is small in the first steps, so rounding of its products matters less than of M's. The
forward keeps the R and Z of its steps, which spares the backward the forward's products. Matrices are ``[BD, BD]``,
zero beyond the group.

Products are of matrices in parts (`PARTS`, see `precision.NewtonSplit`): one float16, which has the bits of a TF32
and takes half its time; two, or three of bfloat16, for fp32's accuracy; 0 is a product in fp32, for the interpreter. A
float16 product of a matrix takes it from the registers that the product before left it in. What is kept is the parts:
the backward's products take them from shared memory as they come.

Many steps are `WATCHED`: where the trace of R falls the iteration stops, and R is zero from then on (docs/math.md,
section 3, "Many steps").
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportUnboundVariable=false, reportAttributeAccessIssue=false
from typing import NamedTuple

import triton
import triton.language as tl

from iternorm.backends.triton.device.products import above, dot_of_parts, in_parts
from iternorm.backends.triton.device.tiles import of_own_group, over_group


class Newton(NamedTuple):
    """The iteration of a group: the constants that a kernel is compiled for."""

    T: int  # steps
    PARTS: int  # how products are split, see `precision.NewtonSplit`
    WATCHED: bool  # whether it stops where the trace of R falls
    STRIDE: int  # from a group's kept matrices to the next one's
    JITTER: float  # added to the variances, relative to each, see `precision.jitter`
    SHARED: int = 0  # channels of each group where several share the tile
    RAISED: float = 1.0  # what products take R, S and Z times, a power of two, see `precision.newton_raised`
    LARGEST: float = 1.0  # what the backward scales the rows of a gradient to, see `precision.newton_range`
    STAGES: int = 1  # of the backward's loop, which loads what the forward kept


@triton.jit
def total(tile):
    """The sum of a tile's elements."""
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def split(a, PARTS: tl.constexpr):
    """The parts of a matrix that products take, as `PARTS` says; those that are not there stand for the first."""
    if PARTS == 3:
        first, second, third = in_parts(a, 3)
    elif PARTS == 2:
        first = a.to(tl.float16)
        second = (a - first.to(tl.float32)).to(tl.float16)
        third = first
    elif PARTS == 1:
        first = a.to(tl.float16)
        second, third = first, first
    else:
        first, second, third = a, a, a
    return first, second, third


@triton.jit
def product(a1, a2, a3, b1, b2, b3, PARTS: tl.constexpr):
    """a b of matrices in parts, in fp32."""
    return dot_of_parts(a1, a2, a3, b1, b2, b3, tl.zeros([a1.shape[0], b1.shape[1]], dtype=tl.float32), PARTS)


@triton.jit
def added_product(a1, a2, a3, b1, b2, b3, acc, PARTS: tl.constexpr):
    """acc + a b. One part is added up in the accumulators; of more, the small products would be lost there."""
    if PARTS > 1:
        acc += product(a1, a2, a3, b1, b2, b3, PARTS)
    else:
        acc = dot_of_parts(a1, a2, a3, b1, b2, b3, acc, PARTS)
    return acc


@triton.jit
def stacked_product(a1, a2, a3, b1, b2, b3, c1, c2, c3, acc_a, acc_b, PARTS: tl.constexpr):
    """acc_a + a c and acc_b + b c, of one product: [a; b] c."""
    if PARTS == 0:
        first = added_product(a1, a2, a3, c1, c2, c3, acc_a, PARTS)
        second = added_product(b1, b2, b3, c1, c2, c3, acc_b, PARTS)
    else:
        acc = above(acc_a, acc_b)
        both = added_product(above(a1, b1), above(a2, b2), above(a3, b3), c1, c2, c3, acc, PARTS)
        first, second = tl.split(both.reshape(2, a1.shape[0], a1.shape[1]).permute(1, 2, 0))
    return first, second


@triton.jit
def transposed(a, PARTS: tl.constexpr):
    """aᵀ; in float16 where products take no more of a matrix."""
    if PARTS == 1:
        a = tl.trans(a.to(tl.float16)).to(tl.float32)
    else:
        a = tl.trans(a)
    return a


@triton.jit
def keep_matrix(ptr, slot, tile, a1, a2, a3, BD: tl.constexpr, PARTS: tl.constexpr):
    parts: tl.constexpr = PARTS if PARTS > 0 else 1
    place = ptr + slot * parts * BD * BD + tile
    tl.store(place, a1)
    if PARTS > 1:
        tl.store(place + BD * BD, a2)
    if PARTS > 2:
        tl.store(place + 2 * BD * BD, a3)


@triton.jit
def kept_matrix(ptr, slot, tile, BD: tl.constexpr, PARTS: tl.constexpr):
    parts: tl.constexpr = PARTS if PARTS > 0 else 1
    place = ptr + slot * parts * BD * BD + tile
    first = tl.load(place)
    second, third = first, first
    if PARTS > 1:
        second = tl.load(place + BD * BD)
    if PARTS > 2:
        third = tl.load(place + 2 * BD * BD)
    return first, second, third


@triton.jit
def power_of_two(a, largest: tl.constexpr, SHARED: tl.constexpr):
    """The power of two that brings the largest sum of a row's magnitudes to between half of `largest` and it.

    Of groups that share the tile ``[BD, 1]``, for each row that of its group: float16 would not hold the gradients of
    one that are a millionth of another's.
    """
    rows = tl.sum(tl.abs(a), 1)
    if SHARED > 0:
        level = tl.max(of_own_group(rows, SHARED), 1)[:, None]
    else:
        level = tl.max(rows, 0)
    return power_for(level, largest)


@triton.jit
def power_for(level, largest: tl.constexpr):
    """The power of two that brings a positive number to between half of `largest` and it, or below if it is tiny."""
    # With 2^14 for the largest, what a number below 2^-113 asks for would be infinite.
    bits = tl.maximum(level.to(tl.int32, bitcast=True) & 0x7F800000, 0x07000000)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True) * (0.5 * largest)


@triton.jit
def iterate(
    covariance,
    trace,
    identity,
    kept_ptr,
    keeps,
    BD: tl.constexpr,
    NEWTON: tl.constexpr,
):
    """Z_T of a covariance: its inverse square root times that of its trace, after T steps (Eq. 5-9).

    The trace is a number, or of groups that share the tile ``[BD, 1]``.
    The program that `keeps` writes R_0..R_{T-1} and Z_1..Z_{T-1} for the backward.
    """
    T: tl.constexpr = NEWTON.T
    PARTS: tl.constexpr = NEWTON.PARTS
    UP: tl.constexpr = NEWTON.RAISED
    tile = tl.arange(0, BD)[:, None] * BD + tl.arange(0, BD)[None, :]
    z = identity
    if T > 0:
        residual = covariance / trace
    if T == 1:
        z = 1.5 * z - 0.5 * residual
    if T > 1:
        # Z is scale times z: z <- z - 1/3 z R is a product and its accumulator. R and z are raised twice there.
        scale, factor = 1.5 / UP, 1.5
        residual *= UP * UP
        z *= UP * UP
        if NEWTON.WATCHED:
            level = total(residual * identity)
        z1, z2, z3 = split(z * (-1.0 / 3.0 / UP), PARTS)
        for k in range(1, T):
            r1, r2, r3 = split(residual * (1.0 / UP), PARTS)
            square, z = stacked_product(r1, r2, r3, z1, z2, z3, r1, r2, r3, -6.0 * residual, z, PARTS)
            s1, s2, s3 = split((0.25 / UP) * square, PARTS)
            if keeps:
                keep_matrix(kept_ptr, k - 1, tile, r1, r2, r3, BD, PARTS)
                k1, k2, k3 = split(scale * z, PARTS)
                keep_matrix(kept_ptr, T + k - 1, tile, k1, k2, k3, BD, PARTS)
            z1, z2, z3 = split(z * (-1.0 / 3.0 / UP), PARTS)
            residual = added_product(s1, s2, s3, r1, r2, r3, 2.25 * residual, PARTS)
            if NEWTON.WATCHED:
                before, level = level, total(residual * identity)
                stopped = level < tl.maximum(before - 0.5, 0.5)
                residual = tl.where(stopped, 0.0, residual)
                factor = tl.where(stopped, 1.0, 1.5)
            scale *= factor
        r1, r2, r3 = split(residual * (1.0 / UP), PARTS)
        if keeps:
            keep_matrix(kept_ptr, T - 1, tile, r1, r2, r3, BD, PARTS)
        z = (scale / UP) * added_product(z1, z2, z3, r1, r2, r3, z, PARTS)
    return z


@triton.jit
def differentiate(
    gradient,
    covariance,
    trace,
    through_trace,
    identity,
    kept_ptr,
    BD: tl.constexpr,
    NEWTON: tl.constexpr,
):
    """The symmetric gradient for the covariance, times its trace, of a symmetric one for W (Eq. 10-12).

    `through_trace` is what the factor tr(Σ)^-1/2 of W adds to that for the trace. The recursion is linear in the
    gradient, which is scaled to `LARGEST` at most, where float16 holds it.
    """
    T: tl.constexpr = NEWTON.T
    PARTS: tl.constexpr = NEWTON.PARTS
    DOWN: tl.constexpr = 1.0 / NEWTON.RAISED
    tile = tl.arange(0, BD)[:, None] * BD + tl.arange(0, BD)[None, :]
    if T == 0:
        d_iterate = tl.zeros([BD, BD], dtype=tl.float32)
    else:
        normalized = covariance / trace
        d_residual = gradient * tl.rsqrt(trace)
        if T > 1:
            scale = power_of_two(d_residual, NEWTON.LARGEST, NEWTON.SHARED)
            d_residual *= scale
        d_iterate = -0.5 * d_residual
        for k in tl.range(1, T, num_stages=NEWTON.STAGES):
            r1, r2, r3 = kept_matrix(kept_ptr, k - 1, tile, BD, PARTS)
            n1, n2, n3 = kept_matrix(kept_ptr, k, tile, BD, PARTS)
            z1, z2, z3 = kept_matrix(kept_ptr, T + k - 1, tile, BD, PARTS)
            d1, d2, d3 = split(d_residual, PARTS)
            shared = DOWN * product(d1, d2, d3, r1, r2, r3, PARTS)
            half = 1.5 * d_residual - shared - 0.5 * transposed(shared, PARTS)
            s1, s2, s3 = split(half, PARTS)
            half = 0.75 * half - (0.25 * DOWN) * product(s1, s2, s3, r1, r2, r3, PARTS)
            d_residual = half + transposed(half, PARTS)
            d1, d2, d3 = split(d_residual, PARTS)
            e1, e2, e3 = split(d_iterate, PARTS)
            mixed = product(e1, e2, e3, n1, n2, n3, PARTS)
            mixed = dot_of_parts(z1, z2, z3, d1, d2, d3, mixed, PARTS)
            following = 1.5 * d_iterate - (0.5 * DOWN) * mixed
            if NEWTON.WATCHED:
                following = tl.where(total(n1.to(tl.float32) * identity) < 0.5, d_iterate, following)
            d_iterate = following
        if T > 1:
            d_iterate *= 1.0 / scale
        through_trace += over_group(d_iterate * normalized, NEWTON.SHARED)
    return d_iterate - through_trace * identity
