"""Covariance -> whitening matrix: the verb `inverse_sqrt`, four ways, each with an exact backward of its own.

`newton`, `zca`, `pca` and `cholesky` take a batch of symmetric positive definite matrices ``[..., d, d]`` (the caller
has put eps on the diagonal) and return the whitening matrices W, with W Σ Wᵀ = I at convergence. They are twice
differentiable. `solve` and `solve_backward` are the same computations without autograd, for callers that write their
own backward. Derivations: docs/math.md, sections 3 and 4.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iternorm.whitening import modes

SOLVERS = ("newton", "zca", "pca", "cholesky")
# In so few steps no eigenvalue grows from the size of rounding to 1; after them the iteration is watched.
UNWATCHED_STEPS = 12


def most_steps(dtype: torch.dtype) -> int:
    """The most steps that Newton's iteration takes: 24 in fp32, 49 in fp64 (math.md, section 3, "Many steps").

    A small eigenvalue of R grows by 9/4 a step. These bring one that is rounding itself beside the trace to 1, and
    leave four more for it to converge.
    """
    return math.ceil(4 - math.log(torch.finfo(dtype).eps, 9 / 4))


def newton(covariance: Tensor, num_iters: int) -> Tensor:
    """Σ^{-1/2} approximated by `num_iters` Newton steps on the trace-normalized covariance (math.md, Eq. 8-9).

    The same polynomial as the paper's P-form for every `num_iters` from 0, computed in a coupled form that stays
    accurate past convergence. Many steps are ZCA: those beyond `most_steps` are not taken, and where rounding has left
    a negative eigenvalue, the iteration stops before it has grown (section 3, "Many steps").

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
    return _Zca.apply(covariance)[0]  # pyright: ignore[reportOptionalSubscript]


def pca(covariance: Tensor) -> Tensor:
    """Λ^{-1/2} Dᵀ: whitening along the principal axes, largest variance first (math.md, Eq. 16).

    Each eigenvector is signed so that its component of largest magnitude is positive. Axes with equal eigenvalues
    are arbitrary within their subspace; the gradient along such an ambiguity is taken as zero, but inside `torch.func`
    and forward-mode differentiation, which take the derivative of `torch.linalg.eigh` and need distinct eigenvalues.
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
        return _newton(covariance, num_iters)[0]
    if solver == "cholesky":
        return _cholesky(covariance)
    if solver == "pca":
        return _pca_from_eigh(*_eigh(covariance))
    # ZCA's own derivative, which is exact for equal eigenvalues, is a Python function, which a trace cannot save.
    return _zca_from_eigh(*_eigh(covariance)) if modes.is_traced() else zca(covariance)


def solve(covariance: Tensor, solver: str, num_iters: int, keep: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The whitening matrix, and what `solve_backward` needs beside the covariance and the whitening matrix.

    With `keep`, that includes 2 T - 2 matrices of Newton's iteration, which would otherwise be computed once more.
    """
    num_iters = min(num_iters, most_steps(covariance.dtype))
    if solver == "newton":
        whitening, residuals, iterates = _newton(covariance, num_iters)
        return whitening, (*residuals[1:], *iterates) if keep else ()
    if solver == "cholesky":
        return _cholesky(covariance), ()
    eigenvalues, vectors = _eigh(covariance)
    if solver == "zca":
        return _zca_from_eigh(eigenvalues, vectors), (eigenvalues, vectors)
    return _pca_from_eigh(eigenvalues, vectors), (eigenvalues, vectors)


