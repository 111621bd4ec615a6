"""The public roots: check the arguments, scale each matrix, choose a method, differentiate."""

from typing import Any

import torch
from torch import Tensor

from iternorm.backends.torch.verbs import compute_dtype
from iternorm.linalg import iteration
from iternorm.linalg.coefficients import minimax_coefficients, newton_coefficients
from iternorm.solvers import decompositions
from iternorm.whitening import dispatch, modes, operators, validation
from iternorm.whitening.operators import no_autocast

METHODS = ("auto", "newton", "minimax", "eigh")
# What "minimax" is where there are kernels for it.
_IN_KERNELS = "kernels"
# Eigenvalues below so many roundings of a matrix's norm cannot be told from zero, and count as so large.
_ROUNDINGS = 2
# A difference between entries that should be equal, relative to the largest entry, that is too large for rounding.
_ASYMMETRY = 1e-4


def inverse_root(
    A: Tensor,
    p: int = 2,
    *,
    eps: float | Tensor = 0.0,
    method: str = "auto",
    check: bool | None = None,
) -> Tensor:
    """(A + eps I)^(-1/p) of symmetric positive definite matrices ``[..., d, d]``, each at its own scale.

    A matrix without full rank is damped: give `eps`. Without it, eigenvalues below the rounding of the matrix count as
    about that large, so that the root is finite, and in those directions large and arbitrary. "eigh" treats eigenvalues
    below 1.1e-19 in fp32 (1.5e-154 in fp64) likewise, of whatever matrix: scale smaller ones up.

    In fp32 the iterations leave the roots of the smallest eigenvalues too small where condition numbers are large: by
    0.8 % at 7e5 and p = 2 (math.md, Eq. 31). That is less than the rounding of "eigh" for random matrices.

    Gradients are exact, and twice differentiable. Half precision is computed in fp32. On a GPU "minimax" runs in
    kernels for p from 2 to 8, with fp32's accuracy. The other iterations and the gradients follow
    `torch.set_float32_matmul_precision`; with TF32 they have about three digits.

    Args:
        A: the matrices. Where they are not checked, only their symmetric part counts.
        p: of the root, from 1 (the inverse).
        eps: added to the diagonal: a number, or a tensor with one for each matrix.
        method: "newton" and "minimax" are iterations of matrix products, 23 and 12 steps of them for p = 2 in fp32;
            "eigh" decomposes. "auto" is "eigh" on a CPU and "minimax" elsewhere.
        check: whether to raise for matrices that are not finite, symmetric or positive semidefinite. That means to look
            at values, so None does it on a CPU only. A graph that is compiled does not look.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 16.0, 81.0]))
        >>> inverse_root(A, 4).diagonal()
        tensor([1.0000, 0.5000, 0.3333])
    """
    p, method = _check_arguments(A, p, method)
    with no_autocast(A):
        matrices = A.to(compute_dtype(A.dtype))
        if method == "auto":
            # On a CPU a decomposition is faster at every size (16 to 512 on an AMD EPYC).
            method = "eigh" if A.device.type == "cpu" else "minimax"
        if method == "minimax" and not modes.is_transformed() and dispatch.has_root_kernels(matrices, p):
            method = _IN_KERNELS
        else:
            # The kernels do that as they load the matrices.
            matrices = _symmetric(matrices)
        damping = _damping(eps, matrices)
        if damping is not None:
            matrices = matrices + damping * torch.eye(A.shape[-1], dtype=matrices.dtype, device=A.device)
        is_seen = not (modes.is_recorded(A) or modes.is_transformed())
        if is_seen and (A.device.type == "cpu" if check is None else check):
            _check_values(A.detach(), matrices.detach())
        batch = matrices.reshape(-1, *A.shape[-2:])
        return _root(batch, p, method).reshape(A.shape).to(A.dtype)


def sqrt(A: Tensor, *, method: str = "auto", check: bool | None = None) -> Tensor:
    """A^(1/2) of symmetric positive semidefinite matrices ``[..., d, d]``: A times its `inverse_root`.

    Directions without variance stay zero, up to the root of rounding. `method` and `check` are those of `inverse_root`.

    Example:
        >>> sqrt(torch.tensor([[5.0, 4.0], [4.0, 5.0]]))
        tensor([[2.0000, 1.0000],
                [1.0000, 2.0000]])
    """
    root = inverse_root(A.to(compute_dtype(A.dtype)), method=method, check=check)
    with no_autocast(A):
        return _symmetric(_symmetric(A.to(root.dtype)) @ root).to(A.dtype)


def _check_values(A: Tensor, damped: Tensor) -> None:
    """Raise for matrices that have no real root."""
    if A.numel() == 0:
        return
    largest = damped.abs().amax((-2, -1))
    _refuse(~largest.isfinite(), A, "contains NaN or infinity")
    rounding = torch.finfo(A.dtype).eps
    _refuse((A - A.mT).abs().amax((-2, -1)) > max(_ASYMMETRY, 4 * rounding) * largest, A, "is not symmetric")
    # The largest negative eigenvalue that rounding makes of zero, several times over.
    shift = (8 * A.shape[-1] * rounding * largest).clamp(min=torch.finfo(damped.dtype).tiny)[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=damped.dtype, device=A.device)
    _refuse(torch.linalg.cholesky_ex(damped + shift * identity).info > 0, A, "has a negative eigenvalue")


def _refuse(is_bad: Tensor, A: Tensor, what: str) -> None:
    if bool(is_bad.any()):
        which = f"matrix {is_bad.nonzero()[0].tolist()} of shape" if is_bad.ndim else "shape"
        raise ValueError(
            f"A {what} ({which} {list(A.shape)}); a root needs symmetric positive semidefinite matrices, such as "
            "(A + A.mT) / 2, and eps where eigenvalues may be below zero"
        )


