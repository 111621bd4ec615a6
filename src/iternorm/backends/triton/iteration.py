"""The launches of Newton's iteration for groups above 64 in order: 3 T - 2 forward, 3 T - 1 backward for T steps.

A step that is watched (`device/newton.py`) is one more forward. The launches are part of a layer's chain
(`run.py`), or a chain of their own for given covariances: `solve` and `solve_backward`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from iternorm import solvers
from iternorm.backends.triton.device.ends import finish, prepare, start
from iternorm.backends.triton.device.running import Average, blend
from iternorm.backends.triton.device.steps import Matrices, combine, differentiate, settle, symmetrize
from iternorm.backends.triton.layout import slots_of
from iternorm.backends.triton.precision import is_watched, matrix_precision, split_for
from iternorm.backends.triton.runtime import Launch, Launches, given_to, on_device

# Tiles of 32x32, so that there are enough to fill a GPU: 14 launches at N = 512 took 70 us, with 64x64 173 (H200).
SIDE, STAGES = 32, 3
# How the names of launches that multiply by the R of a watched step begin.
WATCHED = "watched_"
# What `combine` does beside its first product, by the name of the launch.
COMBINATIONS = {
    "product": (),
    "step": ("ADDED",),
    "last_step": ("ADDED", "SCALED"),
    "pair": ("SECOND", "ADDED"),
    "last_pair": ("SECOND", "ADDED", "SUMMED"),
}

Call = tuple[str, tuple]


class RunningKey(NamedTuple):
    """What launches depend on of the running statistics that they update."""

    mean: torch.dtype | None = None
    matrix: torch.dtype | None = None
    counted: bool = False  # whether batches are
    cumulative: bool = False
    is_covariance: bool = False

    @property
    def average(self) -> Average:
        return Average(COUNT=self.counted, CUMULATIVE=self.cumulative, COVARIANCE=self.is_covariance)


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
        across = -(-stride // SIDE)
        self._tiles = across * across
        # Every array of matrices begins at 16 bytes.
        self._step = -(-count * stride * stride // 4) * 4
        self._count, self._size, self._channels = count, size, channels
        self._num_iters, self._device = num_iters, device
        self._weight, self._running = weight, running
        # On an H200 2 were faster for N = 512 (148 us backward against 191), 4 as fast or faster for 256 and 128.
        self._warps = 2 if stride >= 512 else 4
        self._matrices = Matrices(
            N=stride,
            D=size,
            PADDED=int(triton.next_power_of_2(stride)),
            SIDE=SIDE,
            EVEN=stride % SIDE == 0,
            STEPS=min(num_iters, 2),
            DEPTH=64 if stride % 64 == 0 else 32,
            STAGES=STAGES,
            PRECISION=precision,
        )

    @property
    def saved(self) -> int:
        """The elements of fp32 that `forward` leaves for `backward`."""
        return slots_of(self._num_iters) * self._step

    @property
    def forward_work(self) -> int:
        """Those that `forward` wants for itself."""
        return (2 if is_watched(self._num_iters) else 1) * self._step + self._count

    @property
    def backward_work(self) -> int:
        """Those that `backward` wants for itself, more than `forward`."""
        return 5 * self._step + self._count * self._tiles

    def forward(self, covariance, whitening, saved, work, eps: float) -> list[Call]:
        """The whitening matrices ``[G, D, D]`` of covariances ``[G, N, N]`` without eps.

        `saved` takes what the backward wants: R_0..R_{T-1} and Z_1..Z_{T-1}.
        """
        steps = self._num_iters
        absent = 0 if isinstance(covariance, int) else None
        if steps < 2:
            return [("start", (covariance, absent, absent, whitening, eps))]
        kept = self._places(saved, slots_of(steps))
        residuals, iterates = kept[:steps], kept[steps:]
        # A step that is watched has R in `following` first.
        between, *following, scale = self._places(work, 3 if is_watched(steps) else 2)
        calls: list[Call] = [("start", (covariance, residuals[0], scale, iterates[0], eps))]
        nothing = (absent, absent)
        for k in range(1, steps):
            before, residual, iterate = residuals[k - 1], residuals[k], iterates[k - 1]
            watched = k >= solvers.UNWATCHED_STEPS
            target = following[0] if watched else residual
            calls.append(("step", (before, before, *nothing, before, absent, *nothing, between, 0.25, -1.5)))
            calls.append(("step", (before, between, *nothing, before, absent, *nothing, target, 1.0, 2.25)))
            if watched:
                calls.append(("settle", (target, before, residual)))
            product = (iterate, residual, *nothing, iterate)
            if k < steps - 1:
                calls.append((_name("step", k), (*product, absent, *nothing, iterates[k], -0.5, 1.5)))
            else:
                calls.append((_name("last_step", k), (*product, scale, *nothing, whitening, -0.5, 1.5)))
        return calls

    def blend(self, covariance, whitening, mean, variance, buffers: tuple, counter, batches, momentum: float) -> Call:
        """The update of running mean and matrix, the `buffers`, and of the `counter`, of which `batches` is a copy."""
        assert self._running is not None
        value = covariance if self._running.is_covariance else whitening
        return "blend", (value, mean, variance, *buffers, counter, batches, momentum)

    def backward(
        self,
        gradient,
        covariance,
        whitening,
        saved,
        weight,
        grad_weight,
        work,
        result,
        eps: float,
        factor: float,
    ) -> list[Call]:
        """The symmetric gradient for the covariance, times a factor, given that for diag(γ) W ``[G, N, N]``.

        d(γ) is complete with the first call.
        """
        steps = self._num_iters
        absent = 0 if isinstance(covariance, int) else None
        d_residual, d_iterate, other_residual, other_iterate, shared, sums = self._places(work, 6)
        given = (gradient, covariance, whitening, weight, grad_weight)
        calls: list[Call] = [("prepare", (*given, d_residual, d_iterate, sums, eps))]
        kept = self._places(saved, slots_of(steps))
        for k in range(1, steps):
            before, residual, iterate = kept[k - 1], kept[k], kept[steps + k - 1]
            calls.append(("product", (d_residual, before, *(absent,) * 6, shared, 1.0, 0.0)))
            calls.append(("differentiate", (shared, before, d_residual, other_residual)))
            if k >= solvers.UNWATCHED_STEPS:
                calls.append(("symmetrize", (other_residual, d_residual)))
            else:
                d_residual, other_residual = other_residual, d_residual
            products = (d_iterate, residual, iterate, d_residual, d_iterate, absent)
            if k < steps - 1:
                calls.append((_name("pair", k), (*products, absent, absent, other_iterate, -0.5, 1.5)))
            else:
                calls.append((_name("last_pair", k), (*products, kept[0], sums, other_iterate, -0.5, 1.5)))
            d_iterate, other_iterate = other_iterate, d_iterate
        calls.append(("finish", (d_iterate, covariance, sums, result, eps, factor)))
        return calls

    def _places(self, base, count: int) -> list[Any]:
        """Where the first `count` arrays of matrices begin."""
        if isinstance(base, int):
            return [base + 4 * self._step * k for k in range(count)]
        return [base[self._step * k :] for k in range(count)]

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes the launch of each call."""
        makers = {
            "start": self._start,
            "prepare": self._prepare,
            "finish": self._finish,
            "differentiate": self._differentiate,
            "symmetrize": lambda: self._launch(symmetrize, (torch.float32,) * 2),
            "settle": lambda: self._launch(settle, (torch.float32,) * 3),
            "blend": self._blend,
        }
        for name, wanted in COMBINATIONS.items():
            makers[name] = functools.partial(self._combine, wanted, watched=False)
            makers[WATCHED + name] = functools.partial(self._combine, wanted, watched=True)
        return makers

    def _start(self) -> Launch:
        fp32 = torch.float32
        pointers = (fp32, *(fp32 if self._num_iters > 1 else None,) * 2, fp32)
        return self._launch(start, pointers, 1, (self._channels,))

    def _prepare(self) -> Launch:
        fp32 = torch.float32
        pointers = (*(fp32,) * 3, self._weight, None if self._weight is None else fp32, *(fp32,) * 3)
        return self._launch(prepare, pointers, 1, (self._channels,), AFFINE=self._weight is not None)

    def _finish(self) -> Launch:
        tiles = min(triton.next_power_of_2(self._tiles), 1024)
        return self._launch(finish, (torch.float32,) * 4, 2, (self._channels,), TILES=tiles)

    def _differentiate(self) -> Launch:
        matrices = self._matrices
        if matrices.PRECISION == "tf32x3" and self._warps == 2:
            # At a depth of 64 two warps run out of registers (seen in the compiler's report, not timed).
            matrices = matrices._replace(DEPTH=32)
        return self._launch(differentiate, (torch.float32,) * 4, MATRICES=matrices)

    def _combine(self, wanted: tuple[str, ...], watched: bool) -> Launch:
        words = {word: word in wanted for word in ("SECOND", "ADDED", "SCALED", "SUMMED")}
        second, added, scaled, summed = words.values()
        present = (True, True, second, second, added, scaled, summed, summed, True)
        pointers = tuple(torch.float32 if there else None for there in present)
        return self._launch(combine, pointers, 2, (), **words, WATCHED=watched)

    def _launch(self, kernel, pointers: tuple, num_floats: int = 0, integers: tuple = (), **constants: Any) -> Launch:
        grid = (self._tiles, self._count)
        constants = {"MATRICES": self._matrices, **constants}
        return Launch(kernel, grid, pointers, (0.5,) * num_floats, integers, (0,), constants, self._warps, self._device)

    def _blend(self) -> Launch:
        assert self._running is not None
        fp32, size, running = torch.float32, self._size, self._running
        counters = (torch.int64 if running.counted else None,) * 2
        stride = self._matrices.N if running.is_covariance else size
        return Launch(
            blend,
            ((-(-size // SIDE)) ** 2, self._count),
            (fp32, fp32, fp32, running.mean, running.matrix, *counters),
            (0.1,),
            (self._channels,),
            (0,),
            {"N": stride, "D": size, "SIDE": SIDE, "AVERAGE": running.average},
            self._warps,
            self._device,
        )


def _name(combination: str, k: int) -> str:
    """Of the launch that multiplies by R_k."""
    return WATCHED + combination if k >= solvers.UNWATCHED_STEPS else combination


def solve(covariance: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """The whitening matrices of covariances ``[G, N, N]`` with eps, and what the backward needs."""
    count, size, _ = covariance.shape
    chain = _chain_for(count, size, num_iters, covariance.device, matrix_precision(split_for(torch.float32), num_iters))
    covariance = covariance.contiguous()
    whitening = torch.empty_like(covariance)
    saved = covariance.new_empty(chain.iteration.saved)
    work = covariance.new_empty(chain.iteration.forward_work)
    chain.run(chain.iteration.forward, (covariance, whitening, saved, work), (0.0,))
    return whitening, saved


def solve_backward(grad: Tensor, covariance: Tensor, whitening: Tensor, saved: Tensor, num_iters: int) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix (math.md, Eq. 10-12)."""
    count, size, _ = covariance.shape
    chain = _chain_for(count, size, num_iters, covariance.device, matrix_precision(split_for(torch.float32), num_iters))
    result = covariance.new_empty(count, size, size)
    work = covariance.new_empty(chain.iteration.backward_work)
    given = (grad.contiguous(), covariance.contiguous(), whitening.contiguous(), saved)
    chain.run(chain.iteration.backward, (*given, None, None, work, result), (0.0, 1.0))
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
        calls = calls_for(*places, *floats)
        with on_device(self._device):
            self._launches.run(stream, tuple(name for name, _ in calls), tuple(values for _, values in calls))


@functools.cache
def _chain_for(count: int, size: int, num_iters: int, device: torch.device, precision: str) -> _Chain:
    iteration = Iteration(count, size, size, count * size, num_iters, precision, device)
    return _Chain(iteration, device)
