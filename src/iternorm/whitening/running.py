"""Running statistics: the average over batches that eval uses."""

import torch
from torch import Tensor

from iternorm.whitening import modes
from iternorm.whitening.settings import Running


def update(statistics: Running, mean: Tensor, covariance: Tensor, whitening: Tensor) -> None:
    """Blend what a batch has, whichever of the two matrices is kept."""
    value = covariance if statistics.is_covariance else whitening
    # A function transform hands out wrapped values, which must not reach the buffers. A trace has none, and cannot save
    # a Python function.
    wrapped = modes.is_transformed() and not modes.is_traced()
    apply = _Update.apply if wrapped else blend
    apply(statistics.mean, statistics.matrix, statistics.num_batches, mean, value, statistics.momentum)


@torch.no_grad()
def blend(
    running_mean: Tensor,
    running_matrix: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    matrix: Tensor,
    momentum: float | None,
) -> None:
    """Blend the batch's statistics in, unless one of them is not finite: decided on the device.

    Args:
        running_mean: ``[..., C]``; all tensors may have the same leading dimensions, one layer each.
        running_matrix: ``[..., G, d, d]``.
        num_batches_tracked: ``[...]``, or None.
        mean: of the batch.
        matrix: of the batch.
        momentum: the share of the batch; None is the cumulative average.
    """
    # A NaN or an infinity anywhere makes the sum one.
    finite = torch.isfinite(mean.sum(-1) + matrix.sum((-3, -2, -1)))
    share: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(finite)
        if momentum is None:
            # The first batches may all have been skipped: no division by a count of zero.
            share = 1.0 / num_batches_tracked.clamp(min=1).to(mean.dtype)
    for running, value in ((running_mean, mean), (running_matrix, matrix)):
        ones = (1,) * (running.ndim - finite.ndim)
        weight = share.view(*share.shape, *ones) if isinstance(share, Tensor) else share
        current = running.to(value.dtype)
        kept = torch.where(finite.view(*finite.shape, *ones), value, current)
        if current is running:
            running.lerp_(kept, weight)
        else:
            running.copy_(torch.lerp(current, kept, weight))


class _Update(torch.autograd.Function):
    """`blend` inside a function transform: no derivative, and a forward that is given the tensors themselves."""

    @staticmethod
    def forward(*args):
        blend(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *args):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, momentum = args
        if any(t is not None and dim is None for t, dim in zip(tensors[:3], in_dims, strict=False)):
            raise RuntimeError(
                "vmap runs the layer on several batches at once, which cannot all update one set of running "
                "statistics; map over the buffers too (torch.func.stack_module_state), or use track_running_stats=False"
            )
        layers = (t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims, strict=False))
        _Update.apply(*layers, momentum)
        return None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return None
