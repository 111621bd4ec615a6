"""Iterative normalization and decorrelated batch normalization, in one to three dimensions."""

from typing import Any

import torch
from torch import Tensor

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.docstrings import complete
from iternorm.whitening import validation


@complete
class _IterNorm(WhiteningNorm):
    """Iterative normalization.

    Args:
        num_iters: the paper's T, the number of Newton steps (math.md, Eq. 5-9). 0 only scales all channels of a group
            alike; 5, the paper's choice, whitens the directions of large variance and leaves small ones, which are
            mostly noise, small. A large T tends to ZCA: at most 24 steps are taken in fp32, and 49 in fp64, which is
            convergence, and the output stays finite where channels depend on each other.
    """

    solver = "newton"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 64,
        num_iters: int = 5,
        running: str = "whitening",
        impl: str = "auto",
        activation: str | None = None,
        correction: int = 0,
        shrinkage: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        num_iters = validation.check_num_iters(num_iters)
        common: dict[str, Any] = {"group_size": group_size, "running": running, "impl": impl, "activation": activation}
        common |= {"bias": bias, "correction": correction, "shrinkage": shrinkage, "shuffle": shuffle}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **common)
        self.num_iters = num_iters
        self._check_attributes()

    def _solver_repr(self) -> str:
        return f"num_iters={self.num_iters}"


@complete
class _DecorrelatedBatchNorm(WhiteningNorm):
    """Decorrelated batch normalization: exact whitening.

    Args:
        solver: "zca" (the paper's DBN), "pca" or "cholesky" (math.md, section 4). Principal axes can change places from
            batch to batch, which spoils an average of their whitening matrices: give "pca" ``running="covariance"``.
    """

    solver = "zca"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 16,
        solver: str = "zca",
        running: str = "whitening",
        impl: str = "auto",
        activation: str | None = None,
        correction: int = 0,
        shrinkage: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        validation.check_solver(solver)
        common: dict[str, Any] = {"group_size": group_size, "running": running, "impl": impl, "activation": activation}
        common |= {"bias": bias, "correction": correction, "shrinkage": shrinkage, "shuffle": shuffle}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **common)
        self.solver = solver
        self._check_attributes()


class _Rank1d(WhiteningNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (2, 3), "[N, C] or [N, C, L]")


class _Rank2d(WhiteningNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (4,), "[N, C, H, W]")


class _Rank3d(WhiteningNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (5,), "[N, C, D, H, W]")


def _check_rank(input: Tensor, ranks: tuple[int, ...], form: str) -> None:
    if input.ndim not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(f"expected {expected}D input {form}, got {input.ndim}D input of shape {list(input.shape)}")


@complete
class IterNorm1d(_Rank1d, _IterNorm):
    """Iterative normalization of ``[N, C]`` or ``[N, C, L]``.

    Example:
        >>> IterNorm1d(10, group_size=5)(torch.randn(8, 10)).shape
        torch.Size([8, 10])
    """


@complete
class IterNorm2d(_Rank2d, _IterNorm):
    """Iterative normalization of ``[N, C, H, W]``.

    Example:
        >>> IterNorm2d(128)(torch.randn(8, 128, 4, 4)).shape
        torch.Size([8, 128, 4, 4])
    """


@complete
class IterNorm3d(_Rank3d, _IterNorm):
    """Iterative normalization of ``[N, C, D, H, W]``.

    Example:
        >>> IterNorm3d(16)(torch.randn(2, 16, 3, 4, 4)).shape
        torch.Size([2, 16, 3, 4, 4])
    """


@complete
class DecorrelatedBatchNorm1d(_Rank1d, _DecorrelatedBatchNorm):
    """Decorrelated batch normalization (DBN) of ``[N, C]`` or ``[N, C, L]``.

    Example:
        >>> DecorrelatedBatchNorm1d(32)(torch.randn(64, 32)).shape
        torch.Size([64, 32])
    """


@complete
class DecorrelatedBatchNorm2d(_Rank2d, _DecorrelatedBatchNorm):
    """Decorrelated batch normalization (DBN) of ``[N, C, H, W]``.

    Example:
        >>> DecorrelatedBatchNorm2d(32)(torch.randn(8, 32, 4, 4)).shape
        torch.Size([8, 32, 4, 4])
    """


@complete
class DecorrelatedBatchNorm3d(_Rank3d, _DecorrelatedBatchNorm):
    """Decorrelated batch normalization (DBN) of ``[N, C, D, H, W]``.

    Example:
        >>> DecorrelatedBatchNorm3d(32)(torch.randn(4, 32, 2, 4, 4)).shape
        torch.Size([4, 32, 2, 4, 4])
    """
