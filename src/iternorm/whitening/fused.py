"""The normalization of a batch in Triton kernels, as one differentiable function with torch.library contracts.

Eager code calls the kernels directly; where calls are recorded there are two operators. Triton is imported when the
kernels are first used.
"""

import torch
from torch import Tensor

from iternorm.whitening import flops, modes, running
from iternorm.whitening.autograd import composed_backward
from iternorm.whitening.dispatch import kernels
from iternorm.whitening.settings import Running, Settings


def whiten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, statistics: Running | None
) -> Tensor:
    """Whiten by Newton's iteration in Triton kernels, and update the running statistics in the same launches.

    Where operators are recorded the statistics are updated by ordinary ones, which a compiler joins.
    """
    if not modes.is_recorded(x):
        return whiten_eagerly(x, weight, bias, settings, statistics)
    y, state = _WhitenRecorded.apply(x, weight, bias, settings)  # pyright: ignore[reportGeneralTypeIssues]
    if statistics is not None:
        mean, covariance, whitening = kernels().views(state, x.shape[1], settings.group_size, settings.steps)
        size = whitening.shape[-1]
        running.update(statistics, mean, covariance[:, :size, :size], whitening)
    return y


def whiten_eagerly(x, weight, bias, settings: Settings, statistics: Running | None) -> Tensor:
    """`whiten` where nothing records or transforms the call."""
    return _apply_eager(modes.unwrapped(x), weight, bias, settings, statistics)


class _WhitenEager(torch.autograd.Function):
    """The kernels, called directly. The state is no output: autograd would make a gradient of zeros for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings, statistics):
        found = kernels()
        relu = settings.relu
        with found.on_device(x.device):
            y, state, ctx.plan = found.forward(
                x, weight, bias, settings.group_size, settings.steps, settings.eps, statistics, settings.exact, relu
            )
        ctx.save_for_backward(x, weight, bias, state, y if relu else None)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if modes.wants_graph(grad):
            return *_graph_backward(grad, x, weight, bias, output, needs, ctx.settings), None, None
        # Autograd has made the device of the gradient the current one.
        gradients = kernels().backward(grad, x, weight, state, ctx.plan, ctx.settings.eps, needs[0], output)
        return *_wanted(gradients, weight, bias, needs), None, None


# In half the time of `_WhitenEager.apply`.
_apply_eager = modes.apply_without_transforms(_WhitenEager)


class _WhitenRecorded(torch.autograd.Function):
    """The kernels as two operators, which a compiler can place in a graph."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings):
        flops.announce()
        y, state = _fused_forward_op(
            x, weight, bias, settings.group_size, settings.steps, settings.eps, settings.exact, settings.relu
        )
        ctx.save_for_backward(x, weight, bias, state, y if settings.relu else None)
        ctx.mark_non_differentiable(state)
        ctx.settings = settings
        return y, state

    @staticmethod
    def backward(ctx, grad, _unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad
        if modes.wants_graph(grad):
            return *_graph_backward(grad, x, weight, bias, output, needs, settings), None
        gradients = _fused_backward_op(
            grad, x, weight, state, output, settings.group_size, settings.steps, settings.eps, settings.exact, needs[0]
        )
        return *_wanted(gradients, weight, bias, needs), None


def _graph_backward(grad, x, weight, bias, output, needs, settings: Settings) -> list:
    if output is not None:
        grad = torch.where(output > 0, grad, 0)
    return composed_backward(grad, (x, weight, bias), needs[:3], settings)


def _wanted(gradients, weight, bias, needs) -> tuple:
    """The gradients that are asked for, those of weight and bias in their dtype."""
    grad_weight = _as(gradients[1], weight) if needs[1] else None
    grad_bias = _as(gradients[2], bias) if needs[2] else None
    return gradients[0] if needs[0] else None, grad_weight, grad_bias


def _as(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


@torch.library.custom_op("iternorm::fused_forward", mutates_args=())
def _fused_forward_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    num_iters: int,
    eps: float,
    exact: bool,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    with kernels().on_device(x.device):
        return kernels().forward(x, weight, bias, group_size, num_iters, eps, exact=exact, relu=relu, zeroed=True)[:2]


@_fused_forward_op.register_fake
def _(x, weight, bias, group_size, num_iters, eps, exact, relu):
    size = kernels().state_size(x, group_size, num_iters, exact)
    return torch.empty_like(kernels().dense(x)), x.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("iternorm::fused_backward", mutates_args=())
def _fused_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    state: Tensor,
    output: Tensor | None,
    group_size: int,
    num_iters: int,
    eps: float,
    exact: bool,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with kernels().on_device(x.device):
        plan = kernels().plan_of_state(state, x, weight, group_size, num_iters, exact, output is not None)
        gradients = kernels().backward(grad, x, weight, state, plan, eps, needs_input, output)
    # An operator returns tensors: what was not asked for is empty.
    dx, grad_weight, grad_bias = (state.new_empty(0) if g is None else g for g in gradients)
    return dx, grad_weight, grad_bias


@_fused_backward_op.register_fake
def _(grad, x, weight, state, output, group_size, num_iters, eps, exact, needs_input):
    dx = torch.empty_like(kernels().dense(x)) if needs_input else state.new_empty(0)
    return dx, state.new_empty(0 if weight is None else x.shape[1]), state.new_empty(x.shape[1])


def apply(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, relu: bool
) -> Tensor:
    """y = diag(γ) W (x - μ) + β from running statistics, in one launch, and what is positive of it with `relu`."""
    with kernels().on_device(x.device):
        return kernels().apply(x, whitening, mean, weight, bias, group_size, relu)
