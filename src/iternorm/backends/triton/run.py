"""One whitening layer on the GPU: `forward` and `backward`, and the verb `apply` for eval.

Forward and backward are one chain of launches each: partial moments, their reduction, and the iteration with what it is
for. Where groups have more than 64 channels, the iteration is the launches of `launches/iteration.py`.
"""

from typing import Any

import torch
from torch import Tensor

from iternorm.backends.triton.launches.iteration import meeting_place
from iternorm.backends.triton.layout import (
    dense,
    placed,
    shared_size,
    split_of,
    state_of,
    unsupported,
)
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.precision import newton_split, split_for
from iternorm.backends.triton.runtime import given_to, lacking, on_device

__all__ = [
    "apply",
    "backward",
    "dense",
    "forward",
    "lacking",
    "on_device",
    "plan_of_state",
    "split_for",
    "state_size",
    "unsupported",
]


# Of a `Running`, where none is kept.
NOT_RUNNING: Any = (None,) * 5


def state_size(x: Tensor, group_size: int, num_iters: int, exact: bool, ranks: int = 0) -> int:
    """The elements of the state that `forward` returns."""
    kept_parts = newton_split(split_for(x.dtype), exact, num_iters)
    # A compiler may take the channels for a symbol, which is no key.
    channels = int(x.shape[1])
    shared = shared_size(channels, group_size, num_iters, exact, ranks)
    return state_of(channels, group_size, num_iters, kept_parts, shared).size


def plan_of_state(
    state: Tensor,
    x,
    weight,
    group_size,
    num_iters,
    exact: bool,
    relu: bool,
    residual: bool,
    summed: bool,
) -> Plan:
    """The plan for the backward of a forward that is known by the state it left."""
    split = split_of(state, x, group_size, num_iters, exact)
    return plan_for(x, weight, None, group_size, num_iters, None, exact, relu, split, residual, summed)


def parts_of(state: Any, plan: Plan) -> tuple:
    """Mean, variance, counter, covariance, whitening and iterates in the state: addresses if it is one, or tensors."""
    if isinstance(state, int):
        # Written out: a loop here costs as much as a launch.
        mean, variance, batches, covariance, whitening, iterates, *_ = plan.at
        return (
            state + 4 * mean,
            state + 4 * variance,
            state + 4 * batches,
            state + 4 * covariance,
            state + 4 * whitening,
            state + 4 * iterates,
        )
    # Where there are no iterates their part is empty, and any memory will do for it.
    slices = [state[offset if offset < plan.at.size else 0 :] for offset in plan.at[:6]]
    slices[2], slices[5] = slices[2][:4].view(torch.int64), slices[5].view(plan.kept)
    return tuple(slices)


