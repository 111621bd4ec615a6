"""Whitening without a batch: group whitening and instance whitening, in one to three dimensions.

Each is a view of the one operation, in which the samples of a batch are groups of channels (`iternorm.functional`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from iternorm.functional import group_whitening, instance_whitening
from iternorm.layers.docstrings import complete
from iternorm.layers.norms import _check_rank
from iternorm.whitening import groups, items, modes, validation
from iternorm.whitening.settings import Settings


class PerSampleWhitening(nn.Module):
    """Whiten each sample by its own statistics, then scale and shift: the base of the layers without a batch.

    Samples do not depend on each other, so training and eval are the same, no statistics are kept, and any batch size
    will do. Statistics are fp32 for half and bfloat16 input and fp64 for fp64; gradients are exact, and twice
    differentiable.

    Args:
        num_features: C of an input ``[N, C, ...]``.
        eps: added to the diagonal of the covariance.
        affine: learn a `weight` and a `bias` for each channel.
        device: of the parameters.
        dtype: of the parameters.
        bias: False learns no `bias`, only the `weight`, if `affine` is set.
        num_iters: the number of Newton steps.
        solver: "newton", or an exact one: "zca", "pca" or "cholesky".
        impl: "auto", "triton", "native", "torch" or "reference"; see `iternorm.functional`.
        activation: None, or "relu": the output goes through it.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    # `_cache_key` of the last batch that went to the kernels, and what was asked of them.
    _last_key: tuple | None = None
    _last_asked: tuple[Settings, int]
    _repeated: items.RepeatedItems

    def __init__(
        self,
        num_features: int,
        eps: float,
        affine: bool,
        device: Any,
        dtype: torch.dtype | None,
        bias: bool,
        num_iters: int,
        solver: str,
        impl: str,
        activation: str | None,
    ) -> None:
        super().__init__()
        self.num_features = validation.integer("num_features", num_features, "the number of channels")
        if self.num_features < 1:
            raise ValueError(f"num_features={num_features} must be at least 1; give the number of channels")
        self.eps = validation.check_eps(eps)
        self.affine = affine
        self.num_iters = validation.check_num_iters(num_iters)
        validation.check_any_solver(solver)
        self.solver = solver
        validation.check_impl(impl)
        self.impl = impl
        validation.check_activation(activation)
        self.activation = activation
        for name, learned in (("weight", affine), ("bias", affine and bias)):
            value = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype)) if learned else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            # A layer is one node of a traced graph, as torch's own layers are.
            tracer: Any = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
        # A compiler is not shown what changes from call to call: it would compile again.
        eager = not (modes.is_recorded(input) or modes.is_transformed())
        key = self._cache_key(input) if eager else None
        if eager and key == self._last_key:
            # Same shape, dtype and settings as the last batch: the checks below have already passed.
            return self._repeated.whiten_items(input, self.weight, self.bias, *self._last_asked)
        validation.check_input(input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of {self.num_features} channels (num_features), got {input.shape[1]}: "
                f"shape {list(input.shape)}"
            )
        options: dict[str, Any] = {"num_iters": self.num_iters, "solver": self.solver, "impl": self.impl}
        output = self._whiten(input, {**options, "eps": self.eps, "activation": self.activation})
        if eager:
            size, rows = self._rows()
            steps = self.num_iters if self.solver == "newton" else 0
            settings = Settings(size, self.solver, steps, self.eps, self.activation, self.impl)
            if items.in_kernels(input, settings, rows):
                self._last_key, self._last_asked = key, (settings, rows)
                self._repeated = items.RepeatedItems()
        return output

    def _cache_key(self, input: Tensor) -> tuple:
        """All that is checked, and that the choice of a backend depends on."""
        weight, bias = self.weight, self.bias
        return (
            input.shape,
            input.stride(),
            input.dtype,
            input.device,
            None if weight is None else weight.shape,
            None if bias is None else bias.shape,
            self.num_features,
            self.num_iters,
            self.solver,
            self.impl,
            self.eps,
            self.activation,
            self._rows(),
        )

    def _rows(self) -> tuple[int, int]:
        """How many rows of a sample are whitened together, and how many it has."""
        raise NotImplementedError

    def _whiten(self, input: Tensor, options: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _check_input_dim(self, input: Tensor) -> None:
        raise NotImplementedError

    def _groups_repr(self) -> str:
        raise NotImplementedError

    def extra_repr(self) -> str:
        solver = f"num_iters={self.num_iters}" if self.solver == "newton" else f"solver={self.solver!r}"
        return (
            f"{self.num_features}, eps={self.eps}, affine={self.affine}, {self._groups_repr()}, {solver}"
            + (", bias=False" if self.affine and self.bias is None else "")
            + (f", activation={self.activation!r}" if self.activation else "")
        )

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The authors of group whitening keep the scale as [1, C, 1, 1].
        own = {}
        for name in ("weight", "bias"):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.ndim > 1 and value.numel() == self.num_features:
                own[prefix + name] = value.reshape(-1)
        super()._load_from_state_dict({**state_dict, **own} if own else state_dict, prefix, *args)

    def __prepare_scriptable__(self) -> None:
        """What `torch.jit.script` calls first."""
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.jit.trace, or torch.compile and "
            "torch.export, which replace TorchScript"
        )


