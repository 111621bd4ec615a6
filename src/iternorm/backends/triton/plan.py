"""The launches of a layer at one input shape: chosen once, then found by what they depend on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import OutOfResources

from iternorm.backends.triton.device.moments import partial_moments
from iternorm.backends.triton.device.tiles import After, Passing, Tile
from iternorm.backends.triton.device.wide.moments import wide_moments
from iternorm.backends.triton.launches.exchange import Exchange
from iternorm.backends.triton.launches.iteration import Iteration, RunningKey
from iternorm.backends.triton.launches.maps import Maps
from iternorm.backends.triton.launches.reductions import Reductions
from iternorm.backends.triton.launches.whiten import Whitens
from iternorm.backends.triton.layout import (
    LARGEST_NEWTON,
    Layout,
    layout_of,
    placed_without_data,
    shared_size,
    state_of,
)
from iternorm.backends.triton.precision import (
    NewtonSplit,
    Split,
    matrix_precision,
    newton_split,
    split_for,
)
from iternorm.backends.triton.runtime import Launch, Launches, device_of
from iternorm.backends.triton.tiling import LONGEST_SUM, Tiles, programs, tiles_for


class Key(NamedTuple):
    """All that a plan depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group_size: int
    num_iters: int
    split: Split
    exact: bool = False  # the iteration's products in fp32's accuracy, whatever the user allows
    relu: bool = False  # an activation follows
    residual: bool = False  # something is added before it
    summed: bool = False  # the gradient of the output comes in two parts
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    running: RunningKey | None = None
    ranks: int = 0  # whose batches are one; 0 is this process alone


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
    split: Split | None = None,
    residual: bool = False,
    summed: bool = False,
    ranks: int = 0,
) -> "Plan":
    """The plan for this call; `split` is what the user allows now unless it is given."""
    kept = None
    if running is not None:
        cumulative, counted = running.momentum is None, running.num_batches is not None
        kept = (running.mean.dtype, running.matrix.dtype, counted, cumulative, running.is_covariance)
    # A plain tuple finds what is kept under a `Key`, and is made in half the time.
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        group_size,
        num_iters,
        split_for(x.dtype) if split is None else split,
        exact,
        relu,
        residual,
        summed,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        kept,
        ranks,
    )
    plan = _plans.get(key)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        made = Key._make(key)._replace(running=None if kept is None else RunningKey(*kept))
        plan = _plans[made] = Plan(made, x)
    return plan


