"""The launches of a layer at one input shape: chosen once, then found by what they depend on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import OutOfResources

from iternorm.backends.triton.device.apply import apply_backward, apply_forward
from iternorm.backends.triton.device.moments import partial_moments, reduce_moments
from iternorm.backends.triton.device.whiten import weight_gradient, whiten_backward, whiten_forward
from iternorm.backends.triton.device.wide_apply import wide_apply, wide_apply_backward
from iternorm.backends.triton.device.wide_moments import wide_moments, wide_reduce
from iternorm.backends.triton.devices import device_of
from iternorm.backends.triton.iteration import Iteration
from iternorm.backends.triton.layout import (
    BLOCK,
    INTERPRETED,
    LARGEST_NEWTON,
    LARGEST_WHOLE,
    Tiles,
    block_of,
    is_watched,
    jitter,
    newton_parts,
    newton_range,
    parts,
    placed,
    precision,
    programs,
    shape_of,
    slots_of,
    state_of,
    tiles_for,
)
from iternorm.backends.triton.runtime import Launch, Launches


class Key(NamedTuple):
    """All that a plan depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group_size: int
    num_iters: int
    split: int
    exact: bool  # the iteration's products in fp32's accuracy, whatever the user allows
    relu: bool  # an activation follows
    weight: torch.dtype | None
    bias: torch.dtype | None
    running: tuple | None  # dtypes of mean and matrix, whether batches are counted, cumulative, covariance


_plans: dict[Key, "Plan"] = {}


def plan_for(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    num_iters: int,
    running,
    exact: bool = False,
    relu: bool = False,
    split: int | None = None,
) -> "Plan":
    """The plan for this call; `split` is what `parts` says unless it is given."""
    # A plain tuple finds what is kept under a `Key`, and is made in half the time.
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        group_size,
        num_iters,
        parts(x.dtype) if split is None else split,
        exact,
        relu,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None
        if running is None
        else (
            running.mean.dtype,
            running.matrix.dtype,
            running.num_batches is not None,
            running.momentum is None,
            running.is_covariance,
        ),
    )
    plan = _plans.get(key)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        made = Key(*key)
        plan = _plans[made] = Plan(made, x)
    return plan


