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
    finite = torch.isfinite(mean).all() & torch.isfinite(matrix).all()
    share: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(finite)
        if momentum is None:
            # The first batches may all have been skipped: no division by a count of zero.
            share = 1.0 / num_batches_tracked.clamp(min=1).to(mean.dtype)
    for running, value in ((running_mean, mean), (running_matrix, matrix)):
        blended = torch.lerp(running.to(value.dtype), value, share)
        running.copy_(torch.where(finite, blended, running.to(value.dtype)))
