"""Whitening of each sample by itself: views of the one operation, in which samples are groups of channels."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu
from torch.overrides import handle_torch_function, has_torch_function

from iternorm import solvers
from iternorm.backends.torch.verbs import compute_dtype, is_channels_last
from iternorm.whitening import groups, modes, validation
from iternorm.whitening.autograd import scale_and_shift
from iternorm.whitening.normalize import normalize
from iternorm.whitening.operators import no_autocast
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
    """Group whitening (Huang et al., CVPR 2021): each sample is whitened by itself, over groups of its channels.

    The channels of a sample are divided into `num_groups` groups in order. The groups are the dimensions that are
    whitened, and the channels of a group, at all positions, are their values. One channel a group is instance whitening
    of all channels.

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
        words: dict[str, Any] = {"num_iters": num_iters, "solver": solver, "impl": impl, "activation": activation}
        return handle_torch_function(group_whitening, tensors, input, num_groups, weight, bias, eps, **words)
    settings = _per_sample_settings(input, weight, bias, num_groups, eps, num_iters, solver, impl)
    num_groups = validation.check_num_groups(num_groups, input.shape[1])
    validation.check_activation(activation)
    if math.prod(input.shape[1:]) == num_groups:
        raise ValueError(
            f"each sample has only one value in each of the {num_groups} groups: shape {list(input.shape)}; "
            "use fewer groups, or larger inputs"
        )
    y = _laid_out_as(input, _whiten_samples(input, None, None, settings, num_groups))
    if weight is not None or bias is not None:
        ones = (1, -1, *(1,) * (input.ndim - 2))
        scale = torch.ones((), dtype=y.dtype, device=y.device) if weight is None else weight.to(y.dtype).view(ones)
        y = y * scale if bias is None else torch.addcmul(bias.to(y.dtype).view(ones), y, scale)
    return y if activation is None else relu(y)


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
    """Instance whitening: each sample is whitened by itself, over its positions.

    As `iter_norm` of each sample alone. The arguments are those of `group_whitening`, and `group_size`: the number of
    channels that are whitened together, the last group holding the remainder; None is all of them.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        words: dict[str, Any] = {"group_size": group_size, "num_iters": num_iters, "solver": solver, "impl": impl}
        words["activation"] = activation
        return handle_torch_function(instance_whitening, tensors, input, weight, bias, eps, **words)
    group_size = validation.check_group_size(group_size)
    settings = _per_sample_settings(input, weight, bias, 1, eps, num_iters, solver, impl)
    validation.check_activation(activation)
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(
            f"each sample has only one value per channel: shape {list(input.shape)}; use inputs [N, C, L, ...] of more "
            "positions, or a norm over the batch (IterNorm)"
        )
    outputs = []
    for part in groups.parts(input.shape[1], group_size):
        # Not a slice, which torch 2.6 cannot export: it compares a dynamic batch with the largest integer.
        block = input.narrow(1, part.start, part.stop - part.start)
        scale, shift = (None if t is None else t[part.channels] for t in (weight, bias))
        # Not `_replace`, which the compiler of torch 2.6 does not look into.
        own = Settings(part.size, settings.solver, settings.num_iters, settings.eps, activation, settings.impl)
        outputs.append(_whiten_samples(block, scale, shift, own, block.shape[1]))
    return _laid_out_as(input, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))


def _per_sample_settings(x: Tensor, weight, bias, size: int, eps, num_iters, solver: str, impl: str) -> Settings:
    validation.check_input(x)
    validation.check_any_solver(solver)
    validation.check_impl(impl)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != (x.shape[1],):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; an input of {x.shape[1]} channels needs [{x.shape[1]}]"
            )
    num_iters = validation.check_num_iters(num_iters)
    return Settings(size, solver, num_iters if solver == "newton" else 0, validation.check_eps(eps), None, impl)


def _whiten_samples(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, rows: int) -> Tensor:
    """Each sample's `rows` rows whitened by its own statistics: the samples are groups of the channels of one batch."""
    if x.numel() == 0:
        return normalize(x, weight, bias, settings, None, True)
    if modes.is_exporting():
        return _exported_samples(x, weight, bias, settings, rows)
    weight, bias = (None if t is None else t.repeat(x.shape[0]) for t in (weight, bias))
    planes = x.reshape(1, x.shape[0] * rows, -1)
    return normalize(planes, weight, bias, settings, None, True).view(x.shape)


def _exported_samples(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, rows: int) -> Tensor:
    """The same in ordinary operators, with the batch as a dimension that another runtime may give any size."""
    size = settings.group_size
    with no_autocast(x):
        blocks = x.reshape(x.shape[0], rows // size, size, -1).to(compute_dtype(x.dtype))
        blocks = blocks - blocks.mean(-1, keepdim=True)
        identity = torch.eye(size, dtype=blocks.dtype, device=x.device)
        covariance = blocks @ blocks.mT / blocks.shape[-1] + settings.eps * identity
        y = solvers.composed(covariance, settings.solver, settings.num_iters) @ blocks
        y = scale_and_shift(y.reshape(*x.shape[:2], -1), weight, bias).reshape(x.shape).to(x.dtype)
    # Not `settings.relu`: the compilers up to torch 2.9 take a property of a named tuple for a value of the graph.
    return relu(y) if settings.activation == "relu" else y


def _laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    # Inside vmap no tensor says how it is laid out.
    if modes.is_transformed() or not is_channels_last(x) or x.is_contiguous():
        return y
    return y.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
