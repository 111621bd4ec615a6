"""The normalization of a batch in Triton kernels, as one differentiable function with torch.library contracts.

Eager code calls the kernels directly; where calls are recorded there are two operators. Triton is imported when the
kernels are first used.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from iternorm.whitening import modes
from iternorm.whitening.autograd import composed_backward
from iternorm.whitening.dispatch import kernels
from iternorm.whitening.graphs import flops, junctions
from iternorm.whitening.settings import Running, Settings


def whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    statistics: Running | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Whiten by Newton's iteration in Triton kernels, and update the running statistics in the same launches."""
    if not modes.is_recorded(x):
        return whiten_eagerly(x, weight, bias, settings, statistics, residual)
    # One by one: a compiler follows tensors into a function, not into a tuple.
    kept = NO_RUNNING if statistics is None else statistics
    return _WhitenRecorded.apply(x, weight, bias, residual, settings, *kept)[0]  # pyright: ignore


def whiten_eagerly(x, weight, bias, settings: Settings, statistics: Running | None, residual=None) -> Tensor:
    """`whiten` where nothing records or transforms the call."""
    return _apply_eager(modes.unwrapped(x), weight, bias, residual, settings, statistics)


class _WhitenEager(torch.autograd.Function):
    """The kernels, called directly. The state is no output: autograd would make a gradient of zeros for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, settings, statistics):
        found = kernels()
        relu = settings.relu
        with found.on_device(x.device):
            y, state, ctx.plan = found.forward(
                x, weight, bias, settings.group_size, settings.steps, settings.eps, statistics, settings.exact, relu,
                residual=residual,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, state, y if relu else None)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return *_gradients(ctx.plan, ctx.settings, grad, x, weight, bias, state, output, needs), None, None


def _gradients(plan, settings: Settings, grad, x, weight, bias, state, output, needs) -> tuple:
    """The gradients of x, weight, bias and what was added, those that are needed."""
    if modes.wants_graph(grad):
        return tuple(_graph_backward(grad, x, weight, bias, output, needs, settings))
    # Autograd has made the device of the gradient the current one.
    gradients = kernels().backward(grad, x, weight, state, plan, settings.eps, needs[0], output)
    return wanted(grad, gradients, weight, bias, output, needs)


# In half the time of `_WhitenEager.apply`.
_apply_eager = modes.apply_without_transforms(_WhitenEager)


class Repeated:
    """Batches of a layer that are all alike, whitened without Python if that has been compiled.

    A copy of it has seen no batch.
    """

    __slots__ = ("_step",)

    def __init__(self) -> None:
        self._step = None

    def __reduce__(self) -> tuple:
        return type(self), ()

    def whiten(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: Settings,
        statistics: Running | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`whiten_eagerly`, for settings and a momentum that are the same each time."""
        y = self.without_python(x, weight, bias, settings, statistics, residual, _gradients)
        return whiten_eagerly(x, weight, bias, settings, statistics, residual) if y is None else y

    def without_python(
        self, x, weight, bias, settings, statistics, residual, gradients, collectives=None, rows=None
    ) -> Any:
        """The output, or None if this has to be launched from Python: see `step_for` of the kernels."""
        steps = _steps()
        functions = steps.functions()
        if functions is None:
            return None
        mean, matrix, num_batches, _, _ = NO_RUNNING if statistics is None else statistics
        tensors = (x, weight, bias, residual, mean, matrix, num_batches)
        if self._step is not None:
            y = functions.whiten(self._step, *tensors)
            if y is not None:
                return y
        step = steps.step_for(tensors, settings, statistics, gradients, collectives, rows)
        if step is None or step is self._step:
            return None
        self._step = step
        return functions.whiten(step, *tensors)


@functools.cache
def _steps() -> Any:
    """`iternorm.backends.triton.eager.record`, imported when it is first used: it imports triton."""
    from iternorm.backends.triton.eager import record

    return record


# Of a `Running`, where none is kept.
NO_RUNNING = (None, None, None, None, False)


