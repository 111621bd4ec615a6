"""An activation in tiles: planes of contiguous memory, rows of channels_last memory, or single channels of either.

A layout says how the channels of one part of the groups are viewed, which tiles they are read in, and how a tile is
loaded, summed, multiplied and mapped. Tiles are in the compute dtype and take a fraction of the activation's memory.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from iternorm.whitening.groups import Part

# The largest workspace tile, in elements: 4 MB of fp32. On two cores of an AMD EPYC with 1 MB of L2 each and 32 MB of
# L3, tiles of an eighth of a 64x64x32x32 activation take as long as one product over all of it; smaller ones take more.
TILE = 1 << 20
TILES = 8
# On a GPU every tile costs several launches, and caches give no reason for small ones: up to 256 MB of fp32.
DEVICE_TILE = 1 << 26
# On a CPU a product of small matrices adds up its rows in one go: of a million values the sum is off by 3e-5.
SPAN = 1 << 16


def layout_for(planes: Tensor, part: Part, dtype: torch.dtype) -> "Layout":
    """The layout of ``[N, C, L]``, computed in `dtype`."""
    if part.size == 1:
        return Channels(part, dtype)
    # Rows serve channels_last, and planes too short for a matrix product each: those are transposed tile by tile.
    channels_last = planes.stride(1) == 1 and planes.shape[1] > 1
    return Rows(part, dtype) if channels_last or planes.shape[2] < part.size else Planes(part, dtype)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


class Planes:
    """Tiles of ``[n, G, d, l]``: planes of a contiguous activation, one matrix per sample and group."""

    def __init__(self, part: Part, dtype: torch.dtype):
        self.part, self.dtype = part, dtype

    def view(self, planes: Tensor) -> Tensor:
        return planes[:, self.part.channels].unflatten(1, (self.part.count, self.part.size))

    def tiles(self, view: Tensor, copied: bool) -> Iterator[tuple[slice, slice]]:
        batch, count, size, length = view.shape
        # Samples and groups are one batch of matrices unless a ragged last group lies between them. Then the product of
        # moments copies its operands, so they must be tiles.
        merged = count == 1 or view.stride(0) == count * view.stride(1)
        if not copied and merged and view.dtype == self.dtype:
            # The only workspace is a d by d matrix for each sample and group: at most a sixteenth of the activation, or
            # 1 MB of fp32 if that is more.
            least = TILE // 4 if view.device.type == "cpu" else DEVICE_TILE
            matrices = max(view.numel() // 16, least) // (count * size * size)
            samples, positions = max(1, min(batch, matrices)), length
        else:
            samples, positions = _tile_shape(view, batch, length)
        return ((n, s) for n in _slices(batch, samples) for s in _slices(length, positions))

    @staticmethod
    def num_samples(view: Tensor) -> int:
        return view.shape[0] * view.shape[3]

    def glance(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the first sample's first 256 positions, ``[G, d]``."""
        block = self.load(view, (slice(0, 1), slice(0, min(view.shape[3], 256))), None)
        variance, mean = torch.var_mean(block, (0, 3), correction=0)
        return mean, variance

    def first_mean(self, view: Tensor) -> Tensor:
        """The mean of the first tile, ``[G, d]``."""
        return self.load(view, next(self.tiles(view, copied=True)), None).mean((0, 3))

    def load(self, view: Tensor, tile: tuple[slice, slice], shift: Tensor | None) -> Tensor:
        """The tile in the compute dtype, minus `shift` ``[G, d]``; copied only where necessary."""
        block = view[tile[0], :, :, tile[1]]
        if shift is None:
            block = block.to(self.dtype)
            return block if block.stride(3) == 1 else block.contiguous()
        return torch.sub(block, shift[:, :, None], out=torch.empty(block.shape, dtype=self.dtype, device=block.device))

    @staticmethod
    def channel_sum(block: Tensor) -> Tensor:
        return block.sum((0, 3))

    @staticmethod
    def product(left: Tensor, right: Tensor) -> Tensor:
        """Σ over samples and positions of left rightᵀ, ``[G, d, d]``."""
        if left is right and left.shape[2] >= 64:
            # A Gram matrix is symmetric: the lower left quarter is the upper right one.
            half = left.shape[2] // 2
            top = torch.matmul(left[:, :, :half], left.mT).sum(0)
            corner = torch.matmul(left[:, :, half:], left[:, :, half:].mT).sum(0)
            return torch.cat([top, torch.cat([top[:, :, half:].mT, corner], 2)], 1)
        return _added(torch.matmul(a, b.mT).sum(0) for a, b in _spans(left, right, 3))

    @staticmethod
    def cross(left: Tensor, right: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Σ left ``[G, d]`` and Σ left (right - mean)ᵀ ``[G, d, d]`` over samples and positions."""
        totals = left.sum(3)
        products = _added(torch.matmul(a, b.mT) for a, b in _spans(left, right, 3))
        products.addcmul_(totals[..., None], mean[:, None, :], value=-1)
        return totals.sum(0), products.sum(0)

    def map(self, views, matrices, offset, tile, out) -> None:
        count, size = self.part.count, self.part.size
        target = out[tile[0], :, :, tile[1]]
        blocks = [self.load(view, tile, None) for view in views]
        # The product is written in place if the target is one block of memory of the right dtype, and group by group if
        # a ragged last group lies between the samples.
        if target.dtype == offset.dtype and target.is_contiguous():
            shape = (target.shape[0] * count, size, -1)
            _products([b.reshape(shape) for b in blocks], matrices, offset, target.view(shape))
        elif target.dtype == offset.dtype and target.stride(3) == 1:
            for g in range(count):
                _products([b[:, g] for b in blocks], [m[g] for m in matrices], offset[g : g + 1], target[:, g])
        else:
            result = target.new_empty(target.shape, dtype=offset.dtype)
            shape = (target.shape[0] * count, size, -1)
            _products([b.reshape(shape) for b in blocks], matrices, offset, result.view(shape))
            target.copy_(result)


def _products(blocks: list[Tensor], matrices: list[Tensor], offset: Tensor, out: Tensor) -> None:
    """Σ_i A_i x_i + c for ``[n G, d, l]``, into `out`."""
    samples = out.shape[0] // offset.shape[0]
    start = offset[:, :, None].expand(samples, *offset.shape, 1).reshape(-1, offset.shape[1], 1)
    for block, matrix in zip(blocks, matrices, strict=True):
        left = matrix.expand(samples, *offset.shape, offset.shape[1]).reshape(-1, *matrix.shape[-2:])
        start = torch.baddbmm(start, left, block, out=out)


class Rows:
    """Tiles of ``[G, r, d]``: rows of channels, as channels_last memory has them."""

    def __init__(self, part: Part, dtype: torch.dtype):
        self.part, self.dtype = part, dtype

    def view(self, planes: Tensor) -> Tensor:
        """``[G, N, L, d]``."""
        rows = planes[:, self.part.channels].transpose(1, 2)
        return rows.unflatten(2, (self.part.count, self.part.size)).permute(2, 0, 1, 3)

    def tiles(self, view: Tensor, copied: bool) -> Iterator[tuple[slice, slice]]:
        if not copied and self.part.count == 1 and view.is_contiguous() and view.dtype == self.dtype:
            return iter([(slice(0, view.shape[1]), slice(0, view.shape[2]))])
        samples, positions = _tile_shape(view, view.shape[1], view.shape[2])
        return ((n, s) for n in _slices(view.shape[1], samples) for s in _slices(view.shape[2], positions))

    @staticmethod
    def num_samples(view: Tensor) -> int:
        return view.shape[1] * view.shape[2]

    def glance(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the first 256 rows or more, ``[G, d]``."""
        samples = min(view.shape[1], -(-256 // view.shape[2]))
        block = self.load(view, (slice(0, samples), slice(0, view.shape[2])), None)
        variance, mean = torch.var_mean(block, 1, correction=0)
        return mean, variance

    def first_mean(self, view: Tensor) -> Tensor:
        return self.load(view, next(self.tiles(view, copied=True)), None).mean(1)

    def load(self, view: Tensor, tile: tuple[slice, slice], shift: Tensor | None) -> Tensor:
        block = view[:, tile[0], tile[1]]
        if shift is None:
            block = block.flatten(1, 2).to(self.dtype)
            return block if block.stride(2) == 1 else block.contiguous()
        place = torch.empty(block.shape, dtype=self.dtype, device=block.device)
        return torch.sub(block, shift[:, None, None, :], out=place).flatten(1, 2)

    @staticmethod
    def channel_sum(block: Tensor) -> Tensor:
        return block.sum(1)

    @staticmethod
    def product(left: Tensor, right: Tensor) -> Tensor:
        if _is_long(left, 1):
            return _added(Rows.product(a, b) for a, b in _spans(left, right, 1))
        left, right = _pieces(left), _pieces(right)
        return torch.matmul(left.mT, right).sum(1)

    @staticmethod
    def cross(left: Tensor, right: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        if _is_long(left, 1):
            sums, crosses = zip(*(Rows.cross(a, b, mean) for a, b in _spans(left, right, 1)), strict=True)
            return _added(sums), _added(crosses)
        left = _pieces(left)
        right = _pieces(right)
        totals = left.sum(2)
        products = torch.matmul(left.mT, right)
        products.addcmul_(totals[..., None], mean[:, None, None, :], value=-1)
        return totals.sum(1), products.sum(1)

    def map(self, views, matrices, offset, tile, out) -> None:
        target = out[:, tile[0], tile[1]]
        shape = (self.part.count, -1, self.part.size)
        direct = target.is_contiguous() and target.dtype == offset.dtype
        result = target.view(shape) if direct else target.new_empty(target.shape, dtype=offset.dtype).view(shape)
        start = offset[:, None, :]
        for view, matrix in zip(views, matrices, strict=True):
            start = torch.baddbmm(start, self.load(view, tile, None), matrix.mT, out=result)
        if not direct:
            target.copy_(result.view(target.shape))


class Channels:
    """Tiles of ``[n, C, l]``, each channel a group of its own: BatchNorm's sums and maps, in any memory order.

    As products of 1x1 matrices they would take many times as long.
    """

    def __init__(self, part: Part, dtype: torch.dtype):
        self.part, self.dtype = part, dtype

    def view(self, planes: Tensor) -> Tensor:
        return planes[:, self.part.channels]

    def tiles(self, view: Tensor, copied: bool) -> Iterator[tuple[slice, slice]]:
        samples, positions = _tile_shape(view, view.shape[0], view.shape[2])
        return ((n, s) for n in _slices(view.shape[0], samples) for s in _slices(view.shape[2], positions))

    @staticmethod
    def num_samples(view: Tensor) -> int:
        return view.shape[0] * view.shape[2]

    def glance(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the first 256 values of each channel or more, ``[C, 1]``."""
        samples = min(view.shape[0], -(-256 // view.shape[2]))
        return self.spread(view, (slice(0, samples), slice(0, view.shape[2])))

    def spread(self, view: Tensor, tile: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a tile, ``[C, 1]``."""
        variance, mean = torch.var_mean(self.load(view, tile, None), (0, 2), correction=0)
        return mean[:, None], variance[:, None]

    def first_mean(self, view: Tensor) -> Tensor:
        return self.load(view, next(self.tiles(view, copied=True)), None).mean((0, 2))[:, None]

    def load(self, view: Tensor, tile: tuple[slice, slice], shift: Tensor | None) -> Tensor:
        block = view[tile[0], :, tile[1]].to(self.dtype)
        return block if shift is None else block - shift

    @staticmethod
    def channel_sum(block: Tensor) -> Tensor:
        return block.sum((0, 2))[:, None]

    @staticmethod
    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum((0, 2))[:, None, None]

    def cross(self, left: Tensor, right: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return self.channel_sum(left), self.product(left, right - mean)

    def map(self, views, matrices, offset, tile, out) -> None:
        target = out[tile[0], :, tile[1]]
        place = target if target.dtype == self.dtype else torch.empty_like(target, dtype=self.dtype)
        start = offset
        for view, matrix in zip(views, matrices, strict=True):
            start = torch.addcmul(start, self.load(view, tile, None), matrix[:, 0], out=place)
        if place is not target:
            target.copy_(place)


Layout = Planes | Rows | Channels


def _spans(left: Tensor, right: Tensor, dim: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Two operands of a product, cut along the dimension that it adds up if that is long."""
    if not _is_long(left, dim):
        return [(left, right)]
    return zip(left.split(SPAN, dim), right.split(SPAN, dim), strict=True)


def _is_long(block: Tensor, dim: int) -> bool:
    return block.device.type == "cpu" and block.shape[dim] > SPAN


def _added(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _pieces(rows: Tensor) -> Tensor:
    """``[G, r, d]`` as ``[G, p, r / p, d]``.

    One long product of small matrices keeps one core busy; several shorter ones use all cores. Products along strided
    rows are slow (15 ms against 7 for two groups of 64 in 64x128x32x32), so a tile is packed first.
    """
    pieces = next(p for p in (8, 4, 2, 1) if rows.shape[1] % p == 0)
    return rows.contiguous().unflatten(1, (pieces, rows.shape[1] // pieces))


def _tile_shape(view: Tensor, batch: int, length: int) -> tuple[int, int]:
    """Samples and positions of a tile: an eighth of the activation, and at most `TILE` elements where possible."""
    numel = view.numel()
    if view.device.type == "cpu":
        tiles = min(max(TILES, -(-numel // TILE)), max(1, numel // (TILE // 16)))
    else:
        tiles = max(1, -(-numel // DEVICE_TILE))
    samples = max(1, batch // tiles)
    positions = length if batch >= tiles else max(1, -(-length * batch // tiles))
    return samples, positions
