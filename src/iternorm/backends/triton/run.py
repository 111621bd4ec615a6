"""One whitening layer on the GPU: `forward`, `backward` and `infer`.

Forward and backward are one chain of launches each: partial moments, their reduction, and the iteration with what it is
for. Where groups have more than 64 channels, the iteration is the launches of `iternorm.backends.triton.iteration`.
"""

from typing import Any

import torch
from torch import Tensor

from iternorm.backends.triton.devices import lacking
from iternorm.backends.triton.layout import (
    by_cublas,
    dense,
    newton_parts,
    parts,
    placed,
    split_of,
    state_of,
    unsupported,
    views,
)
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.runtime import on_device

__all__ = [
    "backward",
    "by_cublas",
    "dense",
    "forward",
    "infer",
    "lacking",
    "newton_parts",
    "on_device",
    "parts",
    "placed",
    "plan_for",
    "split_of",
    "state_of",
    "unsupported",
    "views",
]


# Of a `Running`, where none is kept.
_NOT_RUNNING: Any = (None,) * 5


def _given(plan: Plan, *tensors: Tensor | None) -> tuple[int | None, Any]:
    """The stream, and the tensors as kernels launched on it take them: addresses, 0 for an absent one.

    Without a stream, where one is not aligned to 16 bytes or there is no GPU, the tensors themselves, for Triton.
    """
    stream = plan.stream()
    if stream is not None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if not together & 15:
            return stream, addresses
    return None, tensors


def _parts_of(state: Any, plan: Plan) -> tuple:
    """Mean, variance, counter, covariance, whitening and iterates in the state: addresses if it is one, or tensors."""
    if isinstance(state, int):
        # Written out: a loop here costs as much as a launch.
        mean, variance, batches, covariance, whitening, iterates, _ = plan.at
        return (
            state + 4 * mean,
            state + 4 * variance,
            state + 4 * batches,
            state + 4 * covariance,
            state + 4 * whitening,
            state + 4 * iterates,
        )
    # Where there are no iterates their part is empty, and any memory will do for it.
    slices = [state[offset if offset < plan.at.size else 0 :] for offset in plan.at[:-1]]
    slices[2], slices[5] = slices[2][:2].view(torch.int64), slices[5].view(plan.kept)
    return tuple(slices)


