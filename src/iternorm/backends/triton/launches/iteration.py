"""Newton's iteration for groups above 64 channels: one launch forward and one backward (`device/iteration/`).

They are part of a layer's chain (`run.py`), or a chain of their own for given covariances: `solve` and
`solve_backward`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from iternorm.backends.triton import tiling
from iternorm.backends.triton.device.iteration.iterate import iterate, iterate_backward, wide_weight_gradient
from iternorm.backends.triton.device.iteration.steps import Matrices
from iternorm.backends.triton.device.running import Average, blend
from iternorm.backends.triton.precision import (
    HALF,
    is_watched,
    matrix_precision,
    newton_raised,
    newton_range,
    split_for,
)
from iternorm.backends.triton.runtime import Launch, Launches, given_to, on_device

Call = tuple[str, tuple]


class RunningKey(NamedTuple):
    """What launches depend on of the running statistics that they update."""

    mean: torch.dtype | None = None
    matrix: torch.dtype | None = None
    counted: bool = False  # whether batches are
    cumulative: bool = False
    is_covariance: bool = False

    def average(self, size: int) -> Average:
        """What a kernel averages of groups of so many channels."""
        width = 1 << (size - 1).bit_length()
        return Average(self.counted, self.cumulative, self.is_covariance, SIZE=size, WIDTH=width)


class Iteration:
    """Launches and calls for matrices of one size.

    A place in memory is an address, or for Triton's own launcher a tensor that begins there.

    Args:
        count: how many groups, G.
        size: the channels of a group, D.
        stride: the rows of a matrix, N: D or more.
        channels: of all groups, C; the last may have less than D.
        num_iters: T.
        precision: of the products.
        device: where they run.
        weight: the dtype of γ, None without one.
        running: the running statistics, None without them.
    """

    def __init__(
        self,
        count: int,
        size: int,
        stride: int,
        channels: int,
        num_iters: int,
        precision: str,
        device: torch.device,
        weight: torch.dtype | None = None,
        running: RunningKey | None = None,
    ):
        blocks = tiling.blocks_for(stride, precision)
        self._across = -(-stride // blocks.side)
        # Every array of matrices begins at 16 bytes, in float16 too.
        self._step = -(-count * stride * stride // 8) * 8
        self._count, self._size, self._channels = count, size, channels
        self._num_iters, self._device = num_iters, device
        self._weight, self._running = weight, running
        self._watched = is_watched(num_iters)
        self._warps = blocks.warps
        self._matrices = Matrices(
            N=stride,
            D=size,
            PADDED=int(triton.next_power_of_2(stride)),
            SIDE=blocks.side,
            PAIRS=self._across * (self._across + 1) // 2,
            EVEN=stride % blocks.side == 0 and stride % blocks.depth == 0,
            STEPS=min(num_iters, 2),
            DEPTH=blocks.depth,
            STAGES=blocks.stages,
            # Without products there is nothing to round.
            HALF=precision == HALF and num_iters > 1,
            JOINED=blocks.joined and precision == HALF and num_iters > 1,
            PRECISION="ieee" if precision == HALF else precision,
            RAISED=newton_raised(num_iters) if precision == HALF else 1.0,
        )

    @property
    def forward_work(self) -> int:
        """The elements of fp32 that `forward` wants for itself: two R, two Z, S, and a third R where it is watched.

        In float16, those and R and Z in fp32 take less.
        """
        return (5 + self._watched) * self._step + self._count

    @property
    def backward_work(self) -> int:
        """Those that `backward` wants for itself: derivatives too, and what each tile adds to the trace's gradient.

        In float16, as many for the gradient, R, Z, dR and dZ in fp32, and the rest in float16; each tile's largest.
        """
        pairs = self._matrices.PAIRS * (2 if self._matrices.HALF else 1)
        return (10 + self._watched) * self._step + self._count * (pairs + 2)

    def forward(self, covariance, whitening, work, counter, eps: float) -> Call:
        """The whitening matrices ``[G, D, D]`` of covariances ``[G, N, N]`` without eps.

        The programs meet at `counter`, a zero.
        """
        return "iterate", (covariance, work, whitening, counter, eps)

    def blend(
        self, covariance, whitening, mean, variance, buffers: tuple, counter, batches, eps: float, momentum: float
    ) -> Call:
        """The update of running mean and matrix, the `buffers`, and of the `counter`, of which `batches` is a copy."""
        assert self._running is not None
        value = covariance if self._running.is_covariance else whitening
        return "blend", (value, mean, variance, *buffers, counter, batches, eps, momentum)

    def backward(
        self,
        gradient,
        covariance,
        whitening,
        weight,
        grad_weight,
        work,
        result,
        counter,
        eps: float,
        factor: float,
    ) -> Call:
        """The symmetric gradient for the covariance, times a factor, given that for diag(γ) W ``[G, N, N]``; d(γ).

        The gradient may be the first matrix of `work`, and the result the second.
        """
        matrices = (gradient, covariance, whitening, weight, grad_weight, work, result)
        return "iterate_backward", (*matrices, counter, eps, factor)

    def weight_gradient(self, gradient, whitening, grad_weight) -> Call:
        """Only d(γ)."""
        return "wide_weight_gradient", (gradient, whitening, grad_weight)

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes the launch of each call."""
        return {
            "iterate": self._iterate,
            "iterate_backward": self._iterate_backward,
            "wide_weight_gradient": self._weight_gradient,
            "blend": self._blend,
        }

    def _iterate(self) -> Launch:
        pointers = (*(torch.float32,) * 3, torch.int32)
        return self._meeting(iterate, pointers, 1)

    def _iterate_backward(self) -> Launch:
        fp32 = torch.float32
        grad_weight = None if self._weight is None else fp32
        pointers = (fp32, fp32, fp32, self._weight, grad_weight, fp32, fp32, torch.int32)
        constants = {
            "AFFINE": self._weight is not None,
            "TOGETHER": min(triton.next_power_of_2(self._matrices.PAIRS), 1024),
            "LARGEST": newton_range(self._num_iters, self._size),
        }
        return self._meeting(iterate_backward, pointers, 2, **constants)

    def _meeting(self, kernel, pointers: tuple, num_floats: int, **constants: Any) -> Launch:
        """A launch whose programs meet: as many as have work between two meetings."""
        matrices = self._matrices
        # S and Z, and in fp32 their derivatives.
        steps = 1 if matrices.JOINED else 4 if kernel is iterate_backward and not matrices.HALF else 2
        items = steps * matrices.PAIRS * self._count
        grid, integers = (items, 1), (self._channels, self._count)
        constants |= {"MATRICES": matrices, "T": self._num_iters, "STRIDE": self._step, "WATCHED": self._watched}
        floats = (0.5,) * num_floats
        return Launch(
            kernel, grid, pointers, floats, integers, (0,), constants, self._warps, self._device, False, True
        )  # fmt: skip

    def _weight_gradient(self) -> Launch:
        grid, integers, constants = (self._across, self._count), (self._channels,), {"MATRICES": self._matrices}
        pointers = (torch.float32,) * 3
        return Launch(
            wide_weight_gradient, grid, pointers, (), integers, (0,), constants, self._warps, self._device
        )  # fmt: skip

    def _blend(self) -> Launch:
        assert self._running is not None
        fp32, size, running = torch.float32, self._size, self._running
        counters = (torch.int64 if running.counted else None,) * 2
        stride, side = self._matrices.N if running.is_covariance else size, self._matrices.SIDE
        return Launch(
            blend,
            ((-(-size // side)) ** 2, self._count),
            (fp32, fp32, fp32, running.mean, running.matrix, *counters),
            (0.1, 0.1),
            (self._channels,),
            (0,),
            {"N": stride, "D": size, "SIDE": side, "AVERAGE": running.average(size)},
            self._warps,
            self._device,
        )


def meeting_place(x: Tensor) -> Tensor:
    """Where the programs of a launch count who has come: a zero that no other launch uses."""
    return x.new_zeros(4, dtype=torch.int32)


def solve(covariance: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """The whitening matrices of covariances ``[G, N, N]`` with eps, and what the backward needs beside: nothing."""
    count, size, _ = covariance.shape
    chain = _chain_for(count, size, num_iters, covariance.device, matrix_precision(split_for(torch.float32), num_iters))
    covariance = covariance.contiguous()
    whitening = torch.empty_like(covariance)
    work = covariance.new_empty(chain.iteration.forward_work)
    chain.run(chain.iteration.forward, (covariance, whitening, work, meeting_place(covariance)), (0.0,))
    return whitening, covariance.new_empty(0)


def solve_backward(grad: Tensor, covariance: Tensor, whitening: Tensor, _saved: Tensor, num_iters: int) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix (math.md, Eq. 10-12)."""
    count, size, _ = covariance.shape
    chain = _chain_for(count, size, num_iters, covariance.device, matrix_precision(split_for(torch.float32), num_iters))
    result = covariance.new_empty(count, size, size)
    work = covariance.new_empty(chain.iteration.backward_work)
    given = (grad.contiguous(), covariance.contiguous(), whitening.contiguous())
    tensors = (*given, None, None, work, result, meeting_place(covariance))
    chain.run(chain.iteration.backward, tensors, (0.0, 1.0))
    return result


class _Chain:
    """The iteration by itself."""

    def __init__(self, iteration: Iteration, device: torch.device):
        self.iteration = iteration
        self._device = device
        self._launches = Launches(iteration.makers)

    def run(self, calls_for, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        stream, places = given_to(self._device, *tensors)
        if stream is None:
            places = [None if tensor is None else tensor.flatten() for tensor in tensors]
        name, values = calls_for(*places, *floats)
        with on_device(self._device):
            self._launches.run(stream, (name,), (values,))


@functools.cache
def _chain_for(count: int, size: int, num_iters: int, device: torch.device, precision: str) -> _Chain:
    iteration = Iteration(count, size, size, count * size, num_iters, precision, device)
    return _Chain(iteration, device)
