"""The last launches of a pass for groups of up to 64 channels, with Newton's iteration: `device/whiten.py`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from iternorm.backends.triton.device.newton import Newton
from iternorm.backends.triton.device.whiten import weight_gradient, whiten_backward, whiten_forward
from iternorm.backends.triton.launches.iteration import RunningKey
from iternorm.backends.triton.layout import slots_of
from iternorm.backends.triton.precision import is_watched, jitter, newton_raised, newton_range
from iternorm.backends.triton.runtime import Launch

if TYPE_CHECKING:
    from iternorm.backends.triton.plan import Plan


class Whitens:
    """Such launches of a plan."""

    def __init__(self, plan: "Plan"):
        self._plan = plan

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes each launch."""
        return {
            "whiten": self._whiten,
            "whiten_backward": self._whiten_backward,
            "weight_gradient": self._weight_gradient,
        }

    def _whiten(self) -> Launch:
        plan, key, fp32 = self._plan, self._plan.key, torch.float32
        dtype, weight, bias, running = key.dtype, key.weight, key.bias, key.running or RunningKey()
        size = plan.layout.shared or plan.layout.group_size
        constants = {
            "NEWTON": self._newton,
            "AVERAGE": None if key.running is None else running.average(size),
            "WEIGHT": weight is not None,
            "BIAS": bias is not None,
            "AFTER": plan.after,
        }
        pointers = (dtype, dtype, plan.residual, *(fp32,) * 4, plan.kept, weight, bias, running.mean, running.matrix)
        counters = (torch.int64 if running.counted else None,) * 2
        return plan.passes("whiten", whiten_forward, (*pointers, *counters), constants, floats=(0.1, 0.1))

    def _whiten_backward(self) -> Launch:
        plan, fp32 = self._plan, torch.float32
        dtype, weight = plan.key.dtype, plan.key.weight
        activations = (dtype, dtype, dtype if plan.masks else None, dtype)
        pointers = (*activations, *(fp32,) * 4, plan.kept, fp32, weight, None if weight is None else fp32)
        largest = newton_range(plan.key.num_iters) if plan.newton_split.in_half else 1.0
        # Of matrices on their way: as many as leave room for the programs of a multiprocessor.
        stages = 3 if plan.newton_split <= (2 if plan.tiles_of("whiten_backward").per_sm == 1 else 1) else 2
        newton = self._newton._replace(LARGEST=largest, STAGES=stages)
        constants = {"NEWTON": newton, "WEIGHT": weight is not None, "RELU": plan.masks}
        return plan.passes("whiten_backward", whiten_backward, pointers, constants, floats=(0.1,))

    def _weight_gradient(self) -> Launch:
        plan, layout, fp32 = self._plan, self._plan.layout, torch.float32
        constants = {"D": layout.group_size, "BD": layout.padded, "SHARED": layout.shared}
        grid = (layout.num_groups, 1)
        return Launch(weight_gradient, grid, (fp32,) * 3, (), (layout.channels,), (0,), constants, 4, plan.key.device)

    @property
    def _newton(self) -> Newton:
        plan, key = self._plan, self._plan.key
        return Newton(
            T=key.num_iters,
            PARTS=int(plan.newton_split),
            # ZCA's variances are raised, which keeps its eigenvalues positive.
            WATCHED=is_watched(key.num_iters) and not key.exact,
            STRIDE=slots_of(key.num_iters) * plan.layout.padded**2 * max(plan.newton_split, 1),
            JITTER=jitter(key.split) if key.exact else 0.0,
            SHARED=plan.layout.shared,
            RAISED=newton_raised(key.num_iters) if plan.newton_split.in_half else 1.0,
        )
