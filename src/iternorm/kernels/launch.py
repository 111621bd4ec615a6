"""One whitening layer on the GPU: `forward`, `backward` and `infer`.

Forward and backward are one chain of launches each: partial moments, their reduction, and the iteration with what it is
for. Where groups have more than 64 channels, the iteration is the launches of `iternorm.kernels.iteration`.
"""

from typing import Any

import torch
from torch import Tensor

from iternorm.kernels.devices import lacking
from iternorm.kernels.launcher import on_device
from iternorm.kernels.plan import Plan, plan_for
from iternorm.kernels.shapes import (
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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _pointers(quick: bool) -> tuple[Any, int | None]:
    """How a tensor is passed to a kernel, by address or for Triton as it is, and what stands for an absent one."""
    return (Tensor.data_ptr, 0) if quick else (_itself, None)


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


def _parts_of(state: Tensor, plan: Plan, quick: bool) -> tuple:
    """Mean, variance, counter, covariance, whitening and iterates in the state: addresses, or tensors for Triton."""
    at = plan.at
    if quick:
        base = state.data_ptr()
        # Written out: a loop here costs as much as a launch.
        mean, variance, batches, covariance, whitening, iterates, _ = at
        return (
            base + 4 * mean,
            base + 4 * variance,
            base + 4 * batches,
            base + 4 * covariance,
            base + 4 * whitening,
            base + 4 * iterates,
        )
    # Where there are no iterates their part is empty, and any memory will do for it.
    slices = [state[offset if offset < at.size else 0 :] for offset in at[:-1]]
    slices[2], slices[5] = slices[2][:2].view(torch.int64), slices[5].view(plan.kept)
    return tuple(slices)


def forward(
    x, weight, bias, group_size, num_iters, eps, running=None, exact=False, relu=False, zeroed=False
) -> tuple[Tensor, Tensor, Plan]:
    """Whiten a batch, and update `running` (an `iternorm.ops.Running`, or None). `relu` keeps what is positive.

    `zeroed` clears the state first: its parts have gaps between them, and an operator's outputs must not be arbitrary.

    Returns:
        y, the state that `backward` needs (`views` shows what is in it), and the plan, which spares it a search.
    """
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu)
    turned = plan.copied and x.is_contiguous()
    if plan.copied:
        x = placed(x, group_size)
        plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu)
    mean: Any
    mean, matrix, num_batches, momentum, _ = running or (None, None, None, None, None)
    stream, given = _given(plan, x, weight, bias, mean, matrix)
    source, scale, shift, *buffers = given
    quick = stream is not None
    ptr, absent = _pointers(quick)
    state = (x.new_zeros if zeroed else x.new_empty)(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    partials = ptr(plan.workspace(x, "moments", stream))
    batch_mean, variance, batches, covariance, whitening, iterates = _parts_of(state, plan, quick)
    moments = (source, source, absent, absent, partials)
    counter, batches = (ptr(num_batches), batches) if plan.counts else (absent, absent)
    reduction = (partials, covariance, batch_mean, variance, counter, batches)
    rate = 0.0 if momentum is None else momentum
    if plan.iteration is None:
        statistics = (covariance, batch_mean, variance, whitening, iterates)
        whitened = (source, ptr(y), *statistics, scale, shift, *buffers, counter, batches, eps, rate)
        plan.run(stream, ("moments", "reduce", "whiten"), (moments, reduction, whitened))
    else:
        # The partial sums have been read by then, and leave their room to the iteration.
        calls = plan.iteration.forward(covariance, whitening, iterates, partials, eps)
        if running is not None:
            batch = (covariance, whitening, batch_mean, variance)
            calls.append(plan.iteration.blend(*batch, tuple(buffers), counter, batches, rate))
        names, arguments = zip(*calls, strict=True)
        application = (source, ptr(y), whitening, batch_mean, scale, shift)
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
    stream, given = _given(plan, x, grad, weight, output)
    source, gradient, scale, passing = given
    quick = stream is not None
    ptr, absent = _pointers(quick)
    grad_bias = x.new_empty(shape.channels, dtype=torch.float32)
    grad_weight = None if weight is None else torch.empty_like(grad_bias)
    workspace = plan.workspace(x, "cross_moments", stream)
    # The first part of the workspace is for the reduced matrix and for B, the rest for the partials.
    half = shape.num_groups * shape.padded**2
    if quick:
        cross = workspace.data_ptr()
        second, partials = cross + 4 * half, cross + 8 * half
    else:
        cross, second, partials = workspace, workspace[half:], workspace[2 * half :]
    grad_sum = ptr(grad_bias)
    mean, _, _, covariance, whitening, iterates = _parts_of(state, plan, quick)
    scale_gradient = absent if grad_weight is None else ptr(grad_weight)
    dx = torch.empty_like(x) if needs_input else None
    names = ("cross_moments", "cross_reduce")
    arguments = ((gradient, source, passing, mean, partials), (partials, cross, grad_sum, absent, absent, absent))
    activations = (gradient, source, passing, absent if dx is None else ptr(dx))
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
