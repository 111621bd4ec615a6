"""Moments of a stream of batches: two launches for each, and what was seen before joins in the second."""

import functools
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.triton.device.running import join_stream
from iternorm.backends.triton.layout import placed
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.precision import Split, split_for
from iternorm.backends.triton.runtime import Launch, given_to, on_device


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
    # Whatever the user allows. In simulation a covariance of fp32 is off by 1.5e-7, and by 3.5e-6 where all values are
    # multiples of 1 / 255, so that roundings do not average out. Three parts would take twice as long.
    plan = plan_for(x, None, None, size, 0, None, split=split_for(x.dtype) and Split.STREAMED)
    if plan.copied:
        x = placed(x, size)
    partials = plan.workspace(x, "moments")
    with on_device(x.device):
        stream, (source, sums) = given_to(x.device, x, partials)
        absent: Any = None if stream is None else 0
        # As early as can be: the GPU reads the batch while Python prepares what comes next.
        plan.run(stream, ("moments",), ((source, source, absent, absent, absent, absent, sums),))
        squares = size * size
        # The mean begins at 16 bytes, as launches by address expect.
        at = squares + squares % 2
        joined = x.new_empty(at + size + 1, dtype=torch.float64)
        stream, given = given_to(x.device, partials, mean, covariance, joined)
        _joining(plan, mean is None)(stream, (*given, seen))
    return joined[at : at + size], joined[:squares].view(size, size), joined[-1]


@functools.lru_cache(256)
def _joining(plan: Plan, first: bool) -> Launch:
    layout = plan.layout
    programs, tiles = plan.share_of("moments")
    each = tiles * plan.launches["moments"].constants["TILE"].BL
    size = layout.group_size
    before = None if first else torch.float64
    pointers = (torch.float32, before, before, torch.float64)
    # As many partials at a time as registers hold in fp64: the loop over them waits for the memory at every turn.
    block = max(2, min(64, 4096 // layout.padded, 1 << (programs - 1).bit_length()))
    constants = {"D": size, "BD": layout.padded, "PB": block, "FIRST": first}
    warps = max(1, block * layout.padded // 512)
    integers = (layout.samples, programs, each)
    # An example of 64 bits for what was seen.
    return Launch(join_stream, (size, 1), pointers, (2**31,), integers, (), constants, warps, plan.key.device)
