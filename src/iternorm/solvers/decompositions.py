"""Whitening matrices by decompositions, and their derivatives: ZCA, PCA and Cholesky (docs/math.md, section 4)."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def eigh(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors, with the eigenvalues kept above the size of rounding.

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


def _times_divided_difference(values: Tensor, roots: Tensor) -> Tensor:
    """Values times (λi^{-1/2} - λj^{-1/2}) / (λi - λj) = -1 / (√λi √λj (√λi + √λj)): no difference of λ (Eq. 14).

    In two divisions: the product of all three may be infinite.
    """
    left, right = roots[..., :, None], roots[..., None, :]
    return -values / (left * right) / (left + right)


def zca_from_eigh(eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    """Eq. 13."""
    return (vectors * eigenvalues.rsqrt()[..., None, :]) @ vectors.mT


def zca_backward(grad: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    """Eq. 14."""
    inner = vectors.mT @ _symmetric(grad) @ vectors
    return vectors @ _times_divided_difference(inner, eigenvalues.sqrt()) @ vectors.mT


def pca_from_eigh(eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    """Eq. 16: the largest eigenvalue first, each axis with its sign."""
    whitening = (eigenvalues.rsqrt()[..., None, :] * vectors * signs(vectors)).mT
    return whitening.flip(-2)


def signs(vectors: Tensor) -> Tensor:
    """The sign of each eigenvector's component of largest magnitude, ``[..., 1, d]``."""
    return vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True)).sign().detach()


def pca_backward(grad: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
    """Eq. 17-18: only the antisymmetric part of the gradient needs the gap between two eigenvalues."""
    signed = vectors * signs(vectors)
    inner = grad.flip(-2) @ signed
    roots = eigenvalues.sqrt()
    left, right = roots[..., :, None], roots[..., None, :]
    gap = eigenvalues[..., :, None] - eigenvalues[..., None, :]
    # Axes whose eigenvalues agree to rounding are arbitrary in their plane, and so is a gradient that rotates them.
    resolved = gap.abs() > torch.finfo(gap.dtype).eps * eigenvalues.shape[-1] * eigenvalues[..., -1:, None]
    turning = (inner - inner.mT) / 2 * (1 / left + 1 / right)
    rotation = torch.where(resolved, turning / torch.where(resolved, gap, 1), 0)
    result = (_times_divided_difference(_symmetric(inner), roots) + rotation) / 2
    # A pair of axes shares its term between two entries; a single axis has one entry.
    result = result + torch.diag_embed(result.diagonal(dim1=-2, dim2=-1))
    return signed @ result @ signed.mT


def cholesky(covariance: Tensor) -> Tensor:
    """Eq. 19; NaN for a matrix that is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    whitening = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return torch.where((info == 0)[..., None, None], whitening, torch.nan)


def cholesky_backward(grad: Tensor, whitening: Tensor) -> Tensor:
    """Eq. 20, in terms of W alone."""
    lower = -(grad.tril() @ whitening.mT).tril()
    lower = lower - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1) / 2)
    return whitening.mT @ _symmetric(lower) @ whitening


class Zca(torch.autograd.Function):
    """ZCA, whose derivative is symmetric: forward and reverse mode are the same map (Eq. 14).

    The eigenpairs are outputs so that the derivatives need not compute them again; they have no gradient of their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(covariance):
        eigenvalues, vectors = eigh(covariance)
        return zca_from_eigh(eigenvalues, vectors), eigenvalues, vectors

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
        return zca_backward(direction, eigenvalues, vectors)

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