def forward(
    x,
    weight,
    bias,
    group_size,
    num_iters,
    eps,
    running=None,
    exact=False,
    relu=False,
    zeroed=False,
    residual=None,
) -> tuple[Tensor, Tensor, Plan]:
    """Whiten a batch, and update `running` (a `Running`, or None). `residual` is added; `relu` keeps what is positive.

    `zeroed` clears the state first if the kernels leave gaps in it: an operator's outputs must not be arbitrary.

    Returns:
        y, the state that `backward` needs (`layout.State` says what is in it), and the plan, which spares it a search.
    """
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu, residual=residual is not None)
    transposed = plan.copied and x.is_contiguous()
    if plan.copied:
        x = placed(x, group_size)
    residual = in_strides(residual, x)
    running_mean, running_matrix, num_batches, momentum, _ = running or NOT_RUNNING
    has_gaps = not (plan.at.even and plan.counts)
    state = (x.new_zeros if zeroed and has_gaps else x.new_empty)(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    # The partial sums have been read by the time of the iteration, and leave their room to it.
    partials = plan.workspace(x, "moments")
    place = None if plan.iteration is None else meeting_place(x)
    learned = (weight, bias, running_mean, running_matrix)
    counter = num_batches if plan.counts else None
    stream, given = given_to(x.device, x, y, state, *learned, residual, partials, counter, place)
    plan.run(stream, *forward_calls(plan, given, eps, momentum))
    return (y.contiguous() if transposed else y), state, plan


def forward_calls(plan: Plan, given, eps: float, momentum: float | None) -> tuple[tuple, tuple]:
    """The launches of a forward pass, and their arguments.

    `given` are x, y, the state, weight, bias, running mean and matrix, what is added, the workspace, the counter of
    batches and the meeting place: addresses, 0 for what is absent, or tensors.
    """
    source, target, saved, scale, shift, mean, matrix, added, partials, counter, place = given
    absent = 0 if isinstance(source, int) else None
    batch_mean, variance, batches, covariance, whitening, iterates = parts_of(saved, plan)
    if not plan.counts:
        batches = absent
    moments = (source, source, absent, absent, absent, absent, partials)
    reduction = (partials, covariance, batch_mean, variance, counter, batches, absent, absent)
    names, arguments = whitening_calls(
        plan,
        (source, target, added),
        (covariance, batch_mean, variance, whitening, iterates),
        (scale, shift, mean, matrix, counter, batches),
        (partials, place),
        eps,
        momentum,
    )
    return ("moments", "reduce", *names), (moments, reduction, *arguments)


def whitening_calls(plan: Plan, activations, batch, learned, work, eps, momentum) -> tuple[tuple, tuple]:
    """The launches after the moments, and their arguments.

    Args:
        plan: of the layer.
        activations: x, y, and what is added.
        batch: its covariance, mean, variance, whitening and iterates.
        learned: weight, bias, running mean and matrix, the counter of batches and the copy of it.
        work: memory for the iteration of groups above 64 channels, and where its programs meet.
        eps: added to the diagonal of the covariance.
        momentum: of the running statistics.
    """
    rate = 0.0 if momentum is None else momentum
    if plan.iteration is None:
        return ("whiten",), ((*activations, *batch, *learned, eps, rate),)
    covariance, batch_mean, variance, whitening, _ = batch
    scale, shift, mean, matrix, counter, batches = learned
    room, place = work
    calls = [plan.iteration.forward(covariance, whitening, room, place, eps)]
    if plan.key.running is not None:
        moments = (covariance, whitening, batch_mean, variance)
        calls.append(plan.iteration.blend(*moments, (mean, matrix), counter, batches, eps, rate))
    calls += apply_calls(plan, activations, (whitening, batch_mean, scale, shift), room)
    names, arguments = zip(*calls, strict=True)
    return names, arguments


def apply_calls(plan: Plan, activations, values, room) -> list[tuple[str, tuple]]:
    """The launches of y = diag(γ) W (x - μ) + β, and their arguments.

    Args:
        plan: of the layer.
        activations: x, y, and what is added.
        values: W, μ, γ and β.
        room: memory for prepared matrices of all groups and a value for each of their rows.
    """
    if not plan.maps.in_blocks("apply"):
        return [("apply", (*activations, *values))]
    whitening, mean, scale, shift = values
    operand, offset = _matrix_at(plan, room, 0), behind(room, plan.layout.matrix_size)
    return [
        ("operands", (whitening, mean, scale, shift, operand, offset)),
        ("apply", (*activations, operand, mean, scale, offset)),
    ]


def _matrix_at(plan: Plan, room, index: int) -> Any:
    """The place of prepared matrices behind so many others, each as large as one of fp32."""
    place = behind(room, index * plan.layout.matrix_size)
    return place if isinstance(place, int) else place.view(plan.maps.operand)


def behind(place: Any, count: int) -> Any:
    """So many elements of fp32 after an address or the beginning of a tensor."""
    return place + 4 * count if isinstance(place, int) else place[count:]


def backward(grad, x, weight, state, plan: Plan, eps, needs_input, output=None, more=None):
    """Gradients for x (None unless `needs_input`), weight (None without one), bias, and a residual before a ReLU.

    `output` is what the forward returned, where an activation was part of it. The output's gradient is `grad`, or the
    sum of `grad` and `more`.
    """
    transposed, stride = False, plan.stride
    if x.stride() != stride:
        transposed = plan.layout.wide and x.is_contiguous()
        x = placed(x, plan.key.group_size)
    grad, output, more = in_strides(grad, x), in_strides(output, x), in_strides(more, x)
    layout = plan.layout
    grad_bias = x.new_empty(layout.channels, dtype=torch.float32)
    grad_weight = None if weight is None else torch.empty_like(grad_bias)
    dx = torch.empty_like(x) if needs_input else None
    passed = torch.empty_like(x) if plan.keeps_gradient else None
    cross = plan.workspace(x, "cross_moments")
    place = None if plan.iteration is None else meeting_place(x)
    gradients = (grad_weight, grad_bias, passed)
    stream, given = given_to(x.device, x, grad, output, state, dx, weight, *gradients, cross, place, more)
    plan.run(stream, *backward_calls(plan, given, eps, needs_input))
    if transposed:
        dx, passed = (None if t is None else t.contiguous() for t in (dx, passed))
    return dx, grad_weight, grad_bias, passed


def backward_calls(plan: Plan, given, eps: float, needs_input: bool) -> tuple[tuple, tuple]:
    """The launches of a backward pass, and their arguments.

    `given` are x, the gradient of the output, the output, the state, the gradient of x, weight, the gradients of weight
    and bias, the gradient that passed the activation, the workspace, the meeting place, and what the gradient of the
    output is the sum of beside the first: addresses, 0 for what is absent, or tensors.
    """
    source, gradient, positive, saved, target, scale, scale_gradient, grad_sum, kept, cross, place, more = given
    # The first part of the workspace is for the reduced matrix, the rest for the partials. The iteration has all of it.
    absent, partials = 0 if isinstance(cross, int) else None, behind(cross, plan.layout.matrix_size)
    mean, _, _, covariance, whitening, iterates = parts_of(saved, plan)
    first = (gradient, source, positive, more, kept, mean, partials)
    second = (partials, cross, grad_sum, absent, absent, absent, absent, absent)
    activations = (kept, source, absent, target) if plan.keeps_gradient else (gradient, source, positive, target)
    names, arguments = gradient_calls(
        plan,
        activations,
        (cross, covariance, mean, whitening, iterates, grad_sum),
        (scale, scale_gradient),
        (partials, place),
        eps,
        needs_input,
    )
    return ("cross_moments", "cross_reduce", *names), (first, second, *arguments)


def gradient_calls(plan: Plan, activations, batch, learned, work, eps, needs_input) -> tuple[tuple, tuple]:
    """The launches after the cross moments, and their arguments.

    Args:
        plan: of the layer.
        activations: the gradient, x, the output or what is absent of it, and the gradient of x.
        batch: its cross moments, covariance, mean, whitening, iterates and summed gradient.
        learned: the weight and its gradient.
        work: memory after the cross moments, which with them is that of the iteration of groups above 64 channels, and
            where its programs meet.
        eps: added to the diagonal of the covariance.
        needs_input: whether the gradient of x is asked for, or the weight's alone.
    """
    cross, covariance, mean, whitening, _, grad_sum = batch
    scale, scale_gradient = learned
    if not needs_input and plan.key.weight is None:
        return (), ()
    if plan.iteration is None:
        if needs_input:
            return ("whiten_backward",), ((*activations, *batch, *learned, eps),)
        return ("weight_gradient",), ((cross, whitening, scale_gradient),)
    second, place = work
    if not needs_input:
        name, values = plan.iteration.weight_gradient(cross, whitening, scale_gradient)
        return (name,), (values,)
    matrices = (cross, covariance, whitening, scale, scale_gradient)
    name, values = plan.iteration.backward(*matrices, cross, second, place, eps, 2 / plan.layout.samples)
    if not plan.maps.in_blocks("apply_backward"):
        applied = (*activations, whitening, second, mean, grad_sum, scale)
        return (name, "apply_backward"), (values, applied)
    # The iteration has left its room.
    operands = (_matrix_at(plan, second, 1), _matrix_at(plan, second, 2))
    offset = behind(second, 3 * plan.layout.matrix_size)
    prepared = (whitening, second, mean, grad_sum, scale, *operands, offset)
    applied = (*activations, *operands, mean, offset)
    return (name, "backward_operands", "apply_backward"), (values, prepared, applied)


def in_strides(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """The tensor, or a copy of it that lies in memory as `x` does.

    A gradient of zeros may have no memory: the backward of `torch.sgn` makes such ones.
    """
    if tensor is None or (tensor.stride() == x.stride() and not tensor._is_zerotensor()):
        return tensor
    return torch.empty_like(x).copy_(tensor)


def apply(x, whitening, mean, weight, bias, group_size, relu=False, residual=None) -> Tensor:
    """y = diag(γ) W (x - μ) + β from given fp32 statistics."""
    transposed = x.is_contiguous()
    plan = plan_for(x, weight, bias, group_size, 0, None, relu=relu, residual=residual is not None)
    if plan.copied:
        x = placed(x, group_size)
    y = torch.empty_like(x)
    room, layout = None, plan.layout
    if plan.maps.in_blocks("apply"):
        room = x.new_empty(layout.matrix_size + layout.num_groups * layout.padded, dtype=torch.float32)
    stream, given = given_to(x.device, x, y, in_strides(residual, x), whitening, mean, weight, bias, room)
    names, arguments = zip(*apply_calls(plan, given[:3], given[3:7], given[7]), strict=True)
    plan.run(stream, names, arguments)
    return y.contiguous() if transposed else y
