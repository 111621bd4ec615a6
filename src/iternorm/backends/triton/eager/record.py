"""What the passes of a layer launch, recorded for `step.cpp`.

`run.forward_calls`, `run.backward_calls` and those of `synchronized` say which launches a pass has and what each is
given. Here they are given a number for each tensor in place of its address, and what they make of it is where each
argument will come from.
"""

import enum
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm.backends.triton import items, run, runtime, synchronized
from iternorm.backends.triton.eager.library import functions
from iternorm.backends.triton.layout import split_of
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.precision import tf32_allowed

# An address is a tensor's number, from 1 on, and the bytes after its beginning.
_BYTES = 44


class Origin(enum.IntEnum):
    """How a tensor of a pass comes about."""

    ABSENT = 0
    GIVEN = 1
    LIKE_INPUT = 2
    FLOATS = 3
    ZEROS = 4
    COUNTERS = 5


class Part(NamedTuple):
    """A tensor of a pass."""

    origin: Origin
    numel: int = 0
    example: Tensor | None = None  # of one that is given
    is_activation: bool = False  # lies in memory as the input does, or is copied


_ABSENT = Part(Origin.ABSENT)
_LIKE_INPUT = Part(Origin.LIKE_INPUT)
_passes: dict[tuple, Any] = {}


def step_for(
    tensors: tuple[Any, ...],
    settings: Any,
    statistics: Any,
    gradients: Callable[..., tuple],
    collectives: Callable[[Any, Tensor], tuple[tuple, tuple]] | None = None,
    rows: int | None = None,
) -> Any:
    """A training step that `whiten` of `step.cpp` can take, or None if it has to be launched from Python.

    Args:
        tensors: x, weight, bias, what is added, running mean and matrix and the counter of batches.
        settings: of the layer, a `Settings`.
        statistics: a `Running`, or None.
        gradients: the backward in Python, for what a step cannot do, such as a graph of the backward. It is given the
            plan and the settings, then what the step has.
        collectives: for a process group and x, what fills its first argument from all ranks' second, and what sums
            its argument over the ranks; each after the name of the group where C++ may ask that itself, or None.
        rows: of the matrix of each item, where items are whitened each by itself.
    """
    x, weight, bias, residual = tensors[:4]
    group = settings.process_group
    asked = (settings.group_size, settings.steps, statistics, settings.exact, settings.relu)
    if rows is None:
        plan = plan_for(
            x, weight, bias, *asked, residual=residual is not None, ranks=0 if group is None else group.size
        )  # fmt: skip
    else:
        options = (settings.group_size, settings.steps, settings.exact, settings.relu)
        plan = items.plan_for(x, weight, bias, rows, *options)
    momentum = None if statistics is None else statistics.momentum

    def make() -> Any:
        gather, reduce = (None, None) if collectives is None else collectives(group, x)
        forward = _forward_pass(plan, tensors, settings.eps, momentum, False, gather)
        backward = _backward_pass(plan, (x, weight, True, settings.relu, None), settings.eps, reduce)
        if forward is None or backward is None:
            return None
        return functions().make_step(forward, backward, settings.relu, functools.partial(gradients, plan, settings))

    return _kept((plan, settings, momentum), make)


def forward_pass_for(tensors: tuple[Any, ...], running: Any, options: tuple) -> Any:
    """A pass for the operator `fused_forward`, or None; `options` are its last five arguments."""
    x, weight, bias, residual = tensors[:4]
    group_size, num_iters, eps, exact, relu = options
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu, residual=residual is not None)
    momentum = None if running is None else running.momentum
    return _kept((plan, eps, momentum), lambda: _forward_pass(plan, tensors, eps, momentum, True, None))


def backward_pass_for(x: Tensor, weight, state: Tensor, more, relu: bool, residual: bool, options: tuple) -> Any:
    """A pass for the operator `fused_backward`, or None."""
    group_size, num_iters, eps, exact, needs_input = options
    split = split_of(state, x, group_size, num_iters, exact)
    summed = more is not None
    plan = plan_for(x, weight, None, group_size, num_iters, None, exact, relu, split, residual, summed)
    return _kept(
        (plan, eps, needs_input), lambda: _backward_pass(plan, (x, weight, needs_input, relu, more), eps, None)
    )


def _kept(key: tuple, make: Callable[[], Any]) -> Any:
    if key not in _passes:
        if len(_passes) > 4096:
            _passes.clear()
        _passes[key] = make()
    return _passes[key]