class Plan:
    """The launches of one layer at one input shape, made once."""

    def __init__(self, key: Key, x: Tensor):
        self.key = key
        as_read = placed(x, key.group_size)
        self.shape = shape = shape_of(as_read, key.group_size)
        self.newton_parts = newton_parts(key.split, key.exact, key.num_iters)
        self.at = state_of(shape.channels, key.group_size, key.num_iters, self.newton_parts)
        self.copied = as_read is not x
        # Whether batches are counted.
        self.counts = key.running is not None and key.running[2]
        self.iteration: Iteration | None = None
        if shape.padded > LARGEST_NEWTON:
            sizes = (shape.num_groups, shape.group_size, shape.padded, shape.channels, key.num_iters)
            self.iteration = Iteration(*sizes, precision(key.split, key.num_iters), key.device, key.weight, key.running)
        self.quick = x.is_cuda and not INTERPRETED
        # A layer uses few of these: each is compiled when it is first launched.
        self.launches = Launches(self._make)
        self.run = self.launches.run
        self._sizes: dict[str, int] = {}
        self._num_sms = device_of(key.device).num_sms
        self._chosen: dict[str, Tiles] = {}
        # How many programs share the samples.
        self._shares: dict[str, int] = {}
        self.in_blocks = shape.padded > LARGEST_WHOLE
        # Matrices of 128x128 in three parts ask for more shared memory than there is.
        self._maps_blocks = self.in_blocks or (shape.padded == LARGEST_WHOLE and key.split == 3)

    def _make(self, name: str) -> Launch:
        # What is no launch of every layer is one of the iteration of large groups.
        if self.iteration is None or hasattr(self, "_" + name):
            return getattr(self, "_" + name)()
        return self.iteration.make(name)

    def _tiles(self, kernel: str) -> Tiles:
        if kernel in self._chosen:
            return self._chosen[kernel]
        tiles = tiles_for(kernel, self.shape, self.key.split, self.key.relu)
        # The iteration's backward in three parts takes most of a multiprocessor's shared memory.
        return tiles._replace(per_sm=1) if kernel == "whiten_backward" and self.newton_parts == 3 else tiles

    def _passes(
        self,
        kernel: str,
        function,
        pointers: tuple,
        constants: dict[str, Any],
        whole_batch: bool = False,
        floats: tuple = (),
        blocks: int = 1,
    ) -> Launch:
        """A kernel that goes over the activation.

        Its tiles are chosen for an H200. A GPU that has less shared memory shows it when the kernel is compiled.
        """
        tiles = self._tiles(kernel)
        while True:
            try:
                launch = self._in_tiles(tiles, kernel, function, pointers, constants, whole_batch, floats, blocks)
                break
            except OutOfResources:
                smaller = tiles.smaller()
                if smaller is None:
                    raise
                tiles = smaller
                if "NEWTON_STAGES" in constants:
                    constants = {**constants, "NEWTON_STAGES": max(1, constants["NEWTON_STAGES"] - 1)}
        self._chosen[kernel] = tiles
        return launch

    def _in_tiles(
        self, tiles: Tiles, kernel: str, function, pointers, constants, whole_batch, floats, blocks
    ) -> Launch:
        shape = self.shape
        # One more than there are shares of the samples writes what is kept.
        keepers = int(kernel == "whiten")
        count, each = programs(shape, tiles, self._num_sms, keepers, blocks)
        self._shares[kernel] = count
        integers = (shape.samples, shape.channels, shape.length, each, *((count,) if whole_batch else ()))
        common = {"D": shape.group_size, "BD": shape.padded, "BL": tiles.block, "ROWS": shape.rows}
        last = {"PARTS": self.key.split, "BIG": shape.big, "WHOLE": shape.whole, "STAGES": tiles.stages}
        grid = (count * blocks + keepers, shape.num_groups)
        return Launch(
            function,
            grid,
            pointers,
            floats,
            integers,
            (1, 2),
            {**common, **constants, **last},
            tiles.warps,
            self.key.device,
            # Two programs of the moments fit one multiprocessor where one is meant to have it: brought up early, they
            # double up on those that are free first (91 us a step against 74 at 64x64x32x32, fp32, H200).
            early=not kernel.endswith("moments"),
        )

    def _moments(self, backward: bool = False) -> Launch:
        name = "cross_moments" if backward else "moments"
        mean = torch.float32 if backward else None
        relu = backward and self.key.relu
        pointers = (self.key.dtype, self.key.dtype, self.key.dtype if relu else None, mean, torch.float32)
        constants = {"SELF": not backward, "RELU": relu}
        if not self.in_blocks:
            return self._passes(name, partial_moments, pointers, constants, True)
        block = block_of(name, self.shape)
        across = self.shape.padded // block
        pairs = across**2 if backward else across * (across + 1) // 2
        return self._passes(name, wide_moments, pointers, {"BC": block, **constants}, True, blocks=pairs)

    def _cross_moments(self) -> Launch:
        return self._moments(backward=True)

    def _reduce(self, backward: bool = False) -> Launch:
        shape = self.shape
        name = "cross_moments" if backward else "moments"
        count = self._shares_of(name)
        each = self.launches[name].integers[3] * self._tiles(name).block
        fp32 = torch.float32
        counted = not backward and self.counts
        common = {"D": shape.group_size, "BD": shape.padded, "SELF": not backward, "COUNT": counted}
        pointers = (fp32, fp32, fp32, None if backward else fp32, *(torch.int64 if counted else None,) * 2)
        integers = (shape.samples, shape.channels, count, each)
        if self.in_blocks:
            grid = ((shape.padded // 32) ** 2, shape.num_groups)
            words = {**common, "BC": BLOCK, "BLOCK": 32, "PB": min(8, 1 << (count - 1).bit_length())}
            return Launch(wide_reduce, grid, pointers, (), integers, (1,), words, 4, self.key.device)
        # All partials of a row at once where they are few enough: a loop waits for the memory at every turn.
        block = max(16, min(256, 1 << (count - 1).bit_length()))
        grid = (shape.num_groups, shape.padded)
        words = {**common, "PB": block}
        return Launch(reduce_moments, grid, pointers, (), integers, (1,), words, block // 16, self.key.device)

    def _cross_reduce(self) -> Launch:
        return self._reduce(backward=True)

    def _whiten(self) -> Launch:
        dtype, weight, bias, fp32 = self.key.dtype, self.key.weight, self.key.bias, torch.float32
        mean, matrix, counted, cumulative, is_covariance = self.key.running or (None, None, False, False, False)
        constants = {
            "WEIGHT": weight is not None,
            "BIAS": bias is not None,
            "RUNNING": self.key.running is not None,
            "COUNT": counted,
            "CUMULATIVE": cumulative,
            "RUNNING_COVARIANCE": is_covariance,
            "RELU": self.key.relu,
        }
        pointers = (dtype, dtype, *(fp32,) * 4, self.kept, weight, bias, mean, matrix)
        counters = (torch.int64 if counted else None,) * 2
        constants = {**self._steps, **constants, **self._products}
        return self._passes("whiten", whiten_forward, (*pointers, *counters), constants, floats=(0.1, 0.1))

    def _whiten_backward(self) -> Launch:
        dtype, weight, fp32 = self.key.dtype, self.key.weight, torch.float32
        activations = (dtype, dtype, dtype if self.key.relu else None, dtype)
        pointers = (*activations, *(fp32,) * 4, self.kept, fp32, weight, None if weight is None else fp32)
        in_half = self.newton_parts in (1, 2)
        # Of matrices on their way: as many as leave room for the programs of a multiprocessor.
        stages = 3 if self.newton_parts <= (2 if self._tiles("whiten_backward").per_sm == 1 else 1) else 2
        constants = {
            **self._steps,
            "LARGEST": newton_range(self.key.num_iters) if in_half else 1.0,
            "WEIGHT": weight is not None,
            "RELU": self.key.relu,
            **self._products,
            "NEWTON_STAGES": stages,
        }
        return self._passes("whiten_backward", whiten_backward, pointers, constants, floats=(0.1,))

    def _weight_gradient(self) -> Launch:
        shape, fp32 = self.shape, torch.float32
        constants = {"D": shape.group_size, "BD": shape.padded}
        grid = (shape.num_groups, 1)
        return Launch(weight_gradient, grid, (fp32,) * 3, (), (shape.channels,), (0,), constants, 4, self.key.device)

    def _apply(self) -> Launch:
        dtype, weight, bias, fp32 = self.key.dtype, self.key.weight, self.key.bias, torch.float32
        constants = {"WEIGHT": weight is not None, "BIAS": bias is not None, "RELU": self.key.relu}
        return self._map("apply", apply_forward, wide_apply, (dtype, dtype, fp32, fp32, weight, bias), constants)

    def _apply_backward(self) -> Launch:
        dtype, weight, fp32 = self.key.dtype, self.key.weight, torch.float32
        pointers = (dtype, dtype, dtype if self.key.relu else None, dtype, *(fp32,) * 4, weight)
        constants = {"WEIGHT": weight is not None, "RELU": self.key.relu}
        return self._map("apply_backward", apply_backward, wide_apply_backward, pointers, constants)

    def _map(self, name: str, whole, in_blocks, pointers: tuple, constants: dict[str, Any]) -> Launch:
        """A kernel that applies matrices, in blocks where the group is, or where a GPU has no room for whole ones."""
        if not self._maps_blocks:
            try:
                return self._passes(name, whole, pointers, constants)
            except OutOfResources:
                if self.shape.padded < LARGEST_WHOLE:
                    raise
        words, blocks = {"BC": BLOCK, **constants}, self.shape.padded // BLOCK
        return self._passes(name, in_blocks, pointers, words, blocks=blocks)

    @property
    def _steps(self) -> dict[str, Any]:
        return {"T": self.key.num_iters, "STRIDE": self.stride}

    @property
    def _products(self) -> dict[str, Any]:
        exact, split = self.key.exact, self.key.split
        # ZCA's variances are raised, which keeps its eigenvalues positive.
        watched = is_watched(self.key.num_iters) and not exact
        return {"JITTER": jitter(split) if exact else 0.0, "NEWTON": self.newton_parts, "WATCHED": watched}

    @property
    def kept(self) -> torch.dtype:
        """What the iteration keeps its matrices in."""
        if self.iteration is not None or self.newton_parts == 0:
            return torch.float32
        return torch.bfloat16 if self.newton_parts == 3 else torch.float16

    @property
    def stride(self) -> int:
        """From a group's kept matrices to the next one's."""
        return slots_of(self.key.num_iters) * self.shape.padded**2 * max(self.newton_parts, 1)

    def workspace(self, x: Tensor, name: str) -> Tensor:
        """Room for two matrices a group, and for the partial sums of all programs and later the iteration's own.

        A buffer that was kept for the next call would lie in the memory pool of the graph that this one may be
        captured in, which belongs to the graph alone.
        """
        size = self._sizes.get(name)
        if size is None:
            padded, count = self.shape.padded, self.shape.num_groups
            size = self._shares_of(name) * (padded + 2) * count * padded
            if self.iteration is not None:
                size = max(size, self.iteration.backward_work)
            size = self._sizes[name] = size + 2 * padded * count * padded
        return x.new_empty(size, dtype=torch.float32)

    def _shares_of(self, name: str) -> int:
        # Known when the launch is made.
        self.launches[name]
        return self._shares[name]

    def stream(self) -> int | None:
        """The current stream, or None where the tensors must be handed to Triton themselves."""
        return torch._C._cuda_getCurrentRawStream(self.key.device.index) if self.quick else None
