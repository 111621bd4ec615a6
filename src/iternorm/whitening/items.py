"""Whitening of each item of a batch on its own, as one differentiable function.

Where there are kernels, they read and write an item where it lies, with its scale and shift. Elsewhere this is a view
of the operation on a batch, in which the items are groups of channels of one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from iternorm import solvers
from iternorm.backends.torch.verbs import compute_dtype, is_channels_last
from iternorm.whitening import dispatch, groups, modes
from iternorm.whitening.autograd import composed_backward, scale_and_shift
from iternorm.whitening.fused import Repeated, wanted
from iternorm.whitening.normalize import normalize
from iternorm.whitening.operators import no_autocast
from iternorm.whitening.settings import Settings


def whiten(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, rows: int) -> Tensor:
    """Whiten every item by its own statistics, scale and shift, and apply the activation.

    Args:
        x: ``[N, C, ...]``, checked.
        weight: ``[C]``, or None.
        bias: ``[C]``, or None.
        settings: what to compute. The group size counts rows.
        rows: of an item's matrix: its C channels in order, C / rows to a row.
    """
    if x.numel() == 0:
        return normalize(x, weight, bias, settings, None, True)
    if modes.is_exporting():
        return _exported(x, weight, bias, settings, rows)
    if in_kernels(x, settings, rows):
        return whiten_eagerly(x, weight, bias, settings, rows)
    return _as_batch(x, weight, bias, settings, rows)


def in_kernels(x: Tensor, settings: Settings, rows: int) -> bool:
    """Whether there are kernels for the items of `x`."""
    return x.numel() > 0 and dispatch.has_item_kernels(settings, x, rows)


def whiten_eagerly(x: Tensor, weight, bias, settings: Settings, rows: int) -> Tensor:
    """`whiten` where nothing records or transforms the call, and there are kernels."""
    return _apply_eager(modes.unwrapped(x), weight, bias, settings, rows)


class _WhitenItems(torch.autograd.Function):
    """The kernels, called directly."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings, rows):
        from iternorm.backends.triton import items

        group_size, steps, eps, exact = settings.group_size, settings.steps, settings.eps, settings.exact
        with dispatch.kernels().on_device(x.device):
            y, state, plan = items.forward(x, weight, bias, rows, group_size, steps, eps, exact, settings.relu)
        ctx.save_for_backward(x, weight, bias, state, y if settings.relu else None)
        ctx.settings, ctx.plan = settings, plan
        return y

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, state, output = ctx.saved_tensors
        needs = (*ctx.needs_input_grad[:3], False)
        return *_gradients(ctx.plan, ctx.settings, grad, x, weight, bias, state, output, needs)[:3], None, None


def _gradients(plan, settings: Settings, grad, x, weight, bias, state, output, needs) -> tuple:
    """The gradients of x, weight and bias, those that are needed, and of nothing else."""
    from iternorm.backends.triton import items

    if modes.wants_graph(grad):
        if output is not None:
            grad = torch.where(output > 0, grad, 0)

        def compose(x, weight, bias, settings, solve):
            return (_composed(x, weight, bias, settings, plan.num_rows, solve),)

        return *composed_backward(grad, (x, weight, bias), needs[:3], settings, compose), None
    # Autograd has made the device of the gradient the current one.
    gradients = items.backward(grad, x, weight, state, plan, settings.eps, needs[0], output)
    return wanted(grad, gradients, weight, bias, None, needs)


# In half the time of `_WhitenItems.apply`.
_apply_eager = modes.apply_without_transforms(_WhitenItems)


class RepeatedItems(Repeated):
    """Batches of a layer that are all alike, whose items are whitened each by itself."""

    __slots__ = ()

    def whiten_items(self, x: Tensor, weight, bias, settings: Settings, rows: int) -> Tensor:
        """`whiten_eagerly`, for settings that are the same each time."""
        y = self.without_python(x, weight, bias, settings, None, None, _gradients, rows=rows)
        return whiten_eagerly(x, weight, bias, settings, rows) if y is None else y


def _composed(x: Tensor, weight, bias, settings: Settings, rows: int, solve: Any) -> Tensor:
    """The same in ordinary operators, with the batch as a dimension that another runtime may give any size."""
    with no_autocast(x):
        planes = x.reshape(x.shape[0], rows, -1).to(compute_dtype(x.dtype))
        outputs = []
        for part in groups.parts(rows, settings.group_size):
            # Not a slice, which torch 2.6 cannot export: it compares a dynamic batch with the largest integer.
            blocks = planes.narrow(1, part.start, part.stop - part.start)
            blocks = blocks.reshape(x.shape[0], part.count, part.size, planes.shape[2])
            blocks = blocks - blocks.mean(-1, keepdim=True)
            identity = torch.eye(part.size, dtype=blocks.dtype, device=x.device)
            covariance = blocks @ blocks.mT / blocks.shape[-1] + settings.eps * identity
            y = solve(covariance, settings.solver, settings.num_iters) @ blocks
            outputs.append(y.reshape(x.shape[0], part.stop - part.start, planes.shape[2]))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return scale_and_shift(y.reshape(*x.shape[:2], -1), weight, bias).reshape(x.shape).to(x.dtype)


def _exported(x: Tensor, weight, bias, settings: Settings, rows: int) -> Tensor:
    y = _composed(x, weight, bias, settings, rows, solvers.composed)
    # Not `settings.relu`: the compilers up to torch 2.9 take a property of a named tuple for a value of the graph.
    return _laid_out_as(x, relu(y) if settings.activation == "relu" else y)


def _as_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, rows: int) -> Tensor:
    """By the operation on a batch: its scale and shift serve where a row is one channel."""
    span, outputs = x.shape[1] // rows, []
    for part in groups.parts(rows, settings.group_size):
        length = part.stop - part.start
        block = x.narrow(1, span * part.start, span * length)
        scale, shift = (None if t is None or span > 1 else t[part.channels].repeat(x.shape[0]) for t in (weight, bias))
        after = settings.activation if span == 1 else None
        # Not `_replace`, which the compiler of torch 2.6 does not look into.
        own = Settings(part.size, settings.solver, settings.num_iters, settings.eps, after, settings.impl)
        planes = block.reshape(1, x.shape[0] * length, -1)
        outputs.append(normalize(planes, scale, shift, own, None, True).view(block.shape))
    y = _laid_out_as(x, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))
    if span == 1:
        return y
    if weight is not None or bias is not None:
        ones = (1, -1, *(1,) * (x.ndim - 2))
        scale = torch.ones((), dtype=y.dtype, device=y.device) if weight is None else weight.to(y.dtype).view(ones)
        y = y * scale if bias is None else torch.addcmul(bias.to(y.dtype).view(ones), y, scale)
    return relu(y) if settings.activation == "relu" else y


def _laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    # Inside vmap no tensor says how it is laid out.
    if modes.is_transformed() or not is_channels_last(x) or x.is_contiguous():
        return y
    return y.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
