"""The verbs `moments` and `apply` in plain torch, for any device, dtype and memory format.

Planes and rows are read where they lie: no transposed and no centred copy of them is made. Work goes tile by tile
through a workspace of a fraction of the activation, in fp32 for half and bfloat16 input. There is no autograd here:
these are the forward and backward passes that `iternorm.whitening.autograd` joins. Matrices are padded ``[G, d, d]``
(see `iternorm.whitening.groups`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from iternorm.whitening import modes
from iternorm.whitening.groups import Part, pad, parts

# The largest workspace tile, in elements: 4 MB of fp32. On two cores of an AMD EPYC with 1 MB of L2 each and 32 MB of
# L3, tiles of an eighth of a 64x64x32x32 activation cost what one product over the whole costs; smaller ones cost more.
_TILE = 1 << 20
_TILES = 8
# On a GPU every tile costs several launches, and the caches are no reason for small ones: up to 256 MB of fp32.
_DEVICE_TILE = 1 << 26


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and accumulation: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_planes(x: Tensor) -> Tensor:
    """The activation as ``[N, C, L]``, a view for contiguous and for channels_last memory."""
    return x.unsqueeze(2) if x.ndim == 2 else x.flatten(2)


def is_channels_last(x: Tensor) -> bool:
    """Whether an activation of four or five dimensions lies in channels_last memory."""
    if modes.is_mapped(x):
        return False
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)


def is_rows(x: Tensor) -> bool:
    """Whether the channels of a position lie together: channels_last, and sequences ``[N, L, C]`` transposed."""
    return is_channels_last(x) or (x.ndim == 3 and x.transpose(1, 2).is_contiguous())


def laid_out(x: Tensor) -> Tensor:
    """The activation as planes or rows, copied where it is neither: as BatchNorm does, and so to the same bits."""
    return x if x.is_contiguous() or is_rows(x) else x.contiguous()


def empty_output(x: Tensor) -> Tensor:
    """Memory for a result laid out as x where that is planes or rows, and contiguous else: as BatchNorm has it.

    It is no view itself: autograd forbids to overwrite a view that a custom function returns, as `ReLU(inplace=True)`
    after the layer does.
    """
    return torch.empty_like(x) if x.is_contiguous() or is_rows(x) else x.new_empty(x.shape)


def moments(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Mean ``[C]`` and biased covariance ``[G, d, d]`` (math.md, Eq. 3-4).

    Sums of squares lose accuracy where a mean is large beside its deviation: then the mean of the first tile is
    subtracted, tile by tile, which bounds the loss. On the CPU a glance at the first samples tells whether that is
    needed; if they misled, the activation is read once more. Elsewhere a glance would wait for the device, so it is
    always done.
    """
    planes = as_planes(laid_out(x))
    means, covariances = [], []
    for part in parts(planes.shape[1], group_size):
        layout = _layout(planes, part)
        view = layout.view(planes)
        needed = x.device.type != "cpu" or _is_offset(*layout.glance(view), 2)
        if needed and len(tiles := list(layout.tiles(view, copied=True))) == 1:
            # The mean of the first tile is the mean.
            mean = layout.first_mean(view)
            block = layout.load(view, tiles[0], mean)
            covariance = layout.product(block, block) / layout.num_samples(view)
        else:
            mean, covariance = _moments_about(layout, view, layout.first_mean(view) if needed else None)
        # Between the two limits the glance is trusted: reading once more costs more than the digit it would win.
        if not needed and _is_offset(mean, covariance.diagonal(dim1=-2, dim2=-1), 4):
            mean, covariance = _moments_about(layout, view, mean)
        means.append(mean.flatten())
        covariances.append(covariance)
    return torch.cat(means), pad(covariances)


def _is_offset(mean: Tensor, variance: Tensor, deviations: float) -> bool:
    """Whether a mean is above so many deviations: sums of squares then lose accuracy by more than their square."""
    return not bool((mean.square() <= deviations**2 * variance).all())


