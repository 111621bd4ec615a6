"""Whitening of each item of a batch by itself: `forward` and `backward`, in the launches of a layer over a batch.

A group of the plan is a group of one item, and its samples are the item's own. γ and β are those of the item's channels
(`device/items/tiles.py`).
"""

import functools
from collections.abc import Callable

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
from iternorm.backends.triton.run import behind, in_strides, parts_of
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
        self.num_rows = rows
        super().__init__(key, x)

    def _makers(self) -> dict[str, Callable[[], Launch]]:
        return super()._makers() | {"learned": self._learned}

    def _layout_of(self, x: Tensor) -> Layout:
        size = self.key.group_size
        items, self._channels = x.shape[:2]
        self._length = x.numel() // (items * self._channels)
        self._span = self._channels // self.num_rows
        self._sets = -(-self.num_rows // size)
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
            even=size == padded and self.num_rows % size == 0,
        )

    @property
    def _tiled(self) -> Layout:
        return self._of_batch if self._flat else self.layout

    @property
    def partials(self) -> tuple[int, int]:
        return (self._side, self._span) if self._flat else super().partials

    @property
    def _value_bytes(self) -> int:
        # The tiles that depend on it were timed of whole batches.
        return 0

    def tiles_of(self, kernel: str) -> Tiles:
        tiles, small = super().tiles_of(kernel), self.layout.padded < LARGEST_NEWTON
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

    def _in_tiles(self, tiles: Tiles, kernel: str, function, pointers, constants, floats, blocks) -> Launch:
        layout, pack = self.layout, self._pack
        # No larger than an item's channel, and at least what a matrix product takes.
        samples = min(tiles.samples, max(16, pack, 1 << (self._length * pack - 1).bit_length()))
        places = self.num_sms * tiles.per_sm // layout.num_groups
        # Where there is room for several programs to a group, one more writes what is kept.
        keepers = int(kernel == "whiten" and places > 1)
        count, by_block = self._shared(places - keepers, samples)
        self._num_programs[kernel] = count
        tile = Tile(
            D=layout.group_size,
            BD=layout.padded,
            BC=self.partials[0],
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

    def unit_of(self, name: str) -> int:
        count, tile = self.num_programs(name), self.launches[name].constants["TILE"]
        if tile.BY_BLOCK and not self._flat:
            return -(-(self._span // tile.PACK) // count) * tile.PACK * self._length
        positions = tile.BL // tile.PACK
        tiles = -(-self._length // positions)
        return -(-tiles // count) * positions * (1 if self._flat else self._span)

    def _moments(self, backward: bool = False) -> Launch:
        key, fp32 = self.key, torch.float32
        if not backward:
            return self.passes("moments", item_moments, (key.dtype, fp32), {})
        learned = self.learns
        passing = Passing(SUMMED=False, RELU=key.relu, KEPT=False)
        constants = {"WEIGHT": key.weight is not None, "LEARNED": learned, "PASSING": passing}
        output, sums = key.dtype if key.relu else None, fp32 if learned else None
        pointers = (key.dtype, key.dtype, output, fp32, fp32, key.weight, sums, fp32)
        return self.passes("cross_moments", item_cross_moments, pointers, constants)

    def _learned(self) -> Launch:
        fp32, weight, integers = torch.float32, self.key.weight is not None, (self.learned_parts, self._channels)
        grid = (-(-2 * self._channels // _SUMMED_COLUMNS), 1)
        words = {"WEIGHT": weight, "ROWS": _SUMMED_PARTS, "COLUMNS": _SUMMED_COLUMNS}
        pointers = (fp32, fp32 if weight else None, fp32)
        return Launch(sum_parts, grid, pointers, (), integers, (1,), words, 4, self.key.device)

    @property
    def learns(self) -> bool:
        """Whether there is a γ or a β."""
        return self.key.weight is not None or self.key.bias is not None

    @functools.cached_property
    def learned_parts(self) -> int:
        """How many parts d(γ) and d(β) come in."""
        by_block = self.launches["cross_moments"].constants["TILE"].BY_BLOCK
        return self.layout.num_groups // self._sets * (1 if by_block else self.num_programs("cross_moments"))

    @functools.cached_property
    def sums_at(self) -> tuple[int, int]:
        """Where in the workspace of a backward the sums of dy are, and the parts of d(γ) and d(β); at 16 bytes each."""
        first = -(-super().work_size("cross_moments") // 4) * 4
        return first, first + -(-self.layout.channels // 4) * 4

    def work_size(self, name: str) -> int:
        if name != "cross_moments":
            return super().work_size(name)
        return self.sums_at[1] + (2 * self.learned_parts * self._channels if self.learns else 0)


_plans: dict[tuple, ItemPlan] = {}


def plan_for(x: Tensor, weight, bias, rows: int, group_size: int, num_iters: int, exact: bool, relu: bool) -> ItemPlan:
    weight_dtype, bias_dtype = (None if t is None else t.dtype for t in (weight, bias))
    split = split_for(x.dtype)
    key = (x.shape, x.stride(), x.dtype, x.device, rows, group_size, num_iters, split, exact, relu)
    key += (weight_dtype, bias_dtype)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        made = Key(
            *(x.shape, x.stride(), x.dtype, x.device),
            *(groups.effective_size(rows, group_size), num_iters, split),
            exact=exact,
            relu=relu,
            weight=weight_dtype,
            bias=bias_dtype,
        )
        plan = _plans[key] = ItemPlan(made, x, rows)
    return plan


def forward(x, weight, bias, rows, group_size, num_iters, eps, exact, relu) -> tuple[Tensor, Tensor, ItemPlan]:
    """Whiten the `rows` rows of every item, scale and shift; `relu` keeps what is positive.

    Returns:
        y, the state that `backward` needs, and the plan.
    """
    plan = plan_for(x, weight, bias, rows, group_size, num_iters, exact, relu)
    if plan.copied:
        x = placed(x, group_size)
    state = x.new_empty(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    partials = plan.workspace(x, "moments")
    stream, given = given_to(x.device, x, y, state, weight, bias, None, None, None, partials, None, None)
    plan.run(stream, *forward_calls(plan, given, eps, None))
    return y, state, plan


def forward_calls(plan: ItemPlan, given, eps: float, _momentum: float | None) -> tuple[tuple, tuple]:
    """The launches of a forward pass, and their arguments. `given` are those of `run.forward_calls`."""
    source, target, saved, scale, shift, *_, partials, _, _ = given
    absent = 0 if isinstance(source, int) else None
    mean, variance, _, covariance, whitening, iterates = parts_of(saved, plan)
    reduction = (partials, covariance, mean, variance, *(absent,) * 4)
    batch = (covariance, mean, variance, whitening, iterates)
    whitened = (source, target, absent, *batch, scale, shift, *(absent,) * 4, eps, 0.0)
    return ("moments", "reduce", "whiten"), ((source, partials), reduction, whitened)


def backward(
    grad, x, weight, state, plan: ItemPlan, eps, needs_input, output=None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for x (None unless `needs_input`), weight (None without one) and bias, in fp32.

    `output` is what the forward returned, where an activation was part of it.
    """
    if x.stride() != plan.stride:
        x = placed(x, plan.key.group_size)
    grad, output = in_strides(grad, x), in_strides(output, x)
    grad_bias = x.new_empty(x.shape[1], dtype=torch.float32) if plan.learns else None
    grad_weight = None if weight is None else x.new_empty(x.shape[1], dtype=torch.float32)
    dx = torch.empty_like(x) if needs_input else None
    cross = plan.workspace(x, "cross_moments")
    gradients = (grad_weight, grad_bias)
    stream, given = given_to(x.device, x, grad, output, state, dx, weight, *gradients, None, cross, None, None)
    plan.run(stream, *backward_calls(plan, given, eps, needs_input))
    return dx, grad_weight, grad_bias


def backward_calls(plan: ItemPlan, given, eps: float, needs_input: bool) -> tuple[tuple, tuple]:
    """The launches of a backward pass, and their arguments. `given` are those of `run.backward_calls`."""
    source, gradient, positive, saved, target, scale, scale_gradient, bias_gradient, _, cross, _, _ = given
    absent = 0 if isinstance(cross, int) else None
    # The first part of the workspace is for the reduced matrix, the rest for the partials.
    partials = behind(cross, plan.layout.matrix_size)
    grad_sum, parts = (behind(cross, place) for place in plan.sums_at)
    mean, _, _, covariance, whitening, iterates = parts_of(saved, plan)
    learned = parts if plan.learns else absent
    names = ("cross_moments",)
    arguments = ((gradient, source, positive, mean, whitening, scale, learned, partials),)
    if needs_input:
        names = ("cross_moments", "cross_reduce", "whiten_backward")
        activations = (gradient, source, positive, target)
        batch = (cross, covariance, mean, whitening, iterates, grad_sum)
        # d(γ) of an item is not what it writes: that is summed over the items, below.
        whitened = (*activations, *batch, scale, scale_gradient, eps)
        arguments += ((partials, cross, grad_sum, *(absent,) * 5), whitened)
    if plan.learns:
        names += ("learned",)
        arguments += ((parts, scale_gradient, bias_gradient),)
    return names, arguments
