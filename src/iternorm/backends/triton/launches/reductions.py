"""The launches that join the partial moments of all programs: `device/reduce.py` has the kernel."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from iternorm.backends.triton.device.reduce import reduce_moments
from iternorm.backends.triton.device.wide.moments import wide_reduce
from iternorm.backends.triton.runtime import Launch

if TYPE_CHECKING:
    from iternorm.backends.triton.plan import Plan

# The least programs for each multiprocessor that a reduction keeps where it has several rows to a program. They are
# tiny: 8192 of one or two partials each took 6 us (H200).
_REDUCERS = 8
# The most rows to a program: the kernel repeats its code for each.
_MOST_ROWS = 8


class Reductions:
    """Such launches of a plan."""

    def __init__(self, plan: "Plan"):
        self._plan = plan

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes each launch."""
        return {"reduce": self._reduce, "cross_reduce": self._cross_reduce}

    def _cross_reduce(self) -> Launch:
        return self._reduce(backward=True)

    def _reduce(self, backward: bool = False) -> Launch:
        plan, layout = self._plan, self._plan.layout
        name = "cross_moments" if backward else "moments"
        count = plan.num_programs(name)
        fp32 = torch.float32
        # Of several ranks the moments are sent, and `merge` counts.
        sent = plan.key.ranks > 0
        counted = not backward and not sent and plan.counts
        weighted = backward and sent and not layout.wide and plan.key.weight is not None
        common = {"D": layout.group_size, "BD": layout.padded, "SELF": not backward, "COUNT": counted}
        common |= {"SENT": sent, "WEIGHT": weighted}
        pointers = (
            fp32,
            fp32,
            None if sent and not backward else fp32,
            None if sent or backward else fp32,
            *(torch.int64 if counted else None,) * 2,
            *(fp32 if weighted else None,) * 2,
        )
        integers = (layout.samples, layout.channels, count, plan.unit_of(name))
        if plan.layout.wide:
            grid = ((layout.padded // 32) ** 2, layout.num_groups)
            words = {**common, "BC": plan.tiles_of(name).block, "SIDE": 32, "PB": min(8, 1 << (count - 1).bit_length())}
            return Launch(wide_reduce, grid, pointers, (), integers, (1,), words, 4, plan.key.device)
        # All partials of a row at once where they are few enough: a loop waits for the memory at every turn.
        side, span = plan.partials
        block = max(2, min(256, 1 << (count * span - 1).bit_length()))
        each = self._rows_each
        grid = (layout.num_groups, layout.padded // each)
        words = {**common, "BC": side, "SPAN": span, "PB": block, "EACH": each}
        # Few warps, which have to wait for each other: a backward took 36.7 us with four, and 38.0 with eight
        # (64x64x32x32, fp32, H200). But a thread has at most 64 values of a tile. With 128, registers spill, and a step
        # took 435 us in place of 236 (64x128x32x32, groups of 128, fp32).
        warps = max(1, min(4, block // 16), block * max(layout.padded, 64) // (64 * 32))
        return Launch(reduce_moments, grid, pointers, (), integers, (1,), words, warps, plan.key.device)

    @property
    def _rows_each(self) -> int:
        """How many rows of a group's matrix a program of the reduction takes: one unless there are many groups."""
        plan = self._plan
        wanted = plan.layout.num_groups * plan.layout.padded // (_REDUCERS * plan.num_sms)
        # A power of two, as the rows of a group are.
        return min(_MOST_ROWS, 1 << max(wanted, 1).bit_length() - 1)