def _check_arguments(A: Tensor, p: Any, method: str) -> tuple[int, str]:
    if not isinstance(A, Tensor):
        raise TypeError(f"A must be a tensor, got {type(A).__name__}")
    if A.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"A has dtype {A.dtype}; convert it to a floating-point dtype, e.g. A.float()")
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] == 0:
        raise ValueError(f"A has shape {list(A.shape)}; expected square matrices [..., d, d]")
    p = validation.integer("p", p, "the p of A^(-1/p), 2 by default")
    if p < 1:
        raise ValueError(f"p={p} must be at least 1; 1 is the inverse, 2 the inverse square root")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; choose one of {', '.join(map(repr, METHODS))}")
    return p, method


def _damping(eps: Any, matrices: Tensor) -> Tensor | float | None:
    """`eps` as what the identity is multiplied by, or None for nothing."""
    if isinstance(eps, Tensor):
        if eps.ndim and eps.shape != matrices.shape[:-2]:
            raise ValueError(
                f"eps has shape {list(eps.shape)}; matrices of shape {list(matrices.shape)} need a number, or one for "
                f"each of them, {list(matrices.shape[:-2])}"
            )
        return eps.to(matrices)[..., None, None]
    value = validation.number("eps", eps, "one from 0 on, or a tensor of them")
    if not 0 <= value < float("inf"):
        raise ValueError(f"eps={value} must be from 0 on, and finite")
    return value or None


def _root(batch: Tensor, p: int, method: str) -> Tensor:
    if modes.is_transformed():
        # Operators that torch differentiates itself, in any mode and as often as it is asked to.
        return _iterated(batch, p, "newton")
    return _Root.apply(batch, p, method)  # pyright: ignore[reportReturnType]


class _Root(torch.autograd.Function):
    """The root of a batch ``[B, d, d]``, by any method."""

    @staticmethod
    def forward(ctx, batch, p, method):
        if method == "eigh":
            eigenvalues, vectors = decompositions.eigh(batch)
            root = (vectors * eigenvalues.pow(-1 / p)[..., None, :]) @ vectors.mT
            ctx.save_for_backward(batch, eigenvalues, vectors)
        elif method == _IN_KERNELS:
            root = operators.call(root_op, batch, p)
            ctx.save_for_backward(batch)
        else:
            root = _iterated(batch, p, method)
            ctx.save_for_backward(batch)
        ctx.p, ctx.method = p, method
        return root

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, *eigenpairs = ctx.saved_tensors
        grad = _symmetric(grad)
        wants_graph = modes.wants_graph(grad)
        if eigenpairs and not wants_graph:
            with no_autocast(batch):
                return _eigh_backward(grad, eigenpairs[0], eigenpairs[1], ctx.p), None, None
        normalized, scale = _normalized(_symmetric(batch) if ctx.method == _IN_KERNELS else batch)
        # Minimax steps bound the error of the root, not that of its derivatives: a second derivative keeps half of the
        # digits. The error of a Newton step vanishes at 1 together with its slope.
        steps, damping = _schedule(batch.dtype, ctx.p, "newton" if wants_graph else ctx.method)
        with no_autocast(batch):
            result = iteration.derivative(normalized, grad, steps, ctx.p, damping)
        return result * scale.pow(-1 / ctx.p - 1), None, None


@torch.library.custom_op("iternorm::inverse_root", mutates_args=())
def root_op(batch: Tensor, p: int) -> Tensor:
    """The minimax iteration in kernels, of the symmetric parts of ``[B, d, d]``."""
    from iternorm.backends.triton.tools import roots

    steps, damping = _schedule(batch.dtype, p, "minimax")
    return roots.inverse_root(batch, steps, p, damping)


@root_op.register_fake
def _(batch, p):
    return batch.new_empty(batch.shape)


def _eigh_backward(grad: Tensor, eigenvalues: Tensor, vectors: Tensor, p: int) -> Tensor:
    """Eq. 32: no difference of eigenvalues."""
    roots = eigenvalues.pow(1 / p)
    left, right = roots[..., :, None], roots[..., None, :]
    terms = sum(left.pow(p - 1 - k) * right.pow(k) for k in range(p))
    inner = vectors.mT @ grad @ vectors
    return vectors @ (inner / (-left * right * terms)) @ vectors.mT


def _iterated(batch: Tensor, p: int, method: str) -> Tensor:
    normalized, scale = _normalized(batch)
    steps, damping = _schedule(batch.dtype, p, method)
    return iteration.iterate(normalized, steps, p, damping) * scale.pow(-1 / p)


def _schedule(dtype: torch.dtype, p: int, method: str) -> tuple[iteration.Steps, float]:
    """The steps of an iteration that starts at the damping, and the damping."""
    rounding = torch.finfo(dtype).eps
    lowest = _ROUNDINGS * rounding
    coefficients = newton_coefficients if method == "newton" else minimax_coefficients
    return coefficients(p, lowest, 4 * rounding), lowest


# What torch.compiler.assume_constant_result sets, without the import of torch._dynamo: called, not traced.
_schedule._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _normalized(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with eigenvalues of at most 1, and what they were divided by, ``[B, 1, 1]``.

    The scale does not enter the derivative: the root does not depend on it.
    """
    values = batch.detach()
    smallest = torch.finfo(batch.dtype).tiny ** 0.5
    largest = values.abs().amax((-2, -1), keepdim=True).clamp(min=smallest)
    values = values / largest
    rows = values.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    squares = values.square().sum((-2, -1), keepdim=True).sqrt()
    # A matrix of zeros stays one.
    scale = (torch.minimum(rows, squares) * largest).clamp(min=smallest)
    return batch / scale, scale


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
