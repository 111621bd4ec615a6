"""Whitening of each sample on its own: checks the arguments and hands over to `iternorm.whitening.items`."""

import math
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from iternorm.whitening import groups, items, validation
from iternorm.whitening.settings import Settings


def group_whitening(
    input: Tensor,
    num_groups: int = 32,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    num_iters: int = 5,
    solver: str = "newton",
    impl: str = "auto",
    activation: str | None = None,
) -> Tensor:
    """Group whitening (Huang et al., CVPR 2021): each sample is whitened on its own, over groups of its channels.

    The channels of a sample are divided into `num_groups` groups in order. The groups are the dimensions that are
    whitened; the values of a group are its channels at all positions. With one channel per group, this is instance
    whitening of all channels together.

    Args:
        input: ``[N, C, ...]``, C a multiple of `num_groups`.
        num_groups: the size of a sample's covariance.
        weight: ``[C]``, the scale.
        bias: ``[C]``, the shift.
        eps: added to the diagonal of the covariance.
        num_iters: the steps of the solver "newton".
        solver: "newton", "zca", "pca" or "cholesky".
        impl: as in `iter_norm`.
        activation: None, or "relu".
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        options: dict[str, Any] = {"num_iters": num_iters, "solver": solver, "impl": impl, "activation": activation}
        return handle_torch_function(group_whitening, tensors, input, num_groups, weight, bias, eps, **options)
    _check_tensors(input, weight, bias)
    num_groups = validation.check_num_groups(num_groups, input.shape[1])
    settings = _settings(num_groups, eps, num_iters, solver, impl, activation)
    if math.prod(input.shape[1:]) == num_groups:
        raise ValueError(
            f"each sample has only one value in each of the {num_groups} groups: shape {list(input.shape)}; "
            "use fewer groups, or larger inputs"
        )
    return items.whiten(input, weight, bias, settings, num_groups)


def instance_whitening(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    group_size: int | None = 64,
    num_iters: int = 5,
    solver: str = "newton",
    impl: str = "auto",
    activation: str | None = None,
) -> Tensor:
    """Instance whitening: each sample is whitened on its own, over its positions.

    This is `iter_norm` of each sample alone. The arguments are those of `group_whitening`, with `group_size` in place
    of `num_groups`: the number of channels whitened together, the last group holding the remainder; None is all.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        options: dict[str, Any] = {"group_size": group_size, "num_iters": num_iters, "solver": solver, "impl": impl}
        options["activation"] = activation
        return handle_torch_function(instance_whitening, tensors, input, weight, bias, eps, **options)
    group_size = validation.check_group_size(group_size)
    _check_tensors(input, weight, bias)
    size = groups.effective_size(input.shape[1], group_size)
    settings = _settings(size, eps, num_iters, solver, impl, activation)
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(
            f"each sample has only one value per channel: shape {list(input.shape)}; use inputs [N, C, L, ...] of more "
            "positions, or a norm over the batch (IterNorm)"
        )
    return items.whiten(input, weight, bias, settings, input.shape[1])


def _check_tensors(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    validation.check_input(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != (x.shape[1],):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; an input of {x.shape[1]} channels needs [{x.shape[1]}]"
            )


def _settings(size: int, eps, num_iters, solver: str, impl: str, activation: str | None) -> Settings:
    validation.check_any_solver(solver)
    validation.check_impl(impl)
    validation.check_activation(activation)
    num_iters = validation.check_num_iters(num_iters)
    return Settings(size, solver, num_iters if solver == "newton" else 0, validation.check_eps(eps), activation, impl)
