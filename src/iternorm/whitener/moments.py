"""Mean and covariance of a stream: one batch at a time, or part by part on several workers."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm.backends.torch.verbs import compute_dtype
from iternorm.whitening import dispatch, operators
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
        resolution: `resolution_of` the coarsest dtype that the samples had.
    """

    num_samples: int
    mean: Tensor
    covariance: Tensor
    resolution: float

    def to(self, device: torch.device | str) -> "Moments":
        return self._replace(mean=self.mean.to(device), covariance=self.covariance.to(device))


def resolution_of(dtype: torch.dtype) -> float:
    """The share of the largest variance that roundings make of samples of a dtype.

    Half precision is summed in fp32; the samples' own roundings are independent, so they count squared.
    """
    own = torch.finfo(dtype).eps
    return own if dtype in (torch.float32, torch.float64) else max(own**2, torch.finfo(torch.float32).eps)


class Stream:
    """What has been seen so far on a GPU, where no call waits for a batch: `iternorm.backends.triton.tools.stream`."""

    def __init__(self, before: Moments | None, first: Tensor):
        from iternorm.backends.triton.tools import stream

        self.size, self._device = first.shape[1], first.device
        num_samples, mean, covariance, self._resolution = before or (0, None, None, 0.0)
        self._batches = stream.Stream(self.size, first.device, num_samples, mean, covariance)

    def takes(self, samples: Tensor) -> bool:
        return samples.device == self._device and dispatch.has_moment_kernels(samples)

    def add(self, samples: Tensor) -> None:
        self._batches.add(samples)
        self._resolution = max(self._resolution, resolution_of(samples.dtype))

    def moments(self) -> tuple[Moments | None, int]:
        """Those of the batches that are finite, and how many samples the others had. No batch may be added after it."""
        num_samples, mean, covariance, left_out = self._batches.moments()
        found = Moments(num_samples, mean, covariance, self._resolution) if num_samples else None
        return found, left_out


def begin(before: Moments | None, samples: Tensor) -> Stream | None:
    """A stream that goes on from what was seen before, for batches like `samples`; None where they have no kernels."""
    same_device = before is None or before.mean.device == samples.device
    return Stream(before, samples) if same_device and dispatch.has_moment_kernels(samples) else None


def of(samples: Tensor) -> Moments:
    """The moments of ``[m, d]``, computed about a pilot in the dtype of the samples, or fp32 for half precision.

    Raises:
        ValueError: there are NaNs or infinities.
    """
    stream = begin(None, samples)
    if stream is None:
        return _in_torch(samples)
    stream.add(samples)
    found, _ = stream.moments()
    if found is None:
        raise not_finite()
    return found


def add(before: Moments | None, samples: Tensor) -> Moments:
    """What has been seen before and ``[m, d]`` together."""
    return of(samples) if before is None else _pair(before, of(samples))


def _in_torch(samples: Tensor) -> Moments:
    mean, covariance = operators.call(operators.moments, samples, samples.shape[1], "auto")
    mean, covariance = mean.double(), covariance[0].double()
    # By how much the square of a mean exceeds `_FAR` deviations; NaN if there is one among the samples.
    excess = torch.addcmul(_FAR**2 * -covariance.diagonal(), mean, mean)
    smallest, largest = torch.stack(excess.aminmax()).tolist()
    # A variance that has overflowed makes the smallest infinite.
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise not_finite()
    if largest > 0:
        # All the variance that a constant has is what its mean was rounded by (measured: at most 3 of these roundings).
        rounding = 16 * torch.finfo(compute_dtype(samples.dtype)).eps * mean
        small = (covariance.diagonal() <= rounding.square()).nonzero().flatten()
        constant = small[samples[:, small].amin(0) == samples[:, small].amax(0)]
        covariance[constant] = covariance[:, constant] = 0
        if samples.dtype != torch.float64:
            # A mean that fp32 has rounded is off by more of a deviation than the samples' own roundings, which average
            # out.
            total: Any = sum(block.double().sum(0) for block in samples.split(_BLOCK))
            mean = total / len(samples)
    return Moments(len(samples), mean, covariance, resolution_of(samples.dtype))


def not_finite(left_out: int = 0) -> ValueError:
    """The error for samples that have no moments; with a number, for batches of that many that were left out."""
    what, so = "Input X", "What was fitted before has not changed"
    if left_out:
        what, so = "A batch that partial_fit was given", f"What is fitted is without such batches ({left_out} samples)"
    return ValueError(f"{what} contains NaN or infinity, or values whose squares overflow; drop those samples. {so}")


def _pair(first: Moments, second: Moments) -> Moments:
    """`merge` of two parts in four operations, for a stream of many batches: no sums about zero either."""
    second = second.to(first.mean.device)
    num_samples = first.num_samples + second.num_samples
    share = second.num_samples / num_samples
    delta = second.mean - first.mean
    covariance = torch.lerp(first.covariance, second.covariance, share)
    return Moments(
        num_samples,
        torch.add(first.mean, delta, alpha=share),
        torch.addr(covariance, delta, delta, alpha=share * (1 - share)),
        max(first.resolution, second.resolution),
    )


def merge(parts: list[Moments]) -> Moments:
    """The moments of all parts together, on the device of the first (Chan et al.: no sums about zero)."""
    device = parts[0].mean.device
    counts = torch.tensor([part.num_samples for part in parts], dtype=torch.float64, device=device)
    means = torch.stack([part.mean.to(device) for part in parts])
    covariances = torch.stack([part.covariance.to(device)[None] for part in parts])
    _, mean, covariance = merge_moments(counts, means, covariances)
    resolution = max(part.resolution for part in parts)
    return Moments(sum(part.num_samples for part in parts), mean, covariance[0], resolution)