def _moments_about(layout: "_Planes | _Rows", view: Tensor, pilot: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean ``[G, d]`` and covariance from sums about `pilot` (zero where None)."""
    total = second = 0
    for tile in layout.tiles(view, copied=pilot is not None):
        block = layout.load(view, tile, pilot)
        total = total + layout.channel_sum(block)
        second = second + layout.product(block, block)
    num_samples = layout.num_samples(view)
    delta = torch.as_tensor(total) / num_samples
    covariance = torch.as_tensor(second) / num_samples - delta[:, :, None] * delta[:, None, :]
    return (delta if pilot is None else pilot + delta), covariance


def cross_moments(grad: Tensor, x: Tensor, mean: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Σ dy ``[C]`` and Σ dy (x - mean)ᵀ ``[G, d, d]`` (math.md, Eq. 21).

    No centred copy is made: the mean is taken out of each sample's product, before products are added up. What that
    costs in accuracy is about what rounding x itself does.
    """
    grad_planes, planes = as_planes(grad), as_planes(laid_out(x))
    sums, crosses = [], []
    for part in parts(planes.shape[1], group_size):
        layout = _layout(planes, part)
        grad_view, view = layout.view(grad_planes), layout.view(planes)
        part_mean = mean[part.channels].view(part.count, part.size)
        total = cross = 0
        for tile in layout.tiles(view, copied=grad_view.stride() != view.stride()):
            tile_total, tile_cross = layout.cross(
                layout.load(grad_view, tile, None), layout.load(view, tile, None), part_mean
            )
            total = total + tile_total
            cross = cross + tile_cross
        sums.append(torch.as_tensor(total).flatten())
        crosses.append(torch.as_tensor(cross))
    return torch.cat(sums), pad(crosses)


def apply(x: Tensor, matrix: Tensor, offset: Tensor, group_size: int) -> Tensor:
    """y = A x + c for each group: A ``[G, d, d]``, c ``[C]`` (math.md, Eq. 2)."""
    return _map([x], [matrix], offset, group_size)


def apply_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor, offset: Tensor, group_size: int) -> Tensor:
    """dx = A dy + B x + c for each group, in the memory format of x (math.md, Eq. 24)."""
    return _map([x, grad], [second, first], offset, group_size)


def _map(inputs: list[Tensor], matrices: list[Tensor], offset: Tensor, group_size: int) -> Tensor:
    """Σ_i A_i x_i + c; the result is laid out as the first input."""
    planes = [as_planes(laid_out(inputs[0])), *map(as_planes, inputs[1:])]
    result = empty_output(inputs[0])
    result_planes = as_planes(result)
    for part in parts(result.shape[1], group_size):
        layout = _layout(result_planes, part)
        views = [layout.view(p) for p in planes]
        out = layout.view(result_planes)
        part_matrices = [part.of(m) for m in matrices]
        part_offset = offset[part.channels].view(part.count, part.size)
        # An operand in another memory format than the result is transposed tile by tile.
        for tile in layout.tiles(out, copied=any(v.stride() != out.stride() for v in views)):
            layout.map(views, part_matrices, part_offset, tile, out)
    return result


def _layout(planes: Tensor, part: Part) -> "_Planes | _Rows":
    # Rows serve channels_last, and planes too short for a matrix product each: those are transposed tile by tile.
    channels_last = planes.stride(1) == 1 and planes.shape[1] > 1
    return _Rows(part) if channels_last or planes.shape[2] < part.size else _Planes(part)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