class Plan:
    """The launches of one layer at one input shape, made once."""

    def __init__(self, key: Key, x: Tensor):
        self.key = key
        as_read = placed_without_data(x, key.group_size)
        # Whether the input is copied, and the stride in which the kernels then read and write.
        self.copied, self.stride = as_read is not x, as_read.stride()
        self.layout = layout = self._layout_of(as_read)
        self.newton_split = newton_split(key.split, key.exact, key.num_iters)
        self.at = state_of(layout.channels, key.group_size, key.num_iters, self.newton_split, layout.shared)
        # Whether the backward's first kernel writes the gradient that passed the activation.
        self.keeps_gradient = (key.relu and key.residual) or key.summed
        # Whether batches are counted.
        self.counts = key.running is not None and key.running.counted
        self.maps = Maps(self)
        makers = self._makers()
        self.iteration: Iteration | None = None
        if layout.padded > LARGEST_NEWTON:
            sizes = (layout.num_groups, layout.group_size, layout.padded, layout.channels, key.num_iters)
            precision = matrix_precision(key.split, key.num_iters)
            self.iteration = Iteration(*sizes, precision, key.device, key.weight, key.running)
            makers |= self.iteration.makers
        self.exchange: Exchange | None = None
        if key.ranks:
            self.exchange = Exchange(layout, key.ranks, self.counts, key.device)
            makers |= self.exchange.makers
        self.launches = Launches(makers)
        self.run = self.launches.run
        self._sizes: dict[str, int] = {}
        self.num_sms = device_of(key.device).num_sms
        self._chosen: dict[str, Tiles] = {}
        self._num_programs: dict[str, int] = {}

    def _makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes each launch, when it is first wanted."""
        return {
            "moments": self._moments,
            "cross_moments": self._cross_moments,
            **Reductions(self).makers,
            **Whitens(self).makers,
            **self.maps.makers,
        }

    def _layout_of(self, x: Tensor) -> Layout:
        key = self.key
        return layout_of(
            x, key.group_size, shared_size(x.shape[1], key.group_size, key.num_iters, key.exact, key.ranks)
        )

    @property
    def _tiled(self) -> Layout:
        """What tiles are chosen for."""
        return self.layout

    @property
    def partials(self) -> tuple[int, int]:
        """The rows of a program's partial matrix, and how many of them are one of the group's."""
        return self.layout.padded, 1

    @property
    def _value_bytes(self) -> int:
        """The bytes of a value, where tiles depend on it."""
        return self.key.dtype.itemsize

    def tiles_of(self, kernel: str) -> Tiles:
        if kernel in self._chosen:
            return self._chosen[kernel]
        key = self.key
        third = {"moments": False, "apply": key.residual, "whiten": key.residual, "cross_moments": key.relu}
        tiles = tiles_for(kernel, self._tiled, key.split, third.get(kernel, self.masks), self._value_bytes)
        # The iteration's backward in three parts takes most of a multiprocessor's shared memory.
        return (
            tiles._replace(per_sm=1)
            if kernel == "whiten_backward" and self.newton_split == NewtonSplit.THREE_BFLOAT16
            else tiles
        )

    def passes(
        self,
        kernel: str,
        function,
        pointers: tuple,
        constants: dict[str, Any],
        floats: tuple = (),
        blocks: int | None = None,
    ) -> Launch:
        """A kernel that goes over the activation, in so many blocks of a wide group.

        Its tiles are chosen for an H200. A GPU that has less shared memory shows it when the kernel is compiled.
        """
        tiles = self.tiles_of(kernel)
        while True:
            try:
                launch = self._in_tiles(tiles, kernel, function, pointers, constants, floats, blocks)
                break
            except OutOfResources:
                smaller = tiles.smaller()
                if smaller is None:
                    raise
                tiles = smaller
                if "NEWTON" in constants:
                    # The iteration has the memory of the tiles that come after it.
                    newton = constants["NEWTON"]
                    stages = min(newton.STAGES, smaller.stages)
                    constants = {**constants, "NEWTON": newton._replace(STAGES=stages)}
        self._chosen[kernel] = tiles
        return launch

    def _in_tiles(self, tiles: Tiles, kernel: str, function, pointers, constants, floats, blocks) -> Launch:
        layout = self.layout
        # One more than there are shares of the samples writes what is kept.
        keepers = int(kernel == "whiten")
        count = programs(layout, tiles, self.num_sms, keepers, blocks or 1)
        self._num_programs[kernel] = count
        integers = (layout.samples, layout.channels, layout.length, count)
        tile = Tile(
            D=layout.group_size,
            BD=layout.padded,
            BC=layout.padded if blocks is None else tiles.block,
            BL=tiles.samples,
            ROWS=layout.rows or tiles.as_rows,
            ROUND=self._goes_round,
            PARTS=int(self.key.split),
            INT64=layout.int64,
            EVEN=layout.even,
            STAGES=tiles.stages,
            LONG=kernel.endswith("moments") and layout.samples > LONGEST_SUM * count,
            SHARED=layout.shared,
            PLANES=tiles.as_rows and not layout.rows,
            DEPTH=tiles.depth,
        )
        return Launch(
            function,
            (count * (blocks or 1) + keepers, layout.num_groups),
            pointers,
            floats,
            integers,
            (1, 2),
            {"TILE": tile, **constants},
            tiles.warps,
            self.key.device,
            # Two programs of the moments fit one multiprocessor where one is meant to have it: as a dependent launch,
            # they double up on those that are free first (91 us a step against 74 at 64x64x32x32, fp32, H200).
            dependent=not kernel.endswith("moments"),
        )

    def _moments(self, backward: bool = False) -> Launch:
        name = "cross_moments" if backward else "moments"
        key, mean = self.key, torch.float32 if backward else None
        passing = Passing(backward and key.summed, backward and key.relu, backward and self.keeps_gradient)
        gradients = (key.dtype if asked else None for asked in (passing.RELU, passing.SUMMED, passing.KEPT))
        pointers = (key.dtype, key.dtype, *gradients, mean, torch.float32)
        constants = {"SELF": not backward, "PASSING": passing}
        if not self.layout.wide:
            return self.passes(name, partial_moments, pointers, constants)
        across = self.layout.padded // self.tiles_of(name).block
        pairs = across**2 if backward else across * (across + 1) // 2
        return self.passes(name, wide_moments, pointers, constants, blocks=pairs)

    def _cross_moments(self) -> Launch:
        return self._moments(backward=True)

    @property
    def after(self) -> After:
        """What follows the normalization in a forward's last kernel."""
        return After(self.key.residual, self.key.relu)

    @property
    def residual(self) -> torch.dtype | None:
        """The dtype of what is added there."""
        return self.key.dtype if self.key.residual else None

    @property
    def masks(self) -> bool:
        """Whether the backward's last kernel masks the gradient, which its first has not written."""
        return self.key.relu and not self.keeps_gradient

    @property
    def kept(self) -> torch.dtype:
        """What the iteration keeps its matrices in."""
        return self.newton_split.dtype if self.iteration is None else torch.float32

    def workspace(self, x: Tensor, name: str) -> Tensor:
        """Room for the partial sums of all programs, backward behind what they are reduced to; later for the iteration.

        A buffer that was kept for the next call would lie in the memory pool of the graph that this one may be
        captured in, which belongs to the graph alone.
        """
        return x.new_empty(self.work_size(name), dtype=torch.float32)

    def work_size(self, name: str) -> int:
        """The elements of the workspace."""
        size = self._sizes.get(name)
        if size is None:
            padded, count, side = self.layout.padded, self.layout.num_groups, self.partials[0]
            backward = name == "cross_moments"
            size = (self.num_programs(name) * (side + 2) * side + backward * padded**2) * count
            if self.iteration is not None:
                size = max(size, self.iteration.backward_work if backward else self.iteration.forward_work)
            if backward and self.exchange is not None:
                size = -(-size // 4) * 4 + self.exchange.vectors
            self._sizes[name] = size
        return size

    def unit_of(self, name: str) -> int:
        """Of how many samples each the pieces are that go round among the programs of a launch: `tiles.samples_of`."""
        samples = self.tiles_of(name).samples
        tiles = -(-self.layout.samples // samples)
        return samples if self._goes_round else samples * -(-tiles // self.num_programs(name))

    @property
    def _goes_round(self) -> bool:
        """Whether tiles go round among the programs. fp32 in contiguous memory is faster in runs."""
        return self.layout.rows or self.key.split == Split.ONE_PART

    def num_programs(self, name: str) -> int:
        """How many programs share the samples of a group in a launch."""
        # Known when the launch is made.
        self.launches[name]
        return self._num_programs[name]
