"""The launches of an inverse root in order: for p = 2 three products a step, each of half of its tiles.

Products are of two float16 parts whatever precision the user allows. Two TF32 parts have as many bits, and take twice
as long (docs/decisions/root-kernels.md).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import OutOfResources

from iternorm.backends.triton.device.tools.roots import Halves, begin, bound, finish, multiply
from iternorm.backends.triton.runtime import Launch, Launches, given_to, on_device

# From here on there are enough tiles of 128x128 to fill a GPU, which need half the memory traffic of 64x64.
_LARGE = 512
_LARGEST_HALF = 2.0**15
# Depth of a block and stages of the loop over them, for GPUs with less and less shared memory.
_DEPTHS = ((64, 3), (64, 2), (32, 2), (32, 1))

Steps = tuple[tuple[float, float], ...]
Call = tuple[str, tuple]


def inverse_root(batch: Tensor, steps: Steps, p: int, damping: float) -> Tensor:
    """A^(-1/p) of the symmetric parts of ``[B, d, d]``, each at its own scale (docs/math.md, section 8)."""
    batch = batch.contiguous()
    result = torch.empty_like(batch)
    if batch.numel() == 0:
        return result
    _chain_for(*batch.shape[:2], steps, p, damping, batch.device).run(batch, result)
    return result


def _size(bound_: float) -> float:
    """The power of two that a matrix without entries above a bound is multiplied by, with a factor of two to spare."""
    return 2.0 ** math.floor(math.log2(_LARGEST_HALF / bound_))


class _Chain:
    """The launches for matrices of one size and one schedule of steps."""

    def __init__(self, count: int, size: int, steps: Steps, p: int, damping: float, device: torch.device):
        side = 128 if size >= _LARGE else 64
        across = -(-size // side)
        rows = 16
        self._matrices = Halves(
            D=size,
            N=across * side,
            SIDE=side,
            DEPTH=_DEPTHS[0][0],
            STAGES=_DEPTHS[0][1],
            TILES=across * (across + 1) // 2,
            ROWS=rows,
            BOUNDS=-(-size // rows),
        )
        self._count, self._steps, self._p, self._damping, self._device = count, steps, p, damping, device
        self._warps = 8 if side == 128 else 4
        self._launches = Launches(self._makers())
        largest = max(a for a, _ in steps)
        half = largest ** max(p // 2, 1)
        root = math.prod(a for a, _ in steps)
        # Eigenvalues of M are at most (1 + e)^p in steps whose error is e < 1.
        bounds = {"M": 2.0**p, "h": largest, "half": half, "between": 2.0**p * half, "X": root, "power": root**p}
        self._sizes = {name: _size(value) for name, value in bounds.items()}

    def run(self, batch: Tensor, result: Tensor) -> None:
        count, matrices = self._count, self._matrices
        scale = batch.new_empty(count)
        bounds = batch.new_empty(3 * count * matrices.BOUNDS)
        # Two parts, each with its diagonal.
        values = 2 * count * (matrices.N + 1) * matrices.N
        kept = [batch.new_empty(values, dtype=torch.float16) for _ in range(7)]
        stream, given = given_to(self._device, batch, bounds, scale, result, *kept)
        if stream is None:
            given = [tensor.flatten() for tensor in given]
        source, partials, factor, target, *places = given
        calls, last = self._calls(source, partials, factor, places)
        with on_device(self._device):
            self._run(stream, calls)
            # By torch, whose power is accurate to rounding.
            scale.pow_(-1 / self._p)
            self._run(stream, [("finish", (*last[:2], factor, target, *last[2:]))])

    def _run(self, stream: int | None, calls: list[Call]) -> None:
        self._launches.run(stream, tuple(name for name, _ in calls), tuple(values for _, values in calls))

    def _calls(self, source, partials, scale, places) -> tuple[list[Call], tuple]:
        """All launches except the last, and the arguments of the last except its target."""
        current, following, between, half, other, first, second = places
        sizes, p, steps = self._sizes, self._p, self._steps
        smallest = torch.finfo(torch.float32).tiny ** 0.5
        root, root_name = first, "h"
        a, b = steps[0]
        # The pointers of a launch come first, then its numbers.
        start = (source, partials, scale, current, root, smallest, self._damping, sizes["M"])
        line = b * sizes["h"] / sizes["M"], a * sizes["h"]
        calls: list[Call] = [("bound", (source, partials, smallest)), ("begin", (*start, *line))]

        def multiply(left, a_name: str, right, b_name: str, out, name: str, terms=(1.0, 0.0, 0.0)) -> None:
            """The terms are the factors of the product, of its left operand, and of I."""
            product, single, identity = terms
            alpha = product * sizes[name] / (sizes[a_name] * sizes[b_name])
            numbers = alpha, single * sizes[name] / sizes[a_name], identity * sizes[name]
            calls.append(("multiply", (left, right, out, *numbers)))

        for k, (a, b) in enumerate(steps):
            # A product with h = a I + b M is one with M.
            by_h = b, a, 0.0
            if k > 0:
                target = second if root is first else first
                multiply(root, root_name, current, "M", target, "X", by_h)
                root, root_name = target, "X"
            if k == len(steps) - 1:
                break
            # M h^p as (M g) g with g = h^(p/2), which rounds less than M (g g), and once more h where p is odd.
            power, power_name, by_power = current, "M", by_h
            for bit in bin(p // 2)[3:]:
                target = other if power is half else half
                squared = (b * b, 2 * a * b, a * a) if power is current else (1.0, 0.0, 0.0)
                multiply(power, power_name, power, power_name, target, "half", squared)
                power, power_name, by_power = target, "half", (1.0, 0.0, 0.0)
                if bit == "1":
                    target = other if power is half else half
                    multiply(power, power_name, current, "M", target, "half", by_h)
                    power = target
            multiply(current, "M", power, power_name, between, "between", by_power)
            if p % 2:
                target = other if power is half else half
                multiply(between, "between", power, power_name, target, "M", by_power)
                multiply(target, "M", current, "M", following, "M", by_h)
            else:
                multiply(between, "between", power, power_name, following, "M", by_power)
            current, following = following, current
        power, power_name = root, root_name
        for bit in bin(p)[3:]:
            target = half if power is not half else other
            multiply(power, power_name, power, power_name, target, "power")
            power, power_name = target, "power"
            if bit == "1":
                target = half if power is not half else other
                multiply(power, power_name, root, root_name, target, "power")
                power = target
        # X + (damping / p) X X^p takes the damping back.
        alpha = self._damping / (p * sizes[root_name] * sizes[power_name])
        return calls, (root, power, alpha, 1 / sizes[root_name])

    def _makers(self) -> dict[str, Callable[[], Launch]]:
        single, half = torch.float32, torch.float16
        tiles = self._matrices.TILES
        padded = int(triton.next_power_of_2(self._matrices.BOUNDS))
        return {
            "bound": lambda: self._launch(bound, self._matrices.BOUNDS, (single, single), 1),
            "begin": lambda: self._launch(begin, tiles, (*(single,) * 3, half, half), 5, PADDED=padded),
            "multiply": lambda: self._launch(multiply, tiles, (half,) * 3, 3),
            "finish": lambda: self._launch(finish, tiles, (half, half, single, single), 2),
        }

    def _launch(self, kernel, programs: int, pointers: tuple, num_floats: int, **constants: Any) -> Launch:
        grid, floats = (programs * self._count, 1), (0.5,) * num_floats
        for depth, stages in _DEPTHS:
            matrices = self._matrices._replace(DEPTH=depth, STAGES=stages)
            words = {"MATRICES": matrices, **constants}
            try:
                return Launch(kernel, grid, pointers, floats, (), (), words, self._warps, self._device)
            except OutOfResources:
                if (depth, stages) == _DEPTHS[-1]:
                    raise
        raise AssertionError("there is a depth to try")


@functools.lru_cache(maxsize=64)
def _chain_for(count: int, size: int, steps: Steps, p: int, damping: float, device: torch.device) -> _Chain:
    return _Chain(count, size, steps, p, damping, device)