class _Planes:
    """Tiles of ``[n, G, d, l]``: whole planes of a contiguous activation, one matrix a sample and group."""

    def __init__(self, part: Part):
        self.part = part

    def view(self, planes: Tensor) -> Tensor:
        return planes[:, self.part.channels].unflatten(1, (self.part.count, self.part.size))

    def tiles(self, view: Tensor, copied: bool) -> Iterator[tuple[slice, slice]]:
        batch, count, size, length = view.shape
        # Samples and groups are one batch of matrices unless a ragged last group lies between them: then the product
        # of moments copies its operands, and those must be tiles.
        merged = count == 1 or view.stride(0) == count * view.stride(1)
        if not copied and merged and view.dtype == compute_dtype(view.dtype):
            # No workspace but one d by d matrix for each sample and group: at most a sixteenth
            # of it, or 1 MB of fp32 where that is more.
            least = _TILE // 4 if view.device.type == "cpu" else _DEVICE_TILE
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
        """The tile in the compute dtype, less `shift` ``[G, d]``; no copy where none is needed."""
        block = view[tile[0], :, :, tile[1]]
        dtype = compute_dtype(view.dtype)
        if shift is None:
            block = block.to(dtype)
            return block if block.stride(3) == 1 else block.contiguous()
        return torch.sub(block, shift[:, :, None], out=torch.empty(block.shape, dtype=dtype, device=block.device))

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
        return torch.matmul(left, right.mT).sum(0)

    @staticmethod
    def cross(left: Tensor, right: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Σ left ``[G, d]`` and Σ left (right - mean)ᵀ ``[G, d, d]`` over samples and positions."""
        totals = left.sum(3)
        products = torch.matmul(left, right.mT)
        products.addcmul_(totals[..., None], mean[:, None, :], value=-1)
        return totals.sum(0), products.sum(0)

    def map(self, views, matrices, offset, tile, out) -> None:
        count, size = self.part.count, self.part.size
        target = out[tile[0], :, :, tile[1]]
        blocks = [self.load(view, tile, None) for view in views]
        # The product is written where it belongs if that is one block of memory of the right dtype, or group by group
        # if a ragged last group lies between the samples.
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


class _Rows:
    """Tiles of ``[G, r, d]``: rows of channels, as channels_last memory has them."""

    def __init__(self, part: Part):
        self.part = part

    def view(self, planes: Tensor) -> Tensor:
        """``[G, N, L, d]``."""
        rows = planes[:, self.part.channels].transpose(1, 2)
        return rows.unflatten(2, (self.part.count, self.part.size)).permute(2, 0, 1, 3)

    def tiles(self, view: Tensor, copied: bool) -> Iterator[tuple[slice, slice]]:
        if not copied and self.part.count == 1 and view.is_contiguous() and view.dtype == compute_dtype(view.dtype):
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
        dtype = compute_dtype(view.dtype)
        if shift is None:
            block = block.flatten(1, 2).to(dtype)
            return block if block.stride(2) == 1 else block.contiguous()
        place = torch.empty(block.shape, dtype=dtype, device=block.device)
        return torch.sub(block, shift[:, None, None, :], out=place).flatten(1, 2)

    @staticmethod
    def channel_sum(block: Tensor) -> Tensor:
        return block.sum(1)

    @staticmethod
    def product(left: Tensor, right: Tensor) -> Tensor:
        left, right = _pieces(left), _pieces(right)
        return torch.matmul(left.mT, right).sum(1)

    @staticmethod
    def cross(left: Tensor, right: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
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


def _pieces(rows: Tensor) -> Tensor:
    """``[G, r, d]`` as ``[G, p, r / p, d]``.

    One long product of small matrices keeps one core busy; several shorter ones share the cores. Products along strided
    rows are slow (15 ms against 7 for two groups of 64 in 64x128x32x32), so a tile is packed first.
    """
    pieces = next(p for p in (8, 4, 2, 1) if rows.shape[1] % p == 0)
    return rows.contiguous().unflatten(1, (pieces, rows.shape[1] // pieces))


def _tile_shape(view: Tensor, batch: int, length: int) -> tuple[int, int]:
    """Samples and positions of a tile: an eighth of the activation, at most `_TILE` elements where that is possible."""
    numel = view.numel()
    if view.device.type == "cpu":
        tiles = min(max(_TILES, -(-numel // _TILE)), max(1, numel // (_TILE // 16)))
    else:
        tiles = max(1, -(-numel // _DEVICE_TILE))
    samples = max(1, batch // tiles)
    positions = length if batch >= tiles else max(1, -(-length * batch // tiles))
    return samples, positions
