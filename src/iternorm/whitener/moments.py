"""Mean and covariance of a stream: one batch at a time, or part by part on several workers."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
        resolution: The rounding of the coarsest dtype that the samples had, `torch.finfo(dtype).eps`.
    """

    num_samples: int
    mean: Tensor
    covariance: Tensor
    resolution: float

    def to(self, device: torch.device | str) -> "Moments":
        return self._replace(mean=self.mean.to(device), covariance=self.covariance.to(device))


class Probe:
    """A number on its way from a GPU, which is finite if a batch and its squares are."""

    def __init__(self, value: Tensor):
        self._value, self._arrived = value, None
        if value.is_cuda:
            # To ask for it later without a wait for what the GPU has been given since.
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._arrived = torch.cuda.current_stream(value.device).record_event()

    def is_finite(self) -> bool:
        """Wait for it, and see."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return math.isfinite(self._value)


def of(samples: Tensor) -> Moments:
    """The moments of ``[m, d]``, computed about a pilot in the dtype of the samples, or fp32 for half precision.

    Raises:
        ValueError: there are NaNs or infinities.
    """
    found, probe = add(None, samples)
    if probe is not None and not probe.is_finite():
        raise not_finite()
    return found


def add(before: Moments | None, samples: Tensor) -> tuple[Moments, Probe | None]:
    """What has been seen before and ``[m, d]`` together; with a probe where the samples are still to be checked."""
    same_device = before is None or before.mean.device == samples.device
    if same_device and dispatch.has_moment_kernels(samples):
        return _in_kernels(before, samples)
    return (_in_torch(samples) if before is None else _pair(before, of(samples))), None


def _in_kernels(before: Moments | None, samples: Tensor) -> tuple[Moments, Probe]:
    from iternorm.backends.triton import stream

    seen, old_mean, old_covariance, old_resolution = (0, None, None, 0.0) if before is None else before
    mean, covariance, probe = stream.join(samples, seen, old_mean, old_covariance)
    resolution = max(old_resolution, torch.finfo(samples.dtype).eps)
    return Moments(seen + len(samples), mean, covariance, resolution), Probe(probe)


def _in_torch(samples: Tensor) -> Moments:
    mean, covariance = operators.call(operators.moments, samples, samples.shape[1], "auto")
    mean, covariance = mean.double(), covariance[0].double()
    # By how much the square of a mean exceeds `_FAR` deviations; NaN if there is one among the samples.
    largest = float(torch.addcmul(_FAR**2 * -covariance.diagonal(), mean, mean).amax())
    if not math.isfinite(largest):
        raise not_finite()
    if samples.dtype != torch.float64 and largest > 0:
        # A mean that fp32 has rounded is off by more of a deviation than the samples' own roundings, which average out.
        total = sum(block.double().sum(0) for block in samples.split(_BLOCK))
        mean = torch.as_tensor(total) / len(samples)
    return Moments(len(samples), mean, covariance, torch.finfo(samples.dtype).eps)


def not_finite(what: str = "Input X", unchanged: str = "before has not changed") -> ValueError:
    """The error for samples that have no moments."""
    return ValueError(
        f"{what} contains NaN or infinity, or values whose squares overflow; drop those samples. "
        f"What was fitted {unchanged}"
    )


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
