"""The normalization of the batches of all ranks in Triton kernels: `fused`, with a collective in the middle each way.

Eager code calls kernels and collectives directly. Where calls are recorded there are two operators each way, and a
functional collective between them, which a compiler keeps in its graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from iternorm.whitening import groups, modes
from iternorm.whitening.autograd import NOT_OVER_PROCESSES
from iternorm.whitening.dispatch import kernels
from iternorm.whitening.fused import NO_RUNNING, Repeated, wanted
from iternorm.whitening.graphs import flops
from iternorm.whitening.processes import collective
from iternorm.whitening.settings import Running, Settings


def whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    statistics: Running | None,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused.whiten` over the batches of a process group."""
    if not modes.is_recorded(x):
        return whiten_eagerly(x, weight, bias, settings, statistics, residual)
    kept = NO_RUNNING if statistics is None else statistics
    return _WhitenRecorded.apply(x, weight, bias, residual, settings, *kept)[0]  # pyright: ignore


def whiten_eagerly(
    x, weight, bias, settings: Settings, statistics: Running | None, residual=None, repeated: Repeated | None = None
) -> Tensor:
    """`whiten` where nothing records or transforms the call; `repeated` are a layer's batches of this kind."""
    if repeated is not None:
        y = repeated.without_python(x, weight, bias, settings, statistics, residual, _gradients, _in_steps)
        if y is not None:
            return y
    return _apply_eager(modes.unwrapped(x), weight, bias, residual, settings, statistics)


def _collectives(group: collective.Group) -> tuple[Callable, Callable]:
    """What fills a tensor with all ranks' values, and what sums a tensor over the ranks."""

    def gather(gathered: Tensor, sent: Tensor) -> None:
        collective.gather_moments_eagerly(gathered, sent, group)

    def reduce(sent: Tensor) -> None:
        collective.sum_over_ranks_eagerly(sent, group)

    return gather, reduce


def _in_steps(group: collective.Group, x: Tensor) -> tuple[tuple, tuple]:
    """`_collectives`, each after the name of the group where C++ may ask that itself."""
    gather, reduce = _collectives(group)
    return (None if collective.gathers_by_sum(x, group) else group.name, gather), (group.name, reduce)


@functools.cache
def _chains() -> Any:
    """Imported when it is first used: it imports triton."""
    from iternorm.backends.triton import synchronized

    return synchronized


