"""Mean and covariance of a stream: one batch at a time, or part by part on several workers."""

from typing import NamedTuple

import torch
from torch import Tensor

from iternorm.whitening import operators
from iternorm.whitening.processes.collective import merge_moments

# How many deviations from zero a mean is when it is summed once more, in fp64, and how many samples at a time.
_FAR = 32
_BLOCK = 1 << 16


class Moments(NamedTuple):
    """What has been seen so far.

    Attributes:
        num_samples: How many samples.
        mean: ``[d]``, fp64.
        covariance: ``[d, d]``, fp64, biased.
        resolution: The rounding of the coarsest dtype that the samples had, `torch.finfo(dtype).eps`.
    """

    num_samples: int
    mean: Tensor
    covariance: Tensor
    resolution: float

    def to(self, device: torch.device | str) -> "Moments":
        return self._replace(mean=self.mean.to(device), covariance=self.covariance.to(device))


def of(samples: Tensor) -> Moments:
    """The moments of ``[m, d]``, computed about a pilot in the dtype of the samples, or fp32 for half precision."""
    mean, covariance = (t.double() for t in operators.call(operators.moments, samples, samples.shape[1], "auto"))
    if samples.dtype != torch.float64 and bool((mean.square() > _FAR**2 * covariance[0].diagonal()).any()):
        # A mean that fp32 has rounded is off by more of a deviation than the samples' own roundings, which average out.
        mean = sum(block.double().sum(0) for block in samples.split(_BLOCK)) / len(samples)
    return Moments(len(samples), torch.as_tensor(mean), covariance[0], torch.finfo(samples.dtype).eps)


def merge(parts: list[Moments]) -> Moments:
    """The moments of all parts together, on the device of the first (Chan et al.: no sums about zero)."""
    device = parts[0].mean.device
    counts = torch.tensor([part.num_samples for part in parts], dtype=torch.float64, device=device)
    means = torch.stack([part.mean.to(device) for part in parts])
    covariances = torch.stack([part.covariance.to(device)[None] for part in parts])
    _, mean, covariance = merge_moments(counts, means, covariances)
    resolution = max(part.resolution for part in parts)
    return Moments(sum(part.num_samples for part in parts), mean, covariance[0], resolution)
