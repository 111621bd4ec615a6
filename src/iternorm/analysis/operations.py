"""Normalizations as statistics of a reference batch: covariance in, affine map out.

`Whitening` is BatchNorm (groups of one channel), DBN and IterNorm without scale and shift. It is what the conditioning
and the noise of a batch are measured on, many batches at a time.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from iternorm import solvers
from iternorm.layers.base import WhiteningNorm
from iternorm.whitening import groups

Solver = Literal["newton", "zca", "pca", "cholesky"]


class AffineMaps(NamedTuple):
    """The maps y = A x + c of a stack of k batches, for G groups of d consecutive channels."""

    # [k, G, d, d]
    linear: Tensor
    # [k, G, d]
    shift: Tensor


@dataclass(frozen=True)
class Whitening:
    """Centre with the mean of a batch, then multiply each group of channels by Σ^{-1/2} of that batch.

    Args:
        solver: How the whitening matrix is made: ``"newton"`` (the paper's iteration), ``"zca"``, ``"pca"`` or
            ``"cholesky"``.
        group_size: Channels whitened together; ``None`` is all of them, 1 is BatchNorm whatever the solver. The last
            group holds the remainder.
        num_iters: The paper's T, for ``"newton"``.
        eps: Added to the diagonal of the covariance.
    """

    solver: Solver = "newton"
    group_size: int | None = None
    num_iters: int = 5
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.solver not in ("newton", "zca", "pca", "cholesky"):
            raise ValueError(f"solver is {self.solver!r}, but 'newton', 'zca', 'pca' or 'cholesky' is needed")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}, but None or a positive number of channels is needed")
        if self.num_iters < 0:
            raise ValueError(f"num_iters is {self.num_iters}, but 0 or more is needed")
        if not self.eps >= 0:
            raise ValueError(f"eps is {self.eps}, but 0 or more is needed")
        # Numpy's numbers become Python's.
        size = None if self.group_size is None else operator.index(self.group_size)
        for name, value in (
            ("group_size", size),
            ("num_iters", operator.index(self.num_iters)),
            ("eps", float(self.eps)),
        ):
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """A short name: ``BN``, ``DBN-16`` or ``IterNorm T=5 d=64``; a solver other than ZCA is named."""
        if self.group_size == 1:
            return "BN"
        if self.solver == "newton":
            return f"IterNorm T={self.num_iters}" + (f" d={self.group_size}" if self.group_size else "")
        solver = "" if self.solver == "zca" else f" {self.solver}"
        return "DBN" + (f"-{self.group_size}" if self.group_size else "") + solver

    @classmethod
    def parse(cls, label: str, eps: float = 1e-5) -> "Whitening":
        """The operation of a `label`.

        Example:
            >>> Whitening.parse("IterNorm T=7 d=64").label, Whitening.parse("DBN-16 pca").solver
            ('IterNorm T=7 d=64', 'pca')
        """
        if label == "BN":
            return batch_norm(eps)
        if found := re.fullmatch(r"IterNorm(?: T=(\d+))?(?: d=([1-9]\d*))?", label):
            return iter_norm(int(found[1] or 5), int(found[2]) if found[2] else None, eps)
        if found := re.fullmatch(r"DBN(?:-([1-9]\d*))?(?: (zca|pca|cholesky))?", label):
            return decorrelated_batch_norm(cast(Solver, found[2] or "zca"), int(found[1]) if found[1] else None, eps)
        raise ValueError(f"no operation is called {label!r}: use BN, DBN, DBN-16, DBN-16 pca, IterNorm T=5 or the like")

    def whitening(self, covariance: Tensor) -> Tensor:
        """The whitening matrices of covariances ``[..., d, d]``, to whose diagonals eps is added here."""
        iterated = self.solver == "newton" or covariance.shape[-1] == 1
        # fp64: the rounding error of the largest eigenvalue may exceed eps in fp32, and an eigenvalue of zero (a batch
        # smaller than the group) has to stay below eps.
        regularized = covariance.clone() if iterated else covariance.to(torch.float64, copy=True)
        regularized.diagonal(dim1=-2, dim2=-1).add_(self.eps)
        if covariance.shape[-1] == 1:
            return regularized.rsqrt()
        if self.solver == "newton":
            return solvers.newton(regularized, self.num_iters)
        return getattr(solvers, self.solver)(regularized).to(covariance.dtype)

    def fit(self, batches: Tensor) -> list[AffineMaps]:
        """The affine maps of k reference batches ``[k, m, C]``: one entry for the full groups, one for the remainder.

        They are made in fp64 where `solver` decomposes the covariance, and returned in the dtype of `batches`.
        """
        if self.group_size == 1:
            variance, mean = torch.var_mean(batches, dim=1, correction=0)
            return self.maps(mean, [variance[..., None, None]])
        exact = batches if self.solver == "newton" else batches.double()
        mean = exact.mean(1)
        centered = exact - mean[:, None]
        covariances = []
        for part in groups.parts(batches.shape[-1], self.group_size):
            grouped = centered[..., part.channels].unflatten(-1, (part.count, part.size)).transpose(1, 2)
            covariances.append(grouped.mT @ grouped / batches.shape[1])
        maps = self.maps(mean, covariances)
        return [AffineMaps(block.linear.to(batches.dtype), block.shift.to(batches.dtype)) for block in maps]

    def maps(self, mean: Tensor, covariances: Sequence[Tensor]) -> list[AffineMaps]:
        """The affine maps of k batches, from their means ``[k, C]`` and covariances ``[k, G, d, d]`` by part."""
        maps = []
        for part, covariance in zip(groups.parts(mean.shape[-1], self.group_size), covariances, strict=True):
            whitening = self.whitening(covariance)
            center = mean[:, part.channels].unflatten(1, (part.count, part.size, 1))
            maps.append(AffineMaps(whitening, -(whitening @ center).squeeze(-1)))
        return maps

    def normalized_covariance(self, covariance: Tensor) -> Tensor:
        """The covariance ``[C, C]`` of the output if the data are normalized by their own statistics."""
        whitening = self.whitening_blocks(covariance)
        half = multiply_blocks(whitening, covariance)
        return multiply_blocks(whitening, half.mT)

    def whitening_blocks(self, covariance: Tensor) -> list[Tensor]:
        """The whitening matrices ``[G, d, d]`` of a covariance ``[C, C]``, by part: full groups, then the remainder."""
        blocks = []
        for part in groups.parts(covariance.shape[-1], self.group_size):
            square = covariance[part.channels, part.channels]
            grouped = square.unflatten(0, (part.count, part.size)).unflatten(2, (part.count, part.size))
            blocks.append(self.whitening(grouped.diagonal(dim1=0, dim2=2).permute(2, 0, 1)))
        return blocks


def multiply_blocks(blocks: list[Tensor], matrix: Tensor) -> Tensor:
    """The product of a block-diagonal matrix, given as the parts ``[G, d, d]`` of its diagonal, and a matrix."""
    sizes = [block.shape[0] * block.shape[1] for block in blocks]
    rows = matrix.split(sizes)
    return torch.cat([(b @ r.unflatten(0, b.shape[:2])).flatten(0, 1) for b, r in zip(blocks, rows, strict=True)])


def batch_norm(eps: float = 1e-5) -> Whitening:
    """BatchNorm: every channel is its own group."""
    return Whitening("newton", 1, 0, eps)


def iter_norm(num_iters: int = 5, group_size: int | None = None, eps: float = 1e-5) -> Whitening:
    """IterNorm with T = `num_iters`; all channels in one group unless told otherwise, as in the paper's SND figures."""
    return Whitening("newton", group_size, num_iters, eps)


def decorrelated_batch_norm(solver: Solver = "zca", group_size: int | None = None, eps: float = 1e-5) -> Whitening:
    """DBN; all channels in one group unless told otherwise, as in the paper's SND figures."""
    return Whitening(solver, group_size, 0, eps)


def operation_of(layer: nn.Module) -> Whitening | None:
    """The operation a normalization layer applies in training, without scale and shift.

    Returns:
        The operation of a BatchNorm, SyncBatchNorm, IterNorm or DBN layer, and None for any other module, and for one
        with a correction, shrinkage or shuffled groups, which an operation does not have.
    """
    if isinstance(layer, WhiteningNorm) and (layer.correction or layer.shrinkage or layer.shuffle):
        return None
    if isinstance(layer, WhiteningNorm):
        return Whitening(cast(Solver, layer.solver), layer.group_size, layer.num_iters, layer.eps)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return batch_norm(layer.eps)
    return None