class _WhitenEager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, settings, statistics):
        group, relu = settings.process_group, settings.relu
        gather, _ = _collectives(group)
        with kernels().on_device(x.device):
            y, state, ctx.plan = _chains().forward(
                x, weight, bias, residual, settings.group_size, settings.steps, settings.eps, statistics,
                settings.exact, relu, group.size, gather,
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
        raise RuntimeError(NOT_OVER_PROCESSES.format("a graph of the backward (create_graph=True)"))
    _, reduce = _collectives(settings.process_group)  # pyright: ignore[reportArgumentType]
    gradients = _chains().backward(grad, x, weight, state, plan, settings.eps, output, reduce if needs[0] else None)
    return wanted(grad, gradients, weight, bias, output, needs)


_apply_eager = modes.apply_without_transforms(_WhitenEager)


class _WhitenRecorded(torch.autograd.Function):
    """The kernels as operators around functional collectives."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, settings, mean, matrix, num_batches, momentum, is_covariance):
        flops.announce()
        group = settings.process_group
        gathered = collective.gather_moments(moments_op(x, settings.group_size), group)
        y, state = whiten_op(
            x, gathered, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
            settings.group_size, settings.steps, settings.eps, settings.exact, settings.relu, group.size,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, state, y if settings.relu else None)
        ctx.mark_non_differentiable(state)
        ctx.settings = settings
        return y, state

    @staticmethod
    def backward(ctx, grad, _unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        if modes.wants_graph(grad):
            raise RuntimeError(NOT_OVER_PROCESSES.format("a graph of the backward (create_graph=True)"))
        x, weight, bias, state, output = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad
        group, passes = settings.process_group, needs[3] and settings.relu
        asked = settings.group_size, settings.steps
        sent, grad_weight, grad_bias, passed = cross_moments_op(
            grad, x, weight, state, output, *asked, settings.exact, passes, group.size
        )
        grad_x = None
        if needs[0]:
            total = collective.sum_over_ranks(sent, group)
            rest = (passed, None) if passes else (grad, output)
            grad_x = input_gradient_op(
                rest[0], x, weight, state, total, rest[1], *asked, settings.eps, settings.exact, group.size
            )
        gradients = grad_x, grad_weight, grad_bias, passed
        return *wanted(grad, gradients, weight, bias, output, needs), *(None,) * 6


# As in `fused`: plain registrations, which take any strides.
_library = torch.library.Library("iternorm", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define("sync_moments(Tensor x, int group_size) -> Tensor", tags=_tags)
_library.define(
    "sync_whiten(Tensor x, Tensor gathered, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? mean, "
    "Tensor(b!)? matrix, Tensor(c!)? num_batches, float? momentum, bool is_covariance, int group_size, int num_iters, "
    "float eps, bool exact, bool relu, int ranks) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "sync_cross_moments(Tensor grad, Tensor x, Tensor? weight, Tensor state, Tensor? output, int group_size, "
    "int num_iters, bool exact, bool needs_residual, int ranks) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "sync_input_gradient(Tensor grad, Tensor x, Tensor? weight, Tensor state, Tensor total, Tensor? output, "
    "int group_size, int num_iters, float eps, bool exact, int ranks) -> Tensor",
    tags=_tags,
)
moments_op = torch.ops.iternorm.sync_moments.default
whiten_op = torch.ops.iternorm.sync_whiten.default
cross_moments_op = torch.ops.iternorm.sync_cross_moments.default
input_gradient_op = torch.ops.iternorm.sync_input_gradient.default


def _num_sums(x: Tensor, group_size: int) -> int:
    """The numbers that are sent backward; forward a count comes first."""
    return x.shape[1] + groups.num_groups(x.shape[1], group_size) * groups.effective_size(x.shape[1], group_size) ** 2


@torch.library.impl(_library, "sync_moments", "CompositeExplicitAutograd")
def _(x, group_size):
    chains = _chains()
    with kernels().on_device(x.device):
        # What is sent depends neither on how many ranks there are, nor on what they make of it.
        plan = chains.plan_for(x, None, None, group_size, 0, None, ranks=1)
        return chains.moments(x, plan)


@torch.library.register_fake("iternorm::sync_moments", lib=_library)
def _(x, group_size):
    return x.new_empty(1 + _num_sums(x, group_size), dtype=torch.float32)


@torch.library.impl(_library, "sync_whiten", "CompositeExplicitAutograd")
def _(
    x, gathered, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
    group_size, num_iters, eps, exact, relu, ranks,
):  # fmt: skip
    chains = _chains()
    running = None if mean is None else Running(mean, matrix, num_batches, momentum, is_covariance)
    with kernels().on_device(x.device):
        asked = (group_size, num_iters, eps, running, exact, relu, ranks)
        return chains.forward(x, weight, bias, residual, *asked, None, gathered, zeroed=True)[:2]


@torch.library.register_fake("iternorm::sync_whiten", lib=_library)
def _(
    x, gathered, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance,
    group_size, num_iters, eps, exact, relu, ranks,
):  # fmt: skip
    size = kernels().state_size(x, group_size, num_iters, exact, ranks)
    return torch.empty_like(kernels().dense(x)), x.new_empty(size, dtype=torch.float32)


@torch.library.impl(_library, "sync_cross_moments", "CompositeExplicitAutograd")
def _(grad, x, weight, state, output, group_size, num_iters, exact, needs_residual, ranks):
    chains = _chains()
    with kernels().on_device(x.device):
        asked = (output is not None, needs_residual, ranks)
        plan = chains.plan_of_state(state, x, weight, group_size, num_iters, exact, *asked)
        _, *gradients, sent = chains.backward(grad, x, weight, state, plan, 0.0, output, None)
        # An operator returns tensors: what was not asked for is empty.
        return sent, *(state.new_empty(0) if gradient is None else gradient for gradient in gradients)


@torch.library.register_fake("iternorm::sync_cross_moments", lib=_library)
def _(grad, x, weight, state, output, group_size, num_iters, exact, needs_residual, ranks):
    grad_weight = state.new_empty(0 if weight is None else x.shape[1])
    passed = torch.empty_like(kernels().dense(x)) if needs_residual else state.new_empty(0)
    return state.new_empty(_num_sums(x, group_size)), grad_weight, state.new_empty(x.shape[1]), passed


@torch.library.impl(_library, "sync_input_gradient", "CompositeExplicitAutograd")
def _(grad, x, weight, state, total, output, group_size, num_iters, eps, exact, ranks):
    chains = _chains()
    with kernels().on_device(x.device):
        asked = (output is not None, False, ranks)
        plan = chains.plan_of_state(state, x, weight, group_size, num_iters, exact, *asked)
        return chains.backward(grad, x, weight, state, plan, eps, output, None, total)[0]


@torch.library.register_fake("iternorm::sync_input_gradient", lib=_library)
def _(grad, x, weight, state, total, output, group_size, num_iters, eps, exact, ranks):
    return torch.empty_like(kernels().dense(x))
