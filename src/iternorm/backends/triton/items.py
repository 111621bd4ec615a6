"""Whitening of each item of a batch by itself: `forward` and `backward`, in the launches of a layer over a batch.

A group of the plan is a group of one item, and its samples are the item's own. γ and β are those of the item's channels
(`device/items/tiles.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.torch.verbs import is_rows
from iternorm.backends.triton.device.items.moments import item_cross_moments, item_moments, sum_parts
from iternorm.backends.triton.device.tiles import Passing, Tile
from iternorm.backends.triton.layout import (
    LARGEST_NEWTON,
    MOST_GROUPS,
    Layout,
    layout_of,
    padded_size,
    placed,
)
from iternorm.backends.triton.plan import Key, Plan
from iternorm.backends.triton.precision import Split, split_for
from iternorm.backends.triton.run import in_strides, parts_of
from iternorm.backends.triton.runtime import Launch, given_to
from iternorm.backends.triton.tiling import LONGEST_SUM, Tiles, has_few_samples
from iternorm.whitening import groups

# The neighbouring channels in a tile of channels_last memory: two of the pieces of 32 bytes that memory is read in.
_PACKED_BYTES = 64
# The most channels of which a tile of channels_last memory has all: what multiplies them is as large as for a batch.
_MOST_TOGETHER = LARGEST_NEWTON
# Of contiguous memory, a tile holds positions of one channel: with fewer of them it is mostly empty.
_LEAST_POSITIONS = 16
# The block in which the parts of d(γ) and d(β) are added up: parts by columns. Many parts, because a loop waits for the
# memory at every turn, and few columns, so that several programs share the loads.
_SUMMED_PARTS, _SUMMED_COLUMNS = 256, 16


def supports(x: Tensor, rows: int, group_size: int) -> bool:
    """Whether items of this shape are computed here; the others are a view of the operation on a batch."""
    items, channels = x.shape[:2]
    values = x.numel() // items
    if group_size > LARGEST_NEWTON or values >= 2**30 or items * -(-rows // group_size) > MOST_GROUPS:
        return False
    return (is_rows(x) and not x.is_contiguous()) or values // channels >= _LEAST_POSITIONS


class ItemPlan(Plan):
    """The launches for items of one shape.

    Args:
        key: what they depend on.
        x: the batch.
        rows: of an item's matrix.
    """

    def __init__(self, key: Key, x: Tensor, rows: int):
        self._num_rows = rows
        super().__init__(key, x)

    def _makers(self) -> dict[str, Callable[[], Launch]]:
        return super()._makers() | {"learned": self._learned}

    def _layout_of(self, x: Tensor) -> Layout:
        size = self.key.group_size
        items, self._channels = x.shape[:2]
        self._length = x.numel() // (items * self._channels)
        self._span = self._channels // self._num_rows
        self._sets = -(-self._num_rows // size)
        rows = self._length == 1 or not x.is_contiguous()
        most = _PACKED_BYTES // x.element_size()
        # The largest power of two that divides the channels of a row.
        self._pack = min(self._span & -self._span, most) if rows else 1
        padded = padded_size(size)
        # Whether a tile has all channels of its positions: then the passes are those of a layer over the batch.
        together = rows and self._sets == 1 and self._channels <= _MOST_TOGETHER
        self._flat = together and 1 < self._span == self._span & -self._span
        if self._flat:
            self._pack = 1
            self._side = padded_size(self._channels)
            self._of_batch = layout_of(x, self._channels)
        return Layout(
            samples=self._span * self._length,
            channels=items * self._sets * size,
            length=self._length,
            rows=rows,
            group_size=size,
            padded=padded,
            num_groups=items * self._sets,
            # An item has fewer values, and where it begins is counted in 64 bits.
            int64=False,
            even=size == padded and self._num_rows % size == 0,
        )

    @property
    def _tiled(self) -> Layout:
        return self._of_batch if self._flat else self.layout

    @property
    def _partials(self) -> tuple[int, int]:
        return (self._side, self._span) if self._flat else super()._partials

    def _tiles(self, kernel: str) -> Tiles:
        tiles, small = super()._tiles(kernel), self.layout.padded < LARGEST_NEWTON
        if self._flat:
            # The iteration's matrices are smaller than those of a layer over a batch, and leave room for two programs,
            # which hide each other's.
            if kernel in ("cross_moments", "whiten_backward"):
                most = 2 if kernel == "whiten_backward" and self.key.split == Split.THREE_PARTS else tiles.stages
                tiles = tiles._replace(samples=min(tiles.samples, 64), warps=4, stages=min(tiles.stages, most))
            # Of few samples, each program of the moments leaves a matrix to be joined: fewer are faster (58.8 us a step
            # against 64.2 at 64x64x32x32, bf16, H200).
            alone = kernel.endswith("moments") and has_few_samples(self._tiled)
            return tiles._replace(per_sm=1 if alone else 2)
        if small:
            # Two programs fit, and are wanted: a tile of few rows has few bytes on their way.
            tiles = tiles._replace(samples=min(tiles.samples, 128 if self.key.split == Split.ONE_PART else 64))
            tiles = tiles._replace(warps=4, per_sm=2)
        if kernel == "cross_moments":
            # It has sums of the size of a tile: one, or two where a tile has several channels of each row.
            return tiles._replace(samples=min(tiles.samples, 64 if small or self._pack == 1 else 32), per_sm=2)
        return tiles

    def _in_tiles(self, tiles: Tiles, kernel: str, function, pointers, constants, floats, block, blocks) -> Launch:
        layout, pack = self.layout, self._pack
        # No larger than an item's channel, and at least what a matrix product takes.
        samples = min(tiles.samples, max(16, pack, 1 << (self._length * pack - 1).bit_length()))
        places = self._num_sms * tiles.per_sm // layout.num_groups
        # Where there is room for several programs to a group, one more writes what is kept.
        keepers = int(kernel == "whiten" and places > 1)
        count, by_block = self._shared(places - keepers, samples)
        self._num_programs[kernel] = count
        tile = Tile(
            D=layout.group_size,
            BD=layout.padded,
            BC=self._partials[0],
            BL=samples,
            ROWS=layout.rows,
            # An item fits the cache, whatever the order.
            ROUND=False,
            PARTS=int(self.key.split),
            INT64=False,
            EVEN=self._tiled.even,
            STAGES=tiles.stages,
            LONG=kernel.endswith("moments") and layout.samples > LONGEST_SUM * count,
            SPAN=self._span,
            PACK=pack,
            SETS=self._sets,
            WHOLE=self._length % (samples // pack) == 0,
            BY_BLOCK=by_block,
            FLAT=self._flat,
        )
        integers = (layout.samples, self._channels, self._length, count)
        grid = (count + keepers, layout.num_groups)
        constants = {"TILE": tile, **constants}
        dependent = not kernel.endswith("moments")
        warps, device = tiles.warps, self.key.device
        return Launch(function, grid, pointers, floats, integers, (1, 2), constants, warps, device, dependent)

    def _shared(self, wanted: int, samples: int) -> tuple[int, bool]:
        """How many programs share a group, and whether by its blocks: all tiles of some, or some tiles of all."""
        tiles, blocks = -(-self._length // (samples // self._pack)), 1 if self._flat else self._span // self._pack
        by_tile = wanted > 1 and tiles >= min(wanted, blocks)
        pieces = tiles if by_tile else blocks
        each = -(-pieces // max(wanted, 1))
        count = -(-pieces // each)
        return count, not by_tile or count == 1

    def _unit_of(self, name: str) -> int:
        count, tile = self.num_programs(name), self.launches[name].constants["TILE"]
        if tile.BY_BLOCK and not self._flat:
            return -(-(self._span // tile.PACK) // count) * tile.PACK * self._length
        positions = tile.BL // tile.PACK
        tiles = -(-self._length // positions)
        return -(-tiles // count) * positions * (1 if self._flat else self._span)

    def _moments(self, backward: bool = False) -> Launch:
        key, fp32 = self.key, torch.float32
        if not backward:
            return self._passes("moments", item_moments, (key.dtype, fp32), {})
        learned = key.weight is not None or key.bias is not None
        passing = Passing(SUMMED=False, RELU=key.relu, KEPT=False)
        constants = {"WEIGHT": key.weight is not None, "LEARNED": learned, "PASSING": passing}
        output, sums = key.dtype if key.relu else None, fp32 if learned else None
        pointers = (key.dtype, key.dtype, output, fp32, fp32, key.weight, sums, fp32)
        return self._passes("cross_moments", item_cross_moments, pointers, constants)

    def _learned(self) -> Launch:
        fp32, integers = torch.float32, (self.learned_parts, 2 * self._channels)
        grid = (-(-2 * self._channels // _SUMMED_COLUMNS), 1)
        words = {"ROWS": _SUMMED_PARTS, "COLUMNS": _SUMMED_COLUMNS}
        return Launch(sum_parts, grid, (fp32, fp32), (), integers, (1,), words, 4, self.key.device)

    @functools.cached_property
    def learned_parts(self) -> int:
        """How many parts d(γ) and d(β) come in."""
        by_block = self.launches["cross_moments"].constants["TILE"].BY_BLOCK
        return self.layout.num_groups // self._sets * (1 if by_block else self.num_programs("cross_moments"))


_plans: dict[tuple, ItemPlan] = {}


def _plan_for(x: Tensor, weight, bias, rows: int, group_size: int, num_iters: int, exact: bool, relu: bool) -> ItemPlan:
    weight_dtype, bias_dtype = (None if t is None else t.dtype for t in (weight, bias))
    split = split_for(x.dtype)
    key = (x.shape, x.stride(), x.dtype, x.device, rows, group_size, num_iters, split, exact, relu)
    key += (weight_dtype, bias_dtype)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        size = groups.effective_size(rows, group_size)
        made = Key(
            shape=x.shape,
            stride=x.stride(),
            dtype=x.dtype,
            device=x.device,
            group_size=size,
            num_iters=num_iters,
            split=split,
            exact=exact,
            relu=relu,
            residual=False,
            summed=False,
            weight=weight_dtype,
            bias=bias_dtype,
            running=None,
            ranks=0,
        )
        plan = _plans[key] = ItemPlan(made, x, rows)
    return plan


def forward(x, weight, bias, rows, group_size, num_iters, eps, exact, relu) -> tuple[Tensor, Tensor, ItemPlan]:
    """Whiten the `rows` rows of every item, scale and shift; `relu` keeps what is positive.

    Returns:
        y, the state that `backward` needs, and the plan.
    """
    plan = _plan_for(x, weight, bias, rows, group_size, num_iters, exact, relu)
    if plan.copied:
        x = placed(x, group_size)
    state = x.new_empty(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    stream, given = given_to(x.device, x, y, state, weight, bias)
    source, target, saved, scale, shift = given
    partials: Any = plan.workspace(x, "moments")
    absent: Any = None
    if stream is not None:
        absent, partials = 0, partials.data_ptr()
    mean, variance, _, covariance, whitening, iterates = parts_of(saved, plan)
    reduction = (partials, covariance, mean, variance, *(absent,) * 4)
    batch = (covariance, mean, variance, whitening, iterates)
    whitened = (source, target, absent, *batch, scale, shift, *(absent,) * 4, eps, 0.0)
    plan.run(stream, ("moments", "reduce", "whiten"), ((source, partials), reduction, whitened))
    return y, state, plan


def backward(
    grad, x, weight, state, plan: ItemPlan, eps, needs_input, output=None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for x (None unless `needs_input`), weight and bias, in fp32 (None if nothing is learned).

    `output` is what the forward returned, where an activation was part of it.
    """
    if x.stride() != plan.stride:
        x = placed(x, plan.key.group_size)
    grad, output = in_strides(grad, x), in_strides(output, x)
    learns = plan.key.weight is not None or plan.key.bias is not None
    learned = result = None
    if learns:
        learned = x.new_empty(plan.learned_parts, 2, x.shape[1], dtype=torch.float32)
        result = x.new_empty(2, x.shape[1], dtype=torch.float32)
    dx = torch.empty_like(x) if needs_input else None
    total = x.new_empty(plan.layout.channels, dtype=torch.float32)
    stream, given = given_to(x.device, x, grad, output, state, dx, weight, learned, result, total)
    source, gradient, positive, saved, target, scale, parts, sums, grad_sum = given
    cross: Any = plan.workspace(x, "cross_moments")
    # The first part of the workspace is for the reduced matrix, the rest for the partials.
    half = plan.layout.num_groups * plan.layout.padded**2
    if stream is not None:
        cross = cross.data_ptr()
        absent, partials = 0, cross + 4 * half
    else:
        absent, partials = None, cross[half:]
    mean, _, _, covariance, whitening, iterates = parts_of(saved, plan)
    names = ("cross_moments",)
    arguments = ((gradient, source, positive, mean, whitening, scale, parts, partials),)
    if needs_input:
        names = ("cross_moments", "cross_reduce", "whiten_backward")
        activations = (gradient, source, positive, target)
        batch = (cross, covariance, mean, whitening, iterates, grad_sum)
        whitened = (*activations, *batch, scale, absent, eps)
        arguments += ((partials, cross, grad_sum, *(absent,) * 5), whitened)
    if learns:
        names += ("learned",)
        arguments += ((parts, sums),)
    plan.run(stream, names, arguments)
    if result is None:
        return dx, None, None
    grad_weight, grad_bias = result
    return dx, grad_weight, grad_bias
