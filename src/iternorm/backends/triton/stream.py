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
        apart = 512 * self._tiles("moments").warps // (self.layout.padded * self.key.dtype.itemsize)
        pointers, constants = (self.key.dtype, torch.float32), {"APART": min(16, apart)}
        return self._passes("moments", stream_moments, pointers, constants)

    @functools.cached_property
    def first_join(self) -> Launch:
        """The second launch where nothing was seen before."""
        return self._join(None)

    @functools.cached_property
    def next_join(self) -> Launch:
        """The second launch after other batches."""
        return self._join(torch.float64)

    def _join(self, before: torch.dtype | None) -> Launch:
        layout = self.layout
        size, padded = layout.group_size, layout.padded
        # Few columns to a program, so that all multiprocessors have some.
        width = min(16, padded)
        partials = max(64, padded // width)
        constants = {"D": size, "BD": padded, "CB": width, "PB": partials, "FIRST": before is None}
        pointers = (torch.float32, before, before, torch.float64)
        integers = (layout.samples, self.num_programs("moments"), self._unit_of("moments"))
        # One more row is the probe's. An example of 64 bits for what was seen.
        grid = (size + 1, padded // width)
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
        made = Key(
            *key,
            group_size=x.shape[1],
            num_iters=0,
            split=split,
            exact=False,
            relu=False,
            residual=False,
            summed=False,
            weight=None,
            bias=None,
            running=None,
            ranks=0,
        )
        plan = _plans[key] = StreamPlan(made, x)
    return plan


def join(x: Tensor, seen: int, mean: Tensor | None, covariance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The moments of `seen` samples and of a batch ``[m, d]`` together, which is read once.

    Args:
        x: the batch, at most 128 features.
        seen: how many samples came before; 0 for none.
        mean: theirs, ``[d]`` in fp64, or None.
        covariance: theirs, biased, ``[d, d]`` in fp64, or None.

    Returns:
        Mean and covariance, fp64, and a number that is finite if the batch and its squares are.
    """
    size = x.shape[1]
    plan = _plan_for(x)
    if plan.copied:
        x = placed(x, size)
    partials = plan.workspace(x, "moments")
    with on_device(x.device):
        stream, (source, sums) = given_to(x.device, x, partials)
        # As early as can be: the GPU reads the batch while Python prepares what comes next.
        plan.run(stream, ("moments",), ((source, sums),))
        squares = size * size
        # The mean begins at 16 bytes, as launches by address expect.
        at = squares + squares % 2
        joined = x.new_empty(at + size + 1, dtype=torch.float64)
        stream, given = given_to(x.device, partials, mean, covariance, joined)
        last = plan.first_join if mean is None else plan.next_join
        last(stream, (*given, seen))
    return joined[at : at + size], joined[:squares].view(size, size), joined[-1]