@complete
class _GroupWhitening(PerSampleWhitening):
    """Group whitening.

    Args:
        num_groups: the channels of a sample are divided into so many groups, in order, and the groups are decorrelated
            from each other over their channels and positions. It must divide `num_features`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        num_groups: int = 32,
        num_iters: int = 5,
        solver: str = "newton",
        impl: str = "auto",
        activation: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype, bias, num_iters, solver, impl, activation)
        self.num_groups = validation.check_num_groups(num_groups, self.num_features)

    def _whiten(self, input: Tensor, options: dict[str, Any]) -> Tensor:
        return group_whitening(input, self.num_groups, self.weight, self.bias, **options)

    def _rows(self) -> tuple[int, int]:
        return self.num_groups, self.num_groups

    def _groups_repr(self) -> str:
        return f"num_groups={self.num_groups}"


@complete
class _InstanceWhitening(PerSampleWhitening):
    """Instance whitening.

    Args:
        group_size: the number of channels whitened together; None is all of them. Channels are taken in order and the
            last group holds the remainder.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 64,
        num_iters: int = 5,
        solver: str = "newton",
        impl: str = "auto",
        activation: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype, bias, num_iters, solver, impl, activation)
        self.group_size = validation.check_group_size(group_size)

    def _whiten(self, input: Tensor, options: dict[str, Any]) -> Tensor:
        return instance_whitening(input, self.weight, self.bias, group_size=self.group_size, **options)

    def _rows(self) -> tuple[int, int]:
        return groups.effective_size(self.num_features, self.group_size), self.num_features

    def _groups_repr(self) -> str:
        return f"group_size={self.group_size}"


class _Rank1d(PerSampleWhitening):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (2, 3), "[N, C] or [N, C, L]")


class _Rank2d(PerSampleWhitening):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (4,), "[N, C, H, W]")


class _Rank3d(PerSampleWhitening):
    def _check_input_dim(self, input: Tensor) -> None:
        _check_rank(input, (5,), "[N, C, D, H, W]")


@complete
class GroupWhitening1d(_Rank1d, _GroupWhitening):
    """Group whitening (Huang et al., CVPR 2021) of ``[N, C]`` or ``[N, C, L]``.

    Example:
        >>> GroupWhitening1d(64, num_groups=8)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """


@complete
class GroupWhitening2d(_Rank2d, _GroupWhitening):
    """Group whitening (Huang et al., CVPR 2021) of ``[N, C, H, W]``.

    Example:
        >>> GroupWhitening2d(64)(torch.randn(1, 64, 4, 4)).shape
        torch.Size([1, 64, 4, 4])
    """


@complete
class GroupWhitening3d(_Rank3d, _GroupWhitening):
    """Group whitening (Huang et al., CVPR 2021) of ``[N, C, D, H, W]``.

    Example:
        >>> GroupWhitening3d(64)(torch.randn(1, 64, 2, 4, 4)).shape
        torch.Size([1, 64, 2, 4, 4])
    """


@complete
class InstanceWhitening1d(_Rank1d, _InstanceWhitening):
    """Instance whitening of ``[N, C, L]``: each sample over its positions.

    Example:
        >>> InstanceWhitening1d(8)(torch.randn(2, 8, 100)).shape
        torch.Size([2, 8, 100])
    """


@complete
class InstanceWhitening2d(_Rank2d, _InstanceWhitening):
    """Instance whitening of ``[N, C, H, W]``: each sample over its positions.

    Example:
        >>> InstanceWhitening2d(16)(torch.randn(1, 16, 8, 8)).shape
        torch.Size([1, 16, 8, 8])
    """


@complete
class InstanceWhitening3d(_Rank3d, _InstanceWhitening):
    """Instance whitening of ``[N, C, D, H, W]``: each sample over its positions.

    Example:
        >>> InstanceWhitening3d(8)(torch.randn(1, 8, 2, 8, 8)).shape
        torch.Size([1, 8, 2, 8, 8])
    """
