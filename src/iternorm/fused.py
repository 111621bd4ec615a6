"""The normalization of a batch in Triton kernels, as one differentiable function with torch.library contracts.

Eager code calls the kernels directly; `torch.compile` sees two operators. `iternorm.kernels`, and with it triton, is
imported when it is first used.
"""

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from iternorm import ops

HAS_TRITON = find_spec("triton") is not None
_launch: Any = None


def kernels() -> Any:
    """The Triton kernels, imported when they are first used."""
    global _launch
    if _launch is None:
        from iternorm.kernels import launch

        _launch = launch
    return _launch


def no_kernels(x: Tensor, group_size: int, solver: str) -> str | None:
    """Why the Triton kernels cannot normalize `x`, or None."""
    if solver != "newton":
        return f"the kernels compute newton's iteration, not {solver!r}"
    if not HAS_TRITON:
        return "triton is not installed"
    return kernels().unsupported(x, group_size)


def whiten_fused(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    num_iters: int,
    eps: float,
    statistics: ops.Running | None,
) -> Tensor:
    """`whiten` by Newton's iteration in Triton kernels, and the running statistics in the same launches.

    Under `torch.compile` the statistics are updated by ordinary operations, which the compiler joins.
    """
    compiling = torch.compiler.is_compiling()
    inside = None if compiling else statistics
    y, state = _WhitenFused.apply(x, weight, bias, group_size, num_iters, eps, inside)  # pyright: ignore[reportGeneralTypeIssues]
    if compiling and statistics is not None:
        mean, covariance, whitening = kernels().views(state, x.shape[1], group_size, num_iters)
        size = whitening.shape[-1]
        ops.update_running(statistics, mean, covariance[:, :size, :size], whitening)
    return y


class _WhitenFused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group_size, num_iters, eps, statistics):
        if torch.compiler.is_compiling():
            y, state = _fused_forward_op(x, weight, bias, group_size, num_iters, eps)
        else:
            with _on_device(x):
                y, state = kernels().forward(x, weight, bias, group_size, num_iters, eps, statistics)
        ctx.save_for_backward(x, weight, bias, state)
        ctx.mark_non_differentiable(state)
        ctx.config = group_size, num_iters, eps
        return y, state

    @staticmethod
    def backward(ctx, grad, _unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state = ctx.saved_tensors
        group_size, num_iters, eps = ctx.config
        needs = ctx.needs_input_grad[:3]
        compiling = torch.compiler.is_compiling()
        if compiling:
            gradients = _fused_backward_op(grad, x, weight, state, group_size, num_iters, eps, needs[0])
        elif torch.is_grad_enabled():
            config = group_size, "newton", num_iters, eps
            return *ops.differentiable_backward(grad, (x, weight, bias), needs, config), None, None, None, None
        else:
            with _on_device(x):
                gradients = kernels().backward(grad, x, weight, state, group_size, num_iters, eps, needs[0])
        grad_weight = _as(gradients[1], weight) if needs[1] else None
        grad_bias = _as(gradients[2], bias) if needs[2] else None
        return gradients[0] if needs[0] else None, grad_weight, grad_bias, None, None, None, None


def _as(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


@torch.library.custom_op("iternorm::fused_forward", mutates_args=())
def _fused_forward_op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, num_iters: int, eps: float
) -> tuple[Tensor, Tensor]:
    with _on_device(x):
        return kernels().forward(x, weight, bias, group_size, num_iters, eps, zeroed=True)


@_fused_forward_op.register_fake
def _(x, weight, bias, group_size, num_iters, eps):
    size = kernels().state_of(x.shape[1], group_size, num_iters).size
    return torch.empty_like(kernels().dense(x)), x.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("iternorm::fused_backward", mutates_args=())
def _fused_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    state: Tensor,
    group_size: int,
    num_iters: int,
    eps: float,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with _on_device(x):
        gradients = kernels().backward(grad, x, weight, state, group_size, num_iters, eps, needs_input)
    # An operator returns tensors: what was not asked for is empty.
    dx, grad_weight, grad_bias = (state.new_empty(0) if g is None else g for g in gradients)
    return dx, grad_weight, grad_bias


@_fused_backward_op.register_fake
def _(grad, x, weight, state, group_size, num_iters, eps, needs_input):
    dx = torch.empty_like(kernels().dense(x)) if needs_input else state.new_empty(0)
    return dx, state.new_empty(0 if weight is None else x.shape[1]), state.new_empty(x.shape[1])


def can_infer(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """The inference kernel has no gradient, and a graph that is recorded or exported wants ordinary operators."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))


def infer_fused(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """y = diag(γ) W (x - μ) + β from running statistics, in one launch."""
    with _on_device(x):
        return kernels().infer(x, whitening, mean, weight, bias, group_size)


def _on_device(x: Tensor):
    """Kernels are launched on the current device: make it that of `x` where it is another."""
    same = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if same else torch.cuda.device(x.device)