class _WhitenRecorded(torch.autograd.Function):
    """The kernels as two operators, which a compiler can place in a graph."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, settings, mean, matrix, num_batches, momentum, is_covariance):
        flops.announce()
        y, state = forward_op(
            x, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
            settings.group_size, settings.steps, settings.eps, settings.exact, settings.relu,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, state, y if settings.relu else None)
        ctx.mark_non_differentiable(state)
        ctx.settings = settings
        return y, state

    @staticmethod
    def backward(ctx, grad, _unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad
        if modes.wants_graph(grad):
            return *_graph_backward(grad, x, weight, bias, output, needs, settings), *(None,) * 6
        gradients = backward_op(
            grad, None, x, weight, state, output, settings.group_size, settings.steps, settings.eps, settings.exact,
            needs[0], needs[3] and settings.relu,
        )  # fmt: skip
        return *wanted(grad, gradients, weight, bias, output, needs), *(None,) * 6


def _graph_backward(grad, x, weight, bias, output, needs, settings: Settings) -> list:
    if output is not None:
        grad = torch.where(output > 0, grad, 0)
    return [*composed_backward(grad, (x, weight, bias), needs[:3], settings), grad if needs[3] else None]


def wanted(grad, gradients, weight, bias, output, needs) -> tuple:
    """The gradients that are asked for, those of weight and bias in their dtype."""
    grad_weight = _as(gradients[1], weight) if needs[1] else None
    grad_bias = _as(gradients[2], bias) if needs[2] else None
    # Without an activation what was added has the gradient of the output.
    grad_residual = (grad if output is None else gradients[3]) if needs[3] else None
    return gradients[0] if needs[0] else None, grad_weight, grad_bias, grad_residual


def _as(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


# Plain registrations: `custom_op` would wrap each call in Python that looks for aliases, as long as the launches take.
# The operators take any strides and follow those of x, so that a compiler need not copy to the strides it traced.
_library = torch.library.Library("iternorm", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define(
    "fused_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? mean, Tensor(b!)? matrix, "
    "Tensor(c!)? num_batches, float? momentum, bool is_covariance, int group_size, int num_iters, float eps, "
    "bool exact, bool relu) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "fused_backward(Tensor grad, Tensor? more, Tensor x, Tensor? weight, Tensor state, Tensor? output, int group_size, "
    "int num_iters, float eps, bool exact, bool needs_input, bool needs_residual) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
forward_op = torch.ops.iternorm.fused_forward.default
backward_op = torch.ops.iternorm.fused_backward.default


@torch.library.impl(_library, "fused_forward", "CompositeExplicitAutograd")
def _forward_in_python(
    x, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
    group_size, num_iters, eps, exact, relu,
):  # fmt: skip
    _register_compiled()
    found = kernels()
    statistics = None if mean is None else Running(mean, matrix, num_batches, momentum, is_covariance)
    with found.on_device(x.device):
        arguments = (x, weight, bias, group_size, num_iters, eps, statistics, exact, relu)
        return found.forward(*arguments, zeroed=True, residual=residual)[:2]


@torch.library.register_fake("iternorm::fused_forward", lib=_library)
def _(
    x, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
    group_size, num_iters, eps, exact, relu,
):  # fmt: skip
    junctions.install()
    size = kernels().state_size(x, group_size, num_iters, exact)
    return torch.empty_like(kernels().dense(x)), x.new_empty(size, dtype=torch.float32)


@torch.library.impl(_library, "fused_backward", "CompositeExplicitAutograd")
def _backward_in_python(
    grad, more, x, weight, state, output, group_size, num_iters, eps, exact, needs_input, needs_residual
):
    found = kernels()
    with found.on_device(x.device):
        asked = (output is not None, needs_residual, more is not None)
        plan = found.plan_of_state(state, x, weight, group_size, num_iters, exact, *asked)
        gradients = found.backward(grad, x, weight, state, plan, eps, needs_input, output, more)
    # An operator returns tensors: what was not asked for is empty.
    return tuple(state.new_empty(0) if gradient is None else gradient for gradient in gradients)


@torch.library.register_fake("iternorm::fused_backward", lib=_library)
def _(grad, more, x, weight, state, output, group_size, num_iters, eps, exact, needs_input, needs_residual):
    def like_x(wanted: bool) -> Tensor:
        return torch.empty_like(kernels().dense(x)) if wanted else state.new_empty(0)

    grad_weight = state.new_empty(0 if weight is None else x.shape[1])
    return like_x(needs_input), grad_weight, state.new_empty(x.shape[1]), like_x(needs_residual)


_registration: Any = None


def _register_compiled() -> None:
    """From now on compute the operators on a GPU without Python, if that has been compiled: see `eager/step.cpp`."""
    global _registration
    functions = None if _registration is not None else _steps().functions()
    if functions is not None:
        _registration = functions.register_operators(
            "CUDA", _forward_pass, _forward_of_pass, _backward_pass, _backward_of_pass
        )


# C++ hands over the tensors of a pass by their numbers there, and all options as floats.
def _forward_pass(tensors: tuple, options: tuple) -> Any:
    """What C++ can launch for an operator, or None."""
    x, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance, *rest = _forward_arguments(
        tensors, options
    )
    running = None if mean is None else Running(mean, matrix, num_batches, momentum, is_covariance)
    return _steps().forward_pass_for((x, weight, bias, residual, mean, matrix, num_batches), running, tuple(rest))


def _forward_of_pass(tensors: tuple, options: tuple) -> tuple:
    return _forward_in_python(*_forward_arguments(tensors, options))


def _forward_arguments(tensors: tuple, options: tuple) -> tuple:
    """As `fused_forward` has them."""
    x, _, _, weight, bias, mean, matrix, residual, _, num_batches, *_ = tensors
    momentum, is_covariance, group_size, num_iters, eps, exact, relu = options
    rate = None if momentum < 0 else momentum
    asked = (bool(is_covariance), int(group_size), int(num_iters), eps, bool(exact), bool(relu))
    return x, weight, bias, residual, mean, matrix, num_batches, rate, *asked


def _backward_pass(tensors: tuple, options: tuple) -> Any:
    """What C++ can launch for an operator, or None."""
    _, more, x, weight, state, output, *asked, residual = _backward_arguments(tensors, options)
    return _steps().backward_pass_for(x, weight, state, more, output is not None, residual, tuple(asked))


def _backward_of_pass(tensors: tuple, options: tuple) -> tuple:
    return _backward_in_python(*_backward_arguments(tensors, options))


def _backward_arguments(tensors: tuple, options: tuple) -> tuple:
    """As `fused_backward` has them."""
    x, grad, output, state, _, weight, _, _, _, _, _, more, _ = tensors
    group_size, num_iters, eps, *flags = options
    return grad, more, x, weight, state, output, int(group_size), int(num_iters), eps, *map(bool, flags)


def apply(
    x: Tensor,
    whitening: Tensor,
    mean: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    relu: bool,
    residual: Tensor | None = None,
) -> Tensor:
    """y = diag(γ) W (x - μ) + β from running statistics, in one launch, and what is positive of it with `relu`."""
    with kernels().on_device(x.device):
        return kernels().apply(x, whitening, mean, weight, bias, group_size, relu, residual)
