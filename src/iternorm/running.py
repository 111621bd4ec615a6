"""Running statistics: the average over batches that eval uses."""

import torch
from torch import Tensor


@torch.no_grad()
def update(
    running_mean: Tensor,
    running_matrix: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    matrix: Tensor,
    momentum: float | None,
) -> None:
    """Blend the batch's statistics in, unless one of them is not finite: decided on the device."""
    # A NaN or an infinity anywhere makes the sum one.
    finite = torch.isfinite(mean.sum() + matrix.sum())
    share: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(finite)
        if momentum is None:
            # The first batches may all have been skipped: no division by a count of zero.
            share = 1.0 / num_batches_tracked.clamp(min=1).to(mean.dtype)
    for running, value in ((running_mean, mean), (running_matrix, matrix)):
        if running.dtype == value.dtype:
            running.lerp_(torch.where(finite, value, running), share)
        else:
            current = running.to(value.dtype)
            running.copy_(torch.lerp(current, torch.where(finite, value, current), share))
