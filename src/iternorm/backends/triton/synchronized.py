"""One whitening layer over the ranks of a process group: the chains of `run`, each with a collective in the middle.

What is exchanged is gathered and summed by the caller. Before a collective everything is of this rank, after it of all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.triton.iteration import meeting_place
from iternorm.backends.triton.layout import placed, split_of
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.run import NOT_RUNNING, gradient_calls, in_strides, parts_of, whitening_calls
from iternorm.backends.triton.runtime import given_to

__all__ = [
    "as_given",
    "as_read",
    "backward",
    "cross_moments",
    "forward",
    "in_strides",
    "input_gradient",
    "moments",
    "plan_for",
    "plan_of_state",
    "whiten",
]


def forward(
    x, weight, bias, residual, group_size, num_iters, eps, running, exact, relu, ranks: int,
    gather: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Plan]:  # fmt: skip
    """`run.forward` over so many ranks; `gather` puts the moments of all of them one after the other."""
    added = residual is not None
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu, residual=added, ranks=ranks)
    source = as_read(x, plan)
    y, state = whiten(source, gather(moments(source, plan)), weight, bias, residual, plan, eps, running)
    return as_given(y, x, source), state, plan


def as_read(x: Tensor, plan: Plan) -> Tensor:
    """`x` as the kernels read it, itself or a copy: the functions below take that for x, and what lies as it does."""
    return x if x.stride() == plan.stride else placed(x, plan.key.group_size)


def as_given(result: Tensor, x: Tensor, source: Tensor) -> Tensor:
    """A result that lies in memory as `source` does, what was read in place of `x`, as `x` does if that is dense."""
    return result.contiguous() if source is not x and x.is_contiguous() else result


def moments(x: Tensor, plan: Plan) -> Tensor:
    """Count, mean and covariance of this rank, as they are sent."""
    assert plan.exchange is not None
    sent = x.new_empty(1 + plan.exchange.sums, dtype=torch.float32)
    if x.numel() == 0:
        return sent.zero_()
    workspace = plan.workspace(x, "moments")
    stream, (source, partials, target) = given_to(x.device, x, workspace, sent)
    nothing = None if stream is None else 0
    arguments = (source, source, *(nothing,) * 4, partials), (partials, target, *(nothing,) * 6)
    plan.run(stream, ("moments", "reduce"), arguments)
    return sent


def whiten(x, gathered, weight, bias, residual, plan: Plan, eps, running=None, zeroed=False) -> tuple[Tensor, Tensor]:
    """The output and the state, given the moments of all ranks; `running` is updated by them.

    `zeroed` clears the state first if the kernels leave gaps in it.
    """
    residual = in_strides(residual, x)
    running_mean, running_matrix, num_batches, momentum, _ = running or NOT_RUNNING
    state = (x.new_zeros if zeroed and not plan.at.even else x.new_empty)(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    # The partial sums of this rank are gone, and so is the room that they leave to the iteration.
    room = place = None
    if plan.iteration is not None:
        room, place = x.new_empty(plan.iteration.forward_work, dtype=torch.float32), meeting_place(x)
    tensors = (x, y, residual, state, gathered, weight, bias, running_mean, running_matrix, room, place)
    stream, given = given_to(x.device, *tensors)
    source, target, added, saved, received, scale, shift, mean, matrix, *work = given
    counter: Any = None if stream is None else 0
    if plan.counts:
        counter = num_batches if stream is None else num_batches.data_ptr()
    batch_mean, variance, batches, covariance, whitening, iterates = parts_of(saved, plan)
    names, arguments = whitening_calls(
        plan,
        (source, target, added),
        (covariance, batch_mean, variance, whitening, iterates),
        (scale, shift, mean, matrix, counter, batches if plan.counts else counter),
        work,
        eps,
        momentum,
    )
    if x.numel() == 0 and plan.iteration is not None:
        # Nothing to apply the matrix to. In smaller groups it is computed where it is applied.
        names, arguments = names[:-1], arguments[:-1]
    merged = (received, covariance, batch_mean, variance, counter, batches)
    plan.run(stream, ("merge", *names), (merged, *arguments))
    return y, state


def backward(grad, x, weight, state, plan: Plan, eps, output, reduce: Callable[[Tensor], Tensor] | None):
    """`run.backward`; `reduce` sums over the ranks, and is None where x wants no gradient."""
    source = as_read(x, plan)
    grad, output = in_strides(grad, source), in_strides(output, source)
    sent, grad_weight, grad_bias, passed = cross_moments(grad, source, weight, state, output, plan)
    dx = None
    if reduce is not None:
        rest = (grad, output) if passed is None else (passed, None)
        dx = as_given(input_gradient(rest[0], source, weight, state, reduce(sent), rest[1], plan, eps), x, source)
    return dx, grad_weight, grad_bias, None if passed is None else as_given(passed, x, source)


def cross_moments(grad, x, weight, state, output, plan: Plan) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The sums that are sent, the gradients of weight and bias, and what passed an activation, for a residual.

    The gradients of weight and bias are this rank's own part, as in SyncBatchNorm.
    """
    assert plan.exchange is not None
    make = x.new_zeros if x.numel() == 0 else x.new_empty
    sent, grad_bias = make(plan.exchange.sums, dtype=torch.float32), make(x.shape[1], dtype=torch.float32)
    grad_weight = None if weight is None else make(x.shape[1], dtype=torch.float32)
    passed = torch.empty_like(x) if plan.keeps_gradient else None
    if x.numel() == 0:
        return sent, grad_weight, grad_bias, passed
    tensors = (grad, x, output, passed, state, plan.workspace(x, "cross_moments"), sent, grad_bias, grad_weight)
    stream, given = given_to(x.device, *tensors)
    gradient, source, positive, kept, saved, partials, target, grad_sum, scale_gradient = given
    nothing = None if stream is None else 0
    mean, _, _, _, whitening, _ = parts_of(saved, plan)
    first = (gradient, source, positive, nothing, kept, mean, partials)
    by_row = weight is not None and not plan.layout.wide
    weighted = (whitening, scale_gradient) if by_row else (nothing, nothing)
    names: tuple[str, ...] = ("cross_moments", "cross_reduce")
    arguments: tuple[tuple, ...] = (first, (partials, target, grad_sum, *(nothing,) * 3, *weighted))
    if weight is not None and not by_row:
        names, arguments = (*names, "sent_weight_gradient"), (*arguments, (target, whitening, scale_gradient))
    plan.run(stream, names, arguments)
    return sent, grad_weight, grad_bias, passed


