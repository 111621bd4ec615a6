"""What a step of a layer launches, recorded from `run` for `step.cpp`.

`run.forward_calls` and `run.backward_calls` say which launches a pass has and what each is given. Here they are given a
number for each tensor in place of its address, and what they make of it is where each argument will come from.
"""

import functools
import struct
from collections.abc import Callable
from typing import Any

from torch import Tensor

from iternorm.backends.triton import run, runtime
from iternorm.backends.triton.eager.library import functions
from iternorm.backends.triton.plan import Plan, plan_for

# An address is a tensor's number, from 1 on, and the bytes after its beginning.
_BYTES = 44


_steps: dict[tuple, Any] = {}


def step_for(
    tensors: tuple[Tensor | None, ...], settings: Any, statistics: Any, gradients: Callable[..., tuple]
) -> Any:
    """A step that `whiten` of `step.cpp` can take, or None if it has to be launched from Python.

    Args:
        tensors: x, weight, bias, what is added, running mean and matrix and the counter of batches.
        settings: of the layer, a `Settings`.
        statistics: a `Running`, or None.
        gradients: the backward in Python, for what a step cannot do, such as a graph of the backward. It is given the
            plan and the settings, then what the step has.
    """
    x, weight, bias, residual = tensors[:4]
    asked = (settings.group_size, settings.steps, statistics, settings.exact, settings.relu)
    plan = plan_for(x, weight, bias, *asked, residual=residual is not None)
    momentum = None if statistics is None else statistics.momentum
    key = (plan, settings, momentum)
    if key not in _steps:
        if len(_steps) > 4096:
            _steps.clear()
        _steps[key] = _recorded(plan, tensors, settings.eps, momentum, functools.partial(gradients, plan, settings))
    return _steps[key]


def _recorded(plan: Plan, tensors, eps: float, momentum: float | None, gradients: Callable[..., tuple]) -> Any:
    if plan.copied or plan.layout.samples == 0:
        return None
    x, weight, bias, residual, mean, matrix, counter = tensors
    if not plan.counts:
        counter = None
    meets = plan.iteration is not None
    # What is made in passing: y, the state, the workspace and the meeting place.
    given = (x, None, None, weight, bias, mean, matrix, residual, None, counter, None)
    made = (False, True, True, *(False,) * 5, True, False, meets)
    present = (tensor is not None or also for tensor, also in zip(given, made, strict=True))
    forward = run.forward_calls(plan, _numbered(present), eps, momentum)
    relu, weighted = plan.key.relu, weight is not None
    present = (True, True, relu, True, True, weighted, weighted, True, plan.keeps_gradient, True, meets, False)
    backward = run.backward_calls(plan, _numbered(present), eps, True)
    described = _described(plan, *forward), _described(plan, *backward)
    if None in described:
        return None
    sizes = plan.at.size, plan.work_size("moments"), plan.work_size("cross_moments")
    flags = relu, plan.keeps_gradient, meets
    return functions().prepare(runtime.driver_launcher(), *described, sizes, flags, gradients, given)


def _numbered(present) -> tuple[int, ...]:
    return tuple((number + 1) << _BYTES if there else 0 for number, there in enumerate(present))


def _described(plan: Plan, names: tuple[str, ...], arguments: tuple[tuple, ...]) -> tuple | None:
    """Launches as `prepare` takes them."""
    found = []
    for name, values in zip(names, arguments, strict=True):
        launch = plan.launches[name]
        form = launch.for_driver()
        if form is None:
            return None
        given = (*values, *launch.integers)
        passed = [_argument(kind, value) for kind, value in zip(form.types, given, strict=False) if kind != "constexpr"]
        passed += [(-1, 0)] * form.trailing
        head = (form.function, launch.grid, form.threads, form.shared, form.dependent, form.cooperative)
        found.append((*head, tuple(passed)))
    return tuple(found)


def _argument(kind: str, value: Any) -> tuple[int, int]:
    """The number of the tensor that an argument is in and the bytes before it, or -1 and the bits of its value."""
    if kind.startswith("*"):
        number, offset = value >> _BYTES, value & ((1 << _BYTES) - 1)
        return number - 1, offset
    if kind == "fp32":
        return -1, int.from_bytes(struct.pack("<f", value), "little")
    return -1, value & ((1 << 64) - 1)