def _forward_pass(plan: Plan, tensors, eps: float, momentum: float | None, zeroed: bool, gather) -> Any:
    x, weight, bias, residual, mean, matrix, counter = tensors
    if not _is_recorded(plan, x):
        return None
    # An operator's outputs must not be arbitrary: gaps in the state are cleared.
    clear = zeroed and not (plan.at.even and plan.counts)
    state = Part(Origin.ZEROS if clear else Origin.FLOATS, plan.at.size)
    learned = [_given(tensor) for tensor in (weight, bias, mean, matrix)]
    work = _floats(plan.work_size("moments"))
    parts = [_given(x), _LIKE_INPUT, state, *learned, _given(residual, True), work, _given(counter), _meeting(plan)]
    if plan.exchange is None:
        parts += [_ABSENT, _ABSENT]
        calls = _chains(plan).forward_calls(plan, _numbered(parts)[:-2], eps, momentum)
        return _pass(plan, parts, calls, x)
    length = 1 + plan.exchange.sums
    parts += [_floats(length), _floats(plan.key.ranks * length)]
    given = _numbered(parts)
    before = synchronized.moment_calls(given[0], given[8], given[11])
    after = synchronized.forward_calls(plan, given, eps, momentum)
    return _pass(plan, parts, _joined(before, after), x, (len(before[0]), 12, 11, *gather))


def _backward_pass(plan: Plan, asked: tuple, eps: float, reduce) -> Any:
    x, weight, needs_input, relu, more = asked
    if not _is_recorded(plan, x):
        return None
    channels = _floats(x.shape[1])
    parts = [
        _given(x),
        _given(x, True),
        _given(x, True) if relu else _ABSENT,
        Part(Origin.GIVEN, example=x.new_empty(plan.at.size, dtype=torch.float32)),
        _LIKE_INPUT if needs_input else _ABSENT,
        _given(weight),
        _ABSENT if weight is None else channels,
        channels,
        _LIKE_INPUT if plan.keeps_gradient else _ABSENT,
        _floats(plan.work_size("cross_moments")),
        _meeting(plan),
        _given(more, True),
    ]
    if plan.exchange is None:
        parts.append(_ABSENT)
        return _pass(plan, parts, _chains(plan).backward_calls(plan, _numbered(parts)[:-1], eps, needs_input))
    parts.append(_floats(plan.exchange.sums))
    before = synchronized.cross_calls(plan, _numbered(parts))
    after = synchronized.backward_calls(plan, _numbered(parts), eps)
    return _pass(plan, parts, _joined(before, after), None, (len(before[0]), 12, -1, *reduce))


def _chains(plan: Plan) -> Any:
    """What says which launches the passes of a plan have."""
    return items if isinstance(plan, items.ItemPlan) else run


def _is_recorded(plan: Plan, x: Tensor) -> bool:
    """Not without samples, nor where the result has other strides than the input."""
    return plan.layout.samples > 0 and (x.is_contiguous() or not plan.copied)


def _given(tensor: Tensor | None, is_activation: bool = False) -> Part:
    return _ABSENT if tensor is None else Part(Origin.GIVEN, 0, tensor, is_activation)


def _floats(count: int) -> Part:
    return Part(Origin.FLOATS, count)


def _meeting(plan: Plan) -> Part:
    return _ABSENT if plan.iteration is None else Part(Origin.COUNTERS, 4)


def _joined(before: tuple[tuple, tuple], after: tuple[tuple, tuple]) -> tuple[tuple, tuple]:
    return (*before[0], *after[0]), (*before[1], *after[1])


def _numbered(parts) -> tuple[int, ...]:
    """An address that tells which tensor it belongs to; 0 for one that is absent."""
    return tuple((n + 1) << _BYTES if part.origin != Origin.ABSENT else 0 for n, part in enumerate(parts))


def _pass(plan: Plan, parts, calls: tuple[tuple, tuple], precise: Tensor | None = None, exchange=None) -> Any:
    """A pass as `step.cpp` has it; `precise` is an input for which it matters whether TF32 is allowed."""
    launches = []
    for name, values in zip(*calls, strict=True):
        launch = plan.launches[name]
        form = launch.for_driver()
        if form is None:
            return None
        given = (*values, *launch.integers)
        passed = [_argument(kind, value) for kind, value in zip(form.types, given, strict=False) if kind != "constexpr"]
        passed += [(-1, 0)] * form.trailing
        head = (form.function, launch.grid, form.threads, form.shared, form.dependent, form.cooperative)
        launches.append((*head, tuple(passed)))
    tf32 = tf32_allowed() if precise is not None and precise.dtype == torch.float32 else None
    read_strides = plan.stride if plan.copied else ()
    return functions().make_pass(runtime.driver_launcher(), tuple(launches), tuple(parts), tf32, exchange, read_strides)


def _argument(kind: str, value: Any) -> tuple[int, int]:
    """The number of the tensor that an argument is in and the bytes before it, or -1 and the bits of its value."""
    if kind.startswith("*"):
        return (value >> _BYTES) - 1, value & ((1 << _BYTES) - 1)
    if kind == "fp32":
        return -1, int.from_bytes(struct.pack("<f", value), "little")
    return -1, value & ((1 << 64) - 1)