def input_gradient(grad, x, weight, state, total, output, plan: Plan, eps) -> Tensor:
    """The gradient of x, given the sums of all ranks; without `output`, where `grad` has passed the activation."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx
    layout, iteration = plan.layout, plan.iteration
    half = layout.num_groups * layout.padded**2
    # Every part begins at 16 bytes.
    channels = -(-layout.channels // 4) * 4
    size = 2 * half + 2 * channels + (0 if iteration is None else iteration.backward_work)
    workspace = x.new_empty(size, dtype=torch.float32)
    place = None if iteration is None else meeting_place(x)
    stream, given = given_to(x.device, x, grad, output, state, dx, weight, total, workspace, place)
    source, gradient, positive, saved, target, scale, received, work, met = given
    # The matrix for the kernels, B, the summed gradient, a gradient of the weight that nobody wants, the iteration's.
    offsets = (half, 2 * half, 2 * half + channels, 2 * half + 2 * channels)
    if stream is not None:
        second, grad_sum, unwanted, room = (work + 4 * offset for offset in offsets)
    else:
        # Where there is no iteration its part is empty, and any memory will do for it.
        second, grad_sum, unwanted, room = (work[offset if offset < size else 0 :] for offset in offsets)
    mean, _, batches, covariance, whitening, iterates = parts_of(saved, plan)
    names, arguments = gradient_calls(
        plan,
        (gradient, source, positive, target),
        (work, covariance, mean, whitening, iterates, grad_sum),
        (scale, scale if weight is None else unwanted),
        (room, second, met),
        eps,
        True,
    )
    plan.run(stream, ("unpack", *names), ((received, batches, work, grad_sum), *arguments))
    return dx


def plan_of_state(state: Tensor, x, weight, group_size, num_iters, exact: bool, relu: bool, residual: bool, ranks: int):
    """The plan for the backward of a forward that is known by the state it left."""
    split = split_of(state, x, group_size, num_iters, exact)
    return plan_for(x, weight, None, group_size, num_iters, None, exact, relu, split, residual, ranks=ranks)
