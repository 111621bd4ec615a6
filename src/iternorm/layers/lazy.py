"""Layers that take their number of channels from the first batch, after `torch.nn.LazyBatchNorm1d/2d/3d`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
    _DecorrelatedBatchNorm,
    _IterNorm,
    _Rank1d,
    _Rank2d,
    _Rank3d,
)
from iternorm.whitening import validation


class _Lazy(LazyModuleMixin, WhiteningNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The arguments are those of the layer it becomes, without `num_features`.

    The number of channels is that of the first batch, or of a checkpoint: of this layer, of BatchNorm or of the
    authors' layer.
    """

    # The protocol that torch's mixin asks for is narrower than torch's own modules.
    weight: Any
    bias: Any
    has_uninitialized_params: Any

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Any,
    ) -> None:
        # One channel, so that the other arguments are checked; nothing is made for it.
        args = 1, eps, momentum, False, False, device, dtype
        super().__init__(*args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        self.num_features = 0
        self.affine = affine
        self.track_running_stats = track_running_stats
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if affine:
            self.weight = UninitializedParameter(**factory)
        if affine and bias:
            self.bias = UninitializedParameter(**factory)
        if track_running_stats:
            self.running_mean = UninitializedBuffer(**factory)
            setattr(self, f"running_{self.running}", UninitializedBuffer(**factory))
            self.num_batches_tracked = torch.tensor(0, dtype=torch.long, device=device)

    def initialize_parameters(self, input: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Called by the first batch."""
        if self.has_uninitialized_params() or self.num_features == 0:
            validation.check_input(input)
            self._check_input_dim(input)
            self._materialize(input.shape[1])

    def reset_parameters(self) -> None:
        if self.num_features != 0 and not self.has_uninitialized_params():
            super().reset_parameters()

    def _materialize(self, num_features: int) -> None:
        self.num_features = num_features
        self._check_attributes()
        tensors: dict[str, Any] = {**self._parameters, **self._buffers}
        for name, tensor in tensors.items():
            if is_lazy(tensor):
                tensor.materialize(self._matrix_shape if name == f"running_{self.running}" else (num_features,))
        self.reset_parameters()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        own = [state_dict.get(prefix + name) for name in ("weight", "running_mean")]
        known = [value for value in own if isinstance(value, Tensor) and not is_lazy(value)]
        if known and self.num_features == 0:
            self._materialize(known[0].numel())
        if known:
            super()._load_from_state_dict(state_dict, prefix, *rest)
        else:
            # Of a layer that has not seen a batch either: there is nothing to translate.
            nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


class LazyIterNorm1d(_Lazy, _Rank1d, _IterNorm):
    """An `IterNorm1d` whose `num_features` is that of its first batch.

    Example:
        >>> layer = LazyIterNorm1d(group_size=5)
        >>> layer(torch.randn(8, 10)).shape
        torch.Size([8, 10])
        >>> type(layer).__name__
        'IterNorm1d'
    """

    cls_to_become = IterNorm1d  # pyright: ignore[reportAssignmentType]


class LazyIterNorm2d(_Lazy, _Rank2d, _IterNorm):
    """An `IterNorm2d` whose `num_features` is that of its first batch."""

    cls_to_become = IterNorm2d  # pyright: ignore[reportAssignmentType]


class LazyIterNorm3d(_Lazy, _Rank3d, _IterNorm):
    """An `IterNorm3d` whose `num_features` is that of its first batch."""

    cls_to_become = IterNorm3d  # pyright: ignore[reportAssignmentType]


class LazyDecorrelatedBatchNorm1d(_Lazy, _Rank1d, _DecorrelatedBatchNorm):
    """A `DecorrelatedBatchNorm1d` whose `num_features` is that of its first batch."""

    cls_to_become = DecorrelatedBatchNorm1d  # pyright: ignore[reportAssignmentType]


class LazyDecorrelatedBatchNorm2d(_Lazy, _Rank2d, _DecorrelatedBatchNorm):
    """A `DecorrelatedBatchNorm2d` whose `num_features` is that of its first batch."""

    cls_to_become = DecorrelatedBatchNorm2d  # pyright: ignore[reportAssignmentType]


class LazyDecorrelatedBatchNorm3d(_Lazy, _Rank3d, _DecorrelatedBatchNorm):
    """A `DecorrelatedBatchNorm3d` whose `num_features` is that of its first batch."""

    cls_to_become = DecorrelatedBatchNorm3d  # pyright: ignore[reportAssignmentType]
