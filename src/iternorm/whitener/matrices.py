"""Moments -> the matrix that whitens and the one that takes it back."""

from typing import NamedTuple

import torch
from torch import Tensor

from iternorm import solvers
from iternorm.solvers import decompositions
from iternorm.whitener.moments import Moments
from iternorm.whitener.options import Options

# A direction without variance has one of this many roundings of the largest, from the sums of its covariance
# (measured: at most 5, for 16 to 768 features in fp32 and fp64).
_ROUNDINGS = 32
_MEAN_ROUNDINGS = 4


class Matrices(NamedTuple):
    """y = whitening (x - mean) and x = coloring y + mean.

    Attributes:
        whitening: ``[k, d]``.
        coloring: ``[d, k]``, its (pseudo-)inverse.
        rank: How many directions are whitened.
    """

    whitening: Tensor
    coloring: Tensor
    rank: int


def solve(moments: Moments, options: Options) -> Matrices:
    """The matrices of W Σ' Wᵀ = I, for Σ' = (1 - shrinkage) Σ + (shrinkage + eps) I.

    Raises:
        ValueError: the data do not determine what is asked for, and what would help.
    """
    count, size = moments.num_samples, len(moments.mean)
    if count <= max(options.correction, 1):
        raise ValueError(
            f"n_samples={count}: a covariance with correction={options.correction} needs at least "
            f"{max(options.correction, 1) + 1} samples; fit more of them"
        )
    asked = size if options.n_components is None else options.n_components
    if asked > size:
        raise ValueError(f"n_components={asked} is more than the {size} features of the data; ask for {size} at most")
    # The rounding of a mean is all the variance that a constant feature has. Half precision is computed in fp32.
    resolution = min(moments.resolution, torch.finfo(torch.float32).eps)
    is_constant = moments.covariance.diagonal() <= (_MEAN_ROUNDINGS * resolution * moments.mean).square()
    regularizes = bool(options.eps or options.shrinkage)
    if not regularizes and bool(is_constant.all()):
        raise ValueError("every feature is constant: there is no variance to whiten; give eps or shrinkage")
    covariance = moments.covariance * (count / (count - options.correction))
    if options.solver in ("zca", "pca"):
        return _by_axes(covariance, moments, options)
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    regularized = (1 - options.shrinkage) * covariance + (options.shrinkage + options.eps) * identity
    if options.solver == "newton":
        whitening = solvers.newton(regularized, options.num_iters)
        return Matrices(whitening, torch.linalg.pinv(whitening, hermitian=True), size)
    whitening = solvers.cholesky(regularized)
    # A pivot is what a feature has left once the features before it are known.
    pivots = whitening.diagonal().pow(-2)
    is_full = pivots > _of_roundings(covariance.diagonal(), moments, options)
    if not bool((is_full if regularizes else is_full & ~is_constant).all()):
        reason = f"only {count} samples were seen" if count <= size else "some features depend on others"
        if bool(is_constant.any()):
            reason = f"feature {int(is_constant.nonzero()[0])} is constant"
        raise ValueError(
            f'solver="cholesky" needs a covariance of full rank, {size}, and {reason}; give eps or shrinkage, or use '
            '"zca" or "pca", which drop empty directions'
        )
    return Matrices(whitening, torch.linalg.solve_triangular(whitening, identity, upper=False), size)


def _of_roundings(variances: Tensor, moments: Moments, options: Options) -> Tensor:
    """How much of each feature's variance roundings can make ``[d]``; nought where something regularizes it."""
    if options.eps or options.shrinkage:
        return torch.zeros_like(variances)
    if options.tol is not None:
        return options.tol * variances
    # Each sample is rounded to steps of its dtype, by which it is off by a twelfth of their square on average; twice
    # that, because a direction's variance is an estimate.
    fine = torch.finfo(torch.float32).eps
    squared = moments.resolution if moments.resolution > fine else moments.resolution**2
    _, exponent = torch.frexp(moments.mean.abs() + variances.sqrt())
    steps = squared * torch.ldexp(torch.ones_like(variances), exponent - 1).square()
    return _ROUNDINGS * moments.resolution * variances + steps / 6


def _is_full(eigenvalues: Tensor, vectors: Tensor, variances: Tensor, moments: Moments, options: Options) -> Tensor:
    """Which of the directions the data vary in, the largest eigenvalue first.

    Roundings are a share of each feature, so a direction is compared with those of the features that it is made of: a
    small feature beside large ones is no direction of roundings.
    """
    if options.tol is not None:
        # As the user understands it.
        return eigenvalues > options.tol * eigenvalues[0]
    # What the decomposition itself rounds is a share of the largest.
    least = _ROUNDINGS * torch.finfo(eigenvalues.dtype).eps * eigenvalues[0]
    return eigenvalues > (vectors.square().mT @ _of_roundings(variances, moments, options)).clamp(min=float(least))


def _by_axes(covariance: Tensor, moments: Moments, options: Options) -> Matrices:
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    eigenvalues, vectors = eigenvalues.flip(-1).clamp(min=0), vectors.flip(-1)
    if not (options.eps or options.shrinkage):
        is_full = _is_full(eigenvalues, vectors, covariance.diagonal(), moments, options)
        eigenvalues, vectors = eigenvalues[is_full], vectors[:, is_full]
    full = len(eigenvalues)
    if not full:
        raise ValueError(
            "the samples vary no more than their dtype rounds them: subtract the mean before you round them, or give "
            "eps or shrinkage"
        )
    regularized = (1 - options.shrinkage) * eigenvalues + (options.shrinkage + options.eps)
    rank = full if options.n_components is None else options.n_components
    if rank > full:
        raise ValueError(
            f"n_components={rank} is more than the {full} directions in which the {moments.num_samples} samples vary; "
            f"ask for {full} at most, fit more samples, or give eps or shrinkage"
        )
    axes, scales = vectors[:, :rank], regularized[:rank].sqrt()
    if options.solver == "zca":
        return Matrices((axes / scales) @ axes.mT, (axes * scales) @ axes.mT, rank)
    axes = axes * decompositions.signs(axes)
    return Matrices((axes / scales).mT, axes * scales, rank)