def forward(
    x, weight, bias, group_size, num_iters, eps, running=None, exact=False, relu=False, zeroed=False
) -> tuple[Tensor, Tensor, Plan]:
    """Whiten a batch, and update `running` (a `Running`, or None). `relu` keeps what is positive.

    `zeroed` clears the state first: its parts have gaps between them, and an operator's outputs must not be arbitrary.

    Returns:
        y, the state that `backward` needs (`views` shows what is in it), and the plan, which spares it a search.
    """
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu)
    turned = plan.copied and x.is_contiguous()
    if plan.copied:
        x = placed(x, group_size)
        plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu)
    running_mean, running_matrix, num_batches, momentum, _ = running or _NOT_RUNNING
    state = (x.new_zeros if zeroed else x.new_empty)(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    stream, given = _given(plan, x, y, state, weight, bias, running_mean, running_matrix)
    source, target, saved, scale, shift, mean, matrix = given
    partials: Any = plan.workspace(x, "moments")
    absent, counter = None, num_batches
    if stream is not None:
        absent, partials = 0, partials.data_ptr()
        counter = num_batches.data_ptr() if plan.counts else absent
    batch_mean, variance, batches, covariance, whitening, iterates = _parts_of(saved, plan)
    if not plan.counts:
        batches = absent
    moments = (source, source, absent, absent, partials)
    reduction = (partials, covariance, batch_mean, variance, counter, batches)
    rate = 0.0 if momentum is None else momentum
    if plan.iteration is None:
        whitened = (
            source, target, covariance, batch_mean, variance, whitening, iterates, scale, shift, mean, matrix,
            counter, batches, eps, rate,
        )  # fmt: skip
        plan.run(stream, ("moments", "reduce", "whiten"), (moments, reduction, whitened))
    else:
        # The partial sums have been read by then, and leave their room to the iteration.
        calls = plan.iteration.forward(covariance, whitening, iterates, partials, eps)
        if running is not None:
            batch = (covariance, whitening, batch_mean, variance)
            calls.append(plan.iteration.blend(*batch, (mean, matrix), counter, batches, rate))
        names, arguments = zip(*calls, strict=True)
        application = (source, target, whitening, batch_mean, scale, shift)
        plan.run(stream, ("moments", "reduce", *names, "apply"), (moments, reduction, *arguments, application))
    return (y.contiguous() if turned else y), state, plan


def backward(grad, x, weight, state, plan: Plan, eps, needs_input, output=None):
    """Gradients for x (None unless `needs_input`), weight (None without one) and bias.

    `output` is what the forward returned, where an activation was part of it.
    """
    turned, stride = False, plan.key.stride
    if x.stride() != stride:
        turned = plan.in_blocks and x.is_contiguous()
        x = placed(x, plan.key.group_size)
    if grad.stride() != stride:
        grad = torch.empty_like(x).copy_(grad)
    if turned and output is not None:
        output = torch.empty_like(x).copy_(output)
    shape = plan.shape
    grad_bias = x.new_empty(shape.channels, dtype=torch.float32)
    grad_weight = None if weight is None else torch.empty_like(grad_bias)
    dx = torch.empty_like(x) if needs_input else None
    stream, given = _given(plan, x, grad, output, state, dx, weight, grad_weight, grad_bias)
    source, gradient, passing, saved, target, scale, scale_gradient, grad_sum = given
    cross: Any = plan.workspace(x, "cross_moments")
    # The first part of the workspace is for the reduced matrix and for B, the rest for the partials.
    half = shape.num_groups * shape.padded**2
    if stream is not None:
        cross = cross.data_ptr()
        absent, second, partials = 0, cross + 4 * half, cross + 8 * half
    else:
        absent, second, partials = None, cross[half:], cross[2 * half :]
    mean, _, _, covariance, whitening, iterates = _parts_of(saved, plan)
    names = ("cross_moments", "cross_reduce")
    arguments = ((gradient, source, passing, mean, partials), (partials, cross, grad_sum, absent, absent, absent))
    activations = (gradient, source, passing, target)
    if plan.iteration is None:
        if needs_input:
            statistics = (cross, covariance, mean, whitening, iterates, grad_sum)
            names = (*names, "whiten_backward")
            arguments = (*arguments, (*activations, *statistics, scale, scale_gradient, eps))
        elif weight is not None:
            names, arguments = (*names, "weight_gradient"), (*arguments, (cross, whitening, scale_gradient))
    else:
        matrices = (cross, covariance, whitening, iterates, scale, scale_gradient, partials, second)
        calls = plan.iteration.backward(*matrices, eps, 2 / shape.samples)
        # The gradient of the weight is complete with the first of them.
        more, values = zip(*(calls if needs_input else calls[:1]), strict=True)
        names, arguments = (*names, *more), (*arguments, *values)
        if needs_input:
            names = (*names, "apply_backward")
            arguments = (*arguments, (*activations, whitening, second, mean, grad_sum, scale))
    plan.run(stream, names, arguments)
    return (dx.contiguous() if turned and dx is not None else dx), grad_weight, grad_bias


def infer(x, whitening, mean, weight, bias, group_size, relu=False) -> Tensor:
    """y = diag(γ) W (x - μ) + β from given fp32 statistics: one launch."""
    turned = x.is_contiguous()
    x = placed(x, group_size)
    plan = plan_for(x, weight, bias, group_size, 0, None, relu=relu)
    y = torch.empty_like(x)
    stream, given = _given(plan, x, y, whitening, mean, weight, bias)
    plan.run(stream, ("apply",), (tuple(given),))
    return y.contiguous() if turned else y
