"""Newton's iteration for Σ^{-1/2} and its derivative (docs/math.md, section 3)."""

import math

import torch
from torch import Tensor

# In so few steps no eigenvalue grows from the size of rounding to 1; after them the trace is checked at each step.
UNWATCHED_STEPS = 12


def most_steps(dtype: torch.dtype) -> int:
    """The most steps that Newton's iteration takes: 24 in fp32, 49 in fp64 (math.md, section 3, "Many steps").

    A small eigenvalue of R grows by 9/4 a step. So many steps bring an eigenvalue of the size of rounding to 1, and
    four more let it converge.
    """
    return math.ceil(4 - math.log(torch.finfo(dtype).eps, 9 / 4))


def steps_of(covariance: Tensor, num_iters: int) -> int:
    """How many of the steps are taken: none on a matrix of one row, which divided by its trace is the identity."""
    return 0 if covariance.shape[-1] == 1 else min(num_iters, most_steps(covariance.dtype))


def newton(covariance: Tensor, num_iters: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The whitening matrix, R_0..R_{T-1} and Z_1..Z_{T-1}.

    The residual form (Eq. 8-9) with M = (3 I - R)/2 multiplied out. A step is three products with their sums. Rounding
    then acts on R and not on M, which is larger in the first steps: errors are a third of those of products of M.
    Where the iteration stops early, R is zero from then on.
    """
    trace = _trace(covariance)
    identity = _identity_like(covariance)
    if num_iters < 2:
        # A trace that has overflowed makes the whole matrix NaN, as it does by the products of more steps, not zeros.
        trace = trace.masked_fill(trace.isinf(), torch.nan)
    if num_iters == 0:
        return identity * trace.rsqrt(), [], []
    residual = (covariance / trace).reshape(-1, *covariance.shape[-2:])
    iterate = torch.add(1.5 * identity, residual, alpha=-0.5)
    residuals, iterates = [residual], []
    for k in range(1, num_iters):
        inner = torch.baddbmm(residual, residual, residual, beta=-1.5, alpha=0.25)
        following = torch.baddbmm(residual, residual, inner, beta=2.25)
        step = torch.baddbmm(iterate, iterate, following, beta=1.5, alpha=-0.5)
        if k >= UNWATCHED_STEPS:
            # A step raises the trace, which is 1 at first: it falls where a negative eigenvalue grows.
            stopped = _trace(following) < (_trace(residual) - 0.5).clamp(min=0.5)
            following, step = following.masked_fill(stopped, 0), torch.where(stopped, iterate, step)
        iterates.append(iterate)
        residual, iterate = following, step
        residuals.append(residual)
    return iterate.reshape(covariance.shape) * trace.rsqrt(), residuals, iterates


def newton_backward(
    grad: Tensor, covariance: Tensor, whitening: Tensor, num_iters: int, saved: tuple[Tensor, ...]
) -> Tensor:
    """Eq. 10-12: the forward derivative of the iteration in the direction of the gradient, which is self-adjoint."""
    trace = _trace(covariance)
    identity = _identity_like(covariance)
    # <grad, W> / (2 tr) is the part of W = P / sqrt(tr) that goes through the trace.
    through_trace = (grad * whitening).sum((-2, -1), keepdim=True) / 2
    if num_iters == 0:
        return -through_trace / trace * identity
    if saved:
        residuals = [(covariance / trace).reshape(-1, *covariance.shape[-2:]), *saved[: num_iters - 1]]
        iterates = saved[num_iters - 1 :]
    else:
        _, residuals, iterates = newton(covariance, num_iters)
    d_residual = ((grad + grad.mT) * (trace.rsqrt() / 2)).reshape(-1, *covariance.shape[-2:])
    d_iterate = d_residual * -0.5
    for k, (residual, following, iterate) in enumerate(zip(residuals[:-1], residuals[1:], iterates, strict=True), 1):
        shared = torch.bmm(d_residual, residual)
        half = torch.add(1.5 * d_residual, shared, alpha=-1.0).sub_(shared.mT, alpha=0.5)
        half = torch.baddbmm(half, half, residual, beta=0.75, alpha=-0.25)
        d_residual = half + half.mT
        # Not `step`: a compiled backward of torch 2.6 would take it for the forward's variable of that name.
        d_step = torch.baddbmm(d_iterate, d_iterate, following, beta=1.5, alpha=-0.5)
        d_step = d_step.baddbmm_(iterate, d_residual, alpha=-0.5)
        # Where it has stopped, R is zero and Z stays.
        d_iterate = torch.where(_trace(following) < 0.5, d_iterate, d_step) if k >= UNWATCHED_STEPS else d_step
    d_normalized = ((d_iterate + d_iterate.mT) / 2).view_as(covariance)
    through_trace = through_trace + (d_normalized * (covariance / trace)).sum((-2, -1), keepdim=True)
    return (d_normalized - through_trace * identity) / trace


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
