"""The normalization of a batch in Triton kernels, as one differentiable function with torch.library contracts.

Eager code calls the kernels directly; `torch.compile` sees two operators. `iternorm.kernels`, and with it triton, is
imported when it is first used.
"""

import importlib.metadata
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm import groups, ops, solvers

# The first whose launches may depend on each other.
_LEAST_TRITON = (3, 5)
_launch: Any = None


def _find_no_triton() -> str | None:
    """Why there is no Triton for the kernels, or None. It is not imported for that."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # A build under another name, such as those of torch's nightly versions.
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < _LEAST_TRITON:
        return f"they need triton {'.'.join(map(str, _LEAST_TRITON))} or newer, and {version} is installed"
    return None


NO_TRITON = _find_no_triton()


def kernels() -> Any:
    """The Triton kernels, imported when they are first used."""
    global _launch
    if torch.compiler.is_compiling():
        # A compiler guards what a global held before, and finds the module in it that it has itself imported.
        from iternorm.kernels import launch

        return launch
    if _launch is None:
        from iternorm.kernels import launch

        _launch = launch
    return _launch


def no_kernels(x: Tensor, group_size: int, solver: str) -> str | None:
    """Why the Triton kernels cannot normalize `x`, or None."""
    if solver not in ("newton", "zca"):
        return f"the kernels compute newton's iteration and zca, not {solver!r}"
    if NO_TRITON is not None:
        return NO_TRITON
    return kernels().unsupported(x, group_size, solver)


def are_kernels_best(x: Tensor, group_size: int, solver: str) -> bool:
    """Whether the Triton kernels can normalize `x`, and faster than torch."""
    return no_kernels(x, group_size, solver) is None and not kernels().by_cublas(x, group_size)


def has_large_newton(x: Tensor, group_size: int, solver: str, num_iters: int) -> bool:
    """Whether the iteration alone runs in kernels, for groups that are too large for the others.

    A compiler sees the torch path's products, which it can place in a graph.
    """
    if not x.is_cuda or solver != "newton" or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if NO_TRITON is not None or num_iters < 2 or groups.effective_size(x.shape[1], group_size) < 64:
        return False
    return kernels().lacking(x.device.index) is None


# Newton's steps to convergence, 24. A step multiplies a small eigenvalue of the normalized covariance by 9/4, so that
# they reach everything above 1e-8 of the trace: what lies below is rounding in the covariance itself.
ZCA_STEPS = solvers.most_steps(torch.float32)


class Settings(NamedTuple):
    """What the layer asks for. ZCA is Newton's iteration run to convergence, in products of fp32's accuracy."""

    group_size: int
    solver: str
    num_iters: int
    eps: float
    relu: bool = False

    @property
    def steps(self) -> int:
        return ZCA_STEPS if self.solver == "zca" else min(self.num_iters, ZCA_STEPS)

    @property
    def exact(self) -> bool:
        return self.solver == "zca"


def whiten_fused(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, statistics: ops.Running | None
) -> Tensor:
    """`whiten` by Newton's iteration in Triton kernels, and the running statistics in the same launches.

    Under `torch.compile` the statistics are updated by ordinary operations, which the compiler joins.
    """
    if not torch.compiler.is_compiling():
        return whiten_eagerly(x, weight, bias, settings, statistics)
    y, state = _WhitenCompiled.apply(x, weight, bias, settings)  # pyright: ignore[reportGeneralTypeIssues]
    if statistics is not None:
        mean, covariance, whitening = kernels().views(state, x.shape[1], settings.group_size, settings.steps)
        size = whitening.shape[-1]
        ops.update_running(statistics, mean, covariance[:, :size, :size], whitening)
    return y


def whiten_eagerly(x, weight, bias, settings: Settings, statistics: ops.Running | None) -> Tensor:
    """`whiten_fused` where no graph is recorded."""
    if torch._C._are_functorch_transforms_active():
        return _WhitenEager.apply(x, weight, bias, settings, statistics)  # pyright: ignore[reportReturnType]
    # What is left of it without transforms, in half the time.
    x = torch._C._functorch.unwrap_if_dead(x)  # pyright: ignore[reportAttributeAccessIssue]
    return _apply_eager(x, weight, bias, settings, statistics)


class _WhitenEager(torch.autograd.Function):
    """The kernels, called directly. The state is no output: autograd would make a gradient of zeros for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings, statistics):
        found = kernels()
        group_size, solver, num_iters, eps, relu = settings
        exact = solver == "zca"
        steps = ZCA_STEPS if exact else min(num_iters, ZCA_STEPS)
        with found.on_device(x.device):
            y, state, ctx.plan = found.forward(x, weight, bias, group_size, steps, eps, statistics, exact, relu)
        ctx.save_for_backward(x, weight, bias, state, y if relu else None)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            if output is not None:
                grad = torch.where(output > 0, grad, 0)
            return *ops.differentiable_backward(grad, (x, weight, bias), needs[:3], ctx.settings[:4]), None, None
        # Autograd has made the device of the gradient the current one.
        gradients = kernels().backward(grad, x, weight, state, ctx.plan, ctx.settings.eps, needs[0], output)
        return *_wanted(gradients, weight, bias, needs), None, None


_apply_eager: Any = super(torch.autograd.Function, _WhitenEager).apply  # pyright: ignore[reportAttributeAccessIssue]


class _WhitenCompiled(torch.autograd.Function):
    """The kernels as two operators, which a compiler can place in a graph."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings):
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
        gradients = _fused_backward_op(
            grad, x, weight, state, output, settings.group_size, settings.steps, settings.eps, settings.exact, needs[0]
        )
        return *_wanted(gradients, weight, bias, needs), None


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
    kept_parts = kernels().newton_parts(kernels().parts(x.dtype), exact, num_iters)
    size = kernels().state_of(x.shape[1], group_size, num_iters, kept_parts).size
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
        relu, split = output is not None, kernels().split_of(state, x, group_size, num_iters, exact)
        as_read = kernels().placed(x, group_size)
        plan = kernels().plan_for(as_read, weight, None, group_size, num_iters, None, exact, relu, split)
        gradients = kernels().backward(grad, x, weight, state, plan, eps, needs_input, output)
    # An operator returns tensors: what was not asked for is empty.
    dx, grad_weight, grad_bias = (state.new_empty(0) if g is None else g for g in gradients)
    return dx, grad_weight, grad_bias


@_fused_backward_op.register_fake
def _(grad, x, weight, state, output, group_size, num_iters, eps, exact, needs_input):
    dx = torch.empty_like(kernels().dense(x)) if needs_input else state.new_empty(0)
    return dx, state.new_empty(0 if weight is None else x.shape[1]), state.new_empty(x.shape[1])


def can_infer(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """The inference kernel has no gradient, and a graph that is recorded or exported wants ordinary operators."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))


def infer_fused(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, relu: bool
) -> Tensor:
    """y = diag(γ) W (x - μ) + β from running statistics, in one launch, and what is positive of it with `relu`."""
    with kernels().on_device(x.device):
        return kernels().infer(x, whitening, mean, weight, bias, group_size, relu)
