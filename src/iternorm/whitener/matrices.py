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
    threshold = _threshold(moments, options) * regularized.diagonal()
    is_full = pivots > threshold
    if not bool((is_full if regularizes else is_full & ~is_constant).all()):
        reason = f"only {count} samples were seen" if count <= size else "some features depend on others"
        if bool(is_constant.any()):
            reason = f"feature {int(is_constant.nonzero()[0])} is constant"
        raise ValueError(
            f'solver="cholesky" needs a covariance of full rank, {size}, and {reason}; give eps or shrinkage, or use '
            '"zca" or "pca", which drop empty directions'
        )
    return Matrices(whitening, torch.linalg.solve_triangular(whitening, identity, upper=False), size)


def _threshold(moments: Moments, options: Options) -> float:
    """The share of the largest variance below which a direction is empty; 0 where something regularizes it."""
    if options.eps or options.shrinkage:
        return 0.0
    return _ROUNDINGS * moments.resolution if options.tol is None else options.tol


def _by_axes(covariance: Tensor, moments: Moments, options: Options) -> Matrices:
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    eigenvalues, vectors = eigenvalues.flip(-1).clamp(min=0), vectors.flip(-1)
    regularized = (1 - options.shrinkage) * eigenvalues + (options.shrinkage + options.eps)
    regularizes = bool(options.eps or options.shrinkage)
    full = len(eigenvalues) if regularizes else int((eigenvalues > _threshold(moments, options) * eigenvalues[0]).sum())
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