def solve_backward(
    grad: Tensor, covariance: Tensor, whitening: Tensor, saved: tuple[Tensor, ...], solver: str, num_iters: int
) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix."""
    num_iters = min(num_iters, most_steps(covariance.dtype))
    if solver == "newton":
        return _newton_backward(grad, covariance, whitening, num_iters, saved)
    if solver == "cholesky":
        return _cholesky_backward(grad, whitening)
    if solver == "zca":
        return _zca_backward(grad, *saved)
    return _pca_backward(grad, *saved)


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
            saved = _eigh(covariance)
        return solve_backward(grad, covariance, whitening, tuple(saved), ctx.solver, ctx.num_iters), None, None


class _Zca(torch.autograd.Function):
    """ZCA, whose derivative is symmetric: forward and reverse mode are the same map (Eq. 14).

    The eigenpairs are outputs so that the derivatives need not compute them again; they have no gradient of their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(covariance):
        eigenvalues, vectors = _eigh(covariance)
        return _zca_from_eigh(eigenvalues, vectors), eigenvalues, vectors

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, eigenvalues, vectors = output
        ctx.mark_non_differentiable(eigenvalues, vectors)
        ctx.save_for_backward(*inputs, eigenvalues, vectors)
        ctx.save_for_forward(*inputs, eigenvalues, vectors)

    @staticmethod
    def backward(ctx, grad, *_unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _ZcaDerivative.apply(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, tangent):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _ZcaDerivative.apply(tangent, *ctx.saved_tensors), None, None


class _ZcaDerivative(torch.autograd.Function):
    """The derivative of ZCA at a covariance, applied to a direction: linear in it, and symmetric."""

    generate_vmap_rule = True

    @staticmethod
    def forward(direction, covariance, eigenvalues, vectors):
        return _zca_backward(direction, eigenvalues, vectors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        direction, *point = ctx.saved_tensors
        return _ZcaDerivative.apply(grad, *point), _ZcaSecond.apply(direction, grad, *point[1:]), None, None

    @staticmethod
    def jvp(ctx, tangent, covariance_tangent, *_unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        direction, *point = ctx.saved_tensors
        parts = []
        if tangent is not None:
            parts.append(_ZcaDerivative.apply(tangent, *point))
        if covariance_tangent is not None:
            parts.append(_ZcaSecond.apply(direction, covariance_tangent, *point[1:]))
        return sum(parts[1:], parts[0])


class _ZcaSecond(torch.autograd.Function):
    """The second derivative of ZCA in two directions, by second divided differences (Eq. 15). It has no third."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first, second, eigenvalues, vectors):
        roots = eigenvalues.sqrt()
        i, j, k = roots[..., :, None, None], roots[..., None, :, None], roots[..., None, None, :]
        differences = (i + j + k) / (i * j * k * (i + j) * (j + k) * (i + k))
        left = vectors.mT @ _symmetric(first) @ vectors
        right = vectors.mT @ _symmetric(second) @ vectors
        inner = (differences * left[..., :, None, :] * right.mT[..., None, :, :]).sum(-1)
        return vectors @ (inner + inner.mT) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError("the third derivative of ZCA is not implemented; use solvers.newton with large T")


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _newton(covariance: Tensor, num_iters: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The whitening matrix, R_0..R_{T-1} and Z_1..Z_{T-1}.

    The residual form (Eq. 8-9) with M = (3 I - R)/2 multiplied out: a step is three products with their sums, and
    rounding meets R and not M, which is larger in the first steps (errors a third of those of M's form). Where
    the iteration stops early R is zero from then on.
    """
    trace = _trace(covariance)
    identity = _identity_like(covariance)
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


def _newton_backward(
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
        _, residuals, iterates = _newton(covariance, num_iters)
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
    d_normalized = _symmetric(d_iterate).view_as(covariance)
    through_trace = through_trace + (d_normalized * (covariance / trace)).sum((-2, -1), keepdim=True)
    return (d_normalized - through_trace * identity) / trace


def _eigh(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors, the eigenvalues kept above what rounding makes of zero.

    A matrix with a NaN or an infinity has NaN eigenvalues, where `torch.linalg.eigh` raises.
    """
    finite = torch.isfinite(covariance).all(-1).all(-1)
    eigenvalues, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], covariance, 1))
    eigenvalues = torch.where(finite[..., None], eigenvalues, torch.nan)
    info = torch.finfo(covariance.dtype)
    # eigh's own error is about eps times the largest eigenvalue: below that an eigenvalue is noise, and may be
    # negative. The second floor keeps the cube of its root, which the backward divides by, above underflow.
    floor = (eigenvalues[..., -1:] * info.eps).clamp(min=info.tiny**0.5)
    return torch.maximum(eigenvalues, floor), vectors


def _divided_difference(roots: Tensor) -> Tensor:
    """(λi^{-1/2} - λj^{-1/2}) / (λi - λj) = -1 / (√λi √λj (√λi + √λj)): no difference of eigenvalues (Eq. 14)."""
    left, right = roots[..., :, None], roots[..., None, :]
    return -1 / (left * right * (left + right))


def _zca_from_eigh(eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * eigenvalues.rsqrt()[..., None, :]) @ vectors.mT


def _zca_backward(grad: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    inner = vectors.mT @ _symmetric(grad) @ vectors
    return vectors @ (_divided_difference(eigenvalues.sqrt()) * inner) @ vectors.mT


def _pca_from_eigh(eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    whitening = (eigenvalues.rsqrt()[..., None, :] * vectors * _signs(vectors)).mT
    return whitening.flip(-2)


def _signs(vectors: Tensor) -> Tensor:
    """The sign of each eigenvector's component of largest magnitude, ``[..., 1, d]``."""
    return vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True)).sign().detach()


def _pca_backward(grad: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    """Eq. 17-18: only the antisymmetric part of the gradient needs the gap between two eigenvalues."""
    signed = vectors * _signs(vectors)
    inner = grad.flip(-2) @ signed
    roots = eigenvalues.sqrt()
    left, right = roots[..., :, None], roots[..., None, :]
    gap = eigenvalues[..., :, None] - eigenvalues[..., None, :]
    # Axes whose eigenvalues agree to rounding are arbitrary in their plane, and so is a gradient that turns them.
    resolved = gap.abs() > torch.finfo(gap.dtype).eps * eigenvalues.shape[-1] * eigenvalues[..., -1:, None]
    turning = torch.where(resolved, (1 / left + 1 / right) / torch.where(resolved, gap, 1), 0)
    antisymmetric = (inner - inner.mT) / 2
    result = (_divided_difference(roots) * _symmetric(inner) + turning * antisymmetric) / 2
    # A pair of axes shares its term between two entries, a single axis does not.
    result = result + torch.diag_embed(result.diagonal(dim1=-2, dim2=-1))
    return signed @ result @ signed.mT


def _cholesky(covariance: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(covariance)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    whitening = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return torch.where((info == 0)[..., None, None], whitening, torch.nan)


def _cholesky_backward(grad: Tensor, whitening: Tensor) -> Tensor:
    """Eq. 20, in terms of W alone."""
    lower = -(grad.tril() @ whitening.mT).tril()
    lower = lower - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1) / 2)
    return whitening.mT @ _symmetric(lower) @ whitening
