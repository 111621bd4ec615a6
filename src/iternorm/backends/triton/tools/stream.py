"""Moments of a stream of batches: two launches for each, and what was seen before joins in the second."""

import functools

import torch
from torch import Tensor

from iternorm.backends.triton.device.tools.stream import join_stream, stream_moments
from iternorm.backends.triton.layout import placed
from iternorm.backends.triton.plan import Key, Plan
from iternorm.backends.triton.precision import Split, split_for
from iternorm.backends.triton.runtime import Launch, given_to, on_device


class StreamPlan(Plan):
    """The launches for batches of one shape."""

    def _moments(self, backward: bool = False) -> Launch:
        # Samples that the threads of a program have side by side, 16 bytes each.
        apart = 512 * self.tiles_of("moments").warps // (self.layout.padded * self.key.dtype.itemsize)
        pointers, constants = (self.key.dtype, torch.float32), {"APART": min(16, apart)}
        return self.passes("moments", stream_moments, pointers, constants)

    @functools.cached_property
    def join(self) -> Launch:
        """The second launch."""
        layout = self.layout
        size, padded = layout.group_size, layout.padded
        # Few entries to a program, so that all multiprocessors have some.
        rows, columns = 2, min(32, padded)
        constants = {"D": size, "BD": padded, "RB": rows, "CB": columns, "PB": 16}
        pointers = (torch.float32, torch.float64, torch.float64)
        integers = (layout.samples, self.num_programs("moments"), self.unit_of("moments"))
        # An example of 64 bits for what was seen.
        grid = (-(-size // rows), padded // columns)
        return Launch(join_stream, grid, pointers, (2**31,), integers, (), constants, 4, self.key.device)


_plans: dict[tuple, StreamPlan] = {}


def _plan_for(x: Tensor) -> StreamPlan:
    key = (x.shape, x.stride(), x.dtype, x.device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        # Whatever the user allows. In simulation a covariance of fp32 is off by 1.5e-7, and by 3.5e-6 where all values
        # are multiples of 1 / 255, so that roundings do not average out. Three parts would take twice as long.
        split = split_for(x.dtype) and Split.STREAMED
        made = Key(*key, group_size=x.shape[1], num_iters=0, split=split)
        plan = _plans[key] = StreamPlan(made, x)
    return plan


class Stream:
    """The moments of batches ``[m, d]`` on one GPU, at most 128 features; each is read once.

    A batch that is not finite, or has a square that is not, is left out.

    Attributes:
        joined: covariance, mean and how many samples were left out, in fp64; the next batch does not write here.

    Args:
        size: d.
        device: of the batches.
        num_samples: how many samples came before.
        mean: theirs, ``[d]``, or None if there are none.
        covariance: theirs, biased, ``[d, d]``, or None.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        num_samples: int = 0,
        mean: Tensor | None = None,
        covariance: Tensor | None = None,
    ):
        self._size = size
        squares = size * size
        # The mean begins at 16 bytes, as launches by address expect. The last number is how many were left out.
        self._mean_at = squares + squares % 2
        self.joined, self._next = (
            torch.zeros(self._mean_at + size + 1, dtype=torch.float64, device=device) for _ in range(2)
        )
        self._given = num_samples
        if mean is not None and covariance is not None:
            self.joined[self._mean_at : -1] = mean
            self.joined[:squares] = covariance.flatten()

    def add(self, x: Tensor) -> None:
        """Take in a batch, without waiting for it."""
        plan = _plan_for(x)
        if plan.copied:
            x = placed(x, self._size)
        partials = plan.workspace(x, "moments")
        with on_device(x.device):
            stream, (source, sums, before, after) = given_to(x.device, x, partials, self.joined, self._next)
            plan.run(stream, ("moments",), ((source, sums),))
            plan.join(stream, (sums, before, after, self._given))
        self.joined, self._next = self._next, self.joined
        self._given += x.shape[0]

    def moments(self) -> tuple[int, Tensor, Tensor, int]:
        """How many samples were taken in, their mean and covariance in fp64, and how many samples were left out.

        Waits for the GPU. Another batch would overwrite the tensors.
        """
        left_out = int(self.joined[-1])
        squares = self._size * self._size
        covariance = self.joined[:squares].view(self._size, self._size)
        return self._given - left_out, self.joined[self._mean_at : -1], covariance, left_out
