"""Covariance -> whitening matrix: the verb `inverse_sqrt`, four ways, each with an exact backward of its own.

`newton`, `zca`, `pca` and `cholesky` take a batch of symmetric positive definite matrices ``[..., d, d]`` (the caller
has put eps on the diagonal) and return the whitening matrices W, with W Σ Wᵀ = I at convergence. They are twice
differentiable. `solve` and `solve_backward` are the same computations without autograd, for callers that write their
own backward. `iteration` and `decompositions` hold the arithmetic. Derivations: docs/math.md, sections 3 and 4.
"""

import torch
from torch import Tensor

from iternorm.solvers import decompositions, iteration
from iternorm.solvers.iteration import UNWATCHED_STEPS, most_steps, steps_of
from iternorm.whitening import modes

__all__ = ["SOLVERS", "UNWATCHED_STEPS", "cholesky", "composed", "most_steps", "newton", "pca", "solve"]
__all__ += ["solve_backward", "steps_of", "zca"]

SOLVERS = ("newton", "zca", "pca", "cholesky")


def newton(covariance: Tensor, num_iters: int) -> Tensor:
    """Σ^{-1/2} approximated by `num_iters` Newton steps on the trace-normalized covariance (math.md, Eq. 8-9).

    The same polynomial as the paper's P-form for every `num_iters` from 0, computed in a residual form that stays
    accurate past convergence. Many steps give ZCA. No more than `most_steps` are taken, and where rounding has left a
    negative eigenvalue, the iteration stops before it grows (section 3, "Many steps").

    Example:
        >>> covariance = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
        >>> newton(covariance, num_iters=10)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])
    """
    if modes.is_transformed():
        return composed(covariance, "newton", num_iters)
    return _Solve.apply(covariance, "newton", num_iters)  # pyright: ignore[reportReturnType]


def zca(covariance: Tensor) -> Tensor:
    """D Λ^{-1/2} Dᵀ by eigendecomposition: the symmetric whitening matrix (math.md, Eq. 13)."""
    return decompositions.Zca.apply(covariance)[0]  # pyright: ignore[reportOptionalSubscript]


def pca(covariance: Tensor) -> Tensor:
    """Λ^{-1/2} Dᵀ: whitening along the principal axes, largest variance first (math.md, Eq. 16).

    Each eigenvector is signed so that its component of largest magnitude is positive. Axes with equal eigenvalues
    are arbitrary within their subspace, and the gradient that would rotate them there is taken as zero. `torch.func`
    and forward-mode differentiation use the derivative of `torch.linalg.eigh` instead: it needs distinct eigenvalues.
    """
    if modes.is_transformed():
        return composed(covariance, "pca")
    return _Solve.apply(covariance, "pca", 0)  # pyright: ignore[reportReturnType]


def cholesky(covariance: Tensor) -> Tensor:
    """L^{-1} for Σ = L Lᵀ: the lower-triangular whitening matrix (math.md, Eq. 19).

    A matrix that is not positive definite in the working precision gives NaN, without a synchronization.
    """
    if modes.is_transformed():
        return composed(covariance, "cholesky")
    return _Solve.apply(covariance, "cholesky", 0)  # pyright: ignore[reportReturnType]


def composed(covariance: Tensor, solver: str, num_iters: int = 0) -> Tensor:
    """The whitening matrix by operators that torch differentiates itself, in any mode: for function transforms."""
    if solver == "newton":
        return iteration.newton(covariance, steps_of(covariance, num_iters))[0]
    if solver == "cholesky":
        return decompositions.cholesky(covariance)
    if solver == "pca":
        return decompositions.pca_from_eigh(*decompositions.eigh(covariance))
    # ZCA's own derivative is exact for equal eigenvalues, but it is a Python function, which a trace cannot save.
    return decompositions.zca_from_eigh(*decompositions.eigh(covariance)) if modes.is_traced() else zca(covariance)


def solve(covariance: Tensor, solver: str, num_iters: int, keep: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The whitening matrix, and what `solve_backward` needs besides the covariance and the whitening matrix.

    With `keep`, that includes 2 T - 2 matrices of Newton's iteration, which would otherwise be computed once more.
    """
    num_iters = steps_of(covariance, num_iters)
    if solver == "newton":
        whitening, residuals, iterates = iteration.newton(covariance, num_iters)
        return whitening, (*residuals[1:], *iterates) if keep else ()
    if solver == "cholesky":
        return decompositions.cholesky(covariance), ()
    eigenvalues, vectors = decompositions.eigh(covariance)
    if solver == "zca":
        return decompositions.zca_from_eigh(eigenvalues, vectors), (eigenvalues, vectors)
    return decompositions.pca_from_eigh(eigenvalues, vectors), (eigenvalues, vectors)


def solve_backward(
    grad: Tensor, covariance: Tensor, whitening: Tensor, saved: tuple[Tensor, ...], solver: str, num_iters: int
) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix."""
    num_iters = steps_of(covariance, num_iters)
    if solver == "newton":
        return iteration.newton_backward(grad, covariance, whitening, num_iters, saved)
    if solver == "cholesky":
        return decompositions.cholesky_backward(grad, whitening)
    if solver == "zca":
        return decompositions.zca_backward(grad, *saved)
    return decompositions.pca_backward(grad, *saved)


class _Solve(torch.autograd.Function):
    """Newton, PCA and Cholesky with their analytic backward."""

    @staticmethod
    def forward(ctx, covariance, solver, num_iters):
        whitening, saved = solve(covariance, solver, num_iters)
        ctx.save_for_backward(covariance, whitening, *saved)
        ctx.solver, ctx.num_iters = solver, num_iters
        return whitening

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        covariance, whitening, *saved = ctx.saved_tensors
        # A graph of the backward is wanted, so PCA's eigenpairs must carry their dependence on the covariance. The
        # other two solvers use only the input and the output, which autograd already follows.
        if saved and modes.wants_graph(grad):
            saved = decompositions.eigh(covariance)
        return solve_backward(grad, covariance, whitening, tuple(saved), ctx.solver, ctx.num_iters), None, None
