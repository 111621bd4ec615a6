"""The paper in plain differentiable PyTorch: the oracle of the tests.

Every function takes the activation `x` as ``[N, C, ...]`` and works in the dtype it is given. The letters are the
paper's: X is ``[d, m]`` (channels of one group by samples), Σ its covariance, P the Newton iterate. Nothing here is
tuned, and no fast path imports it. Gradients come from autograd, to any order.
"""

import operator

import torch
from torch import Tensor

from iternorm.solvers import most_steps


def newton(covariance: Tensor, num_iters: int) -> Tensor:
    """Algorithm 1, lines 7-12: Σ^{-1/2} by T Newton steps on the trace-normalized covariance (math.md, Eq. 5-7).

    Up to the paper's largest T, 9, this is its own form of the iteration. Past convergence that form multiplies its
    rounding, so a larger T is computed by Eq. 8: see `_many_steps`.
    """
    trace = _trace(covariance)
    normalized = covariance / trace
    P = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    if num_iters > 9:
        P = _many_steps(normalized, min(num_iters, most_steps(covariance.dtype)))
    else:
        for _ in range(num_iters):
            P = (3 * P - P @ P @ P @ normalized) / 2
    return P / trace.sqrt()


def _many_steps(normalized: Tensor, num_iters: int) -> Tensor:
    """P_T by Eq. 8, up to a step that would lower the trace of R (math.md, section 3, "Many steps")."""
    identity = torch.eye(normalized.shape[-1], dtype=normalized.dtype, device=normalized.device)
    P, R = identity, normalized
    for _ in range(num_iters):
        M = (3 * identity - R) / 2
        P, following = P @ M, M @ R @ M
        # With R = I the steps that follow change nothing.
        R = torch.where(_trace(following) < _trace(R) - 0.5, identity, following)
    return P


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def zca(covariance: Tensor) -> Tensor:
    """D Λ^{-1/2} Dᵀ (the paper's Eq. 2)."""
    eigenvalues, D = torch.linalg.eigh(covariance)
    return D @ (eigenvalues.rsqrt()[..., None] * D.mT)


def pca(covariance: Tensor) -> Tensor:
    """Λ^{-1/2} Dᵀ, eigenvalues descending, each eigenvector signed so that its largest component is positive."""
    eigenvalues, D = torch.linalg.eigh(covariance)
    eigenvalues, D = eigenvalues.flip(-1), D.flip(-1)
    largest = D.abs().argmax(-2, keepdim=True)
    return eigenvalues.rsqrt()[..., None] * (D * D.gather(-2, largest).sign()).mT


def cholesky(covariance: Tensor) -> Tensor:
    """L^{-1} for Σ = L Lᵀ."""
    return torch.linalg.inv(torch.linalg.cholesky(covariance))


def whiten(x: Tensor, solver, group_size: int | None = None, eps: float = 1e-5) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Whiten each group of channels with `solver`: covariance -> whitening matrix (Algorithm 1).

    Returns:
        The whitened activation, the mean ``[C]`` and the whitening matrices, one ``[d, d]`` a group.
    """
    outputs, means, matrices = [], [], []
    for group in x.split(operator.index(group_size) if group_size else x.shape[1], dim=1):
        X = group.transpose(0, 1).reshape(group.shape[1], -1)  # [d, m]
        mean = X.mean(1, keepdim=True)  # [d, 1]
        centered = X - mean
        identity = torch.eye(X.shape[0], dtype=X.dtype, device=X.device)
        covariance = centered @ centered.T / X.shape[1] + eps * identity
        whitening = solver(covariance)
        whitened = whitening @ centered
        outputs.append(whitened.reshape(group.transpose(0, 1).shape).transpose(0, 1))
        means.append(mean[:, 0])
        matrices.append(whitening)
    return torch.cat(outputs, 1), torch.cat(means), matrices


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ x + β, channel by channel."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    if weight is not None:
        x = x * weight.view(shape)
    if bias is not None:
        x = x + bias.view(shape)
    return x


def iter_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    group_size: int | None = 64,
    num_iters: int = 5,
    eps: float = 1e-5,
) -> Tensor:
    """Iterative normalization of a mini-batch (Algorithm 1), then scale and shift."""
    whitened, _, _ = whiten(x, lambda covariance: newton(covariance, num_iters), group_size, eps)
    return scale_and_shift(whitened, weight, bias)


def decorrelated_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    group_size: int | None = 16,
    solver: str = "zca",
    eps: float = 1e-5,
) -> Tensor:
    """Decorrelated batch normalization of a mini-batch (the paper's Eq. 2), then scale and shift."""
    whitened, _, _ = whiten(x, {"zca": zca, "pca": pca, "cholesky": cholesky}[solver], group_size, eps)
    return scale_and_shift(whitened, weight, bias)


def batch_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Batch normalization of a mini-batch (the paper's Eq. 1), then scale and shift."""
    dims = [0, *range(2, x.ndim)]
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).square().mean(dims, keepdim=True)
    return scale_and_shift((x - mean) / (variance + eps).sqrt(), weight, bias)
