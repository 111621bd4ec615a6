"""The verbs `moments` and `apply` in plain torch, for any device, dtype and memory format.

Planes and rows are read where they lie: no transposed and no centred copy is made. Work goes tile by tile (`tiles`)
through a workspace of a fraction of the activation, in fp32 for half and bfloat16 input. There is no autograd here:
`iternorm.whitening.autograd` makes an operation of these forward and backward passes. Matrices are padded ``[G, d, d]``
(see `iternorm.whitening.groups`).
"""

from typing import Any

import torch
from torch import Tensor

from iternorm.backends.torch.tiles import Channels, Layout, layout_for
from iternorm.whitening import modes
from iternorm.whitening.groups import pad, parts


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
    """Whether the channels of a position are contiguous: channels_last, and transposed sequences ``[N, L, C]``."""
    return is_channels_last(x) or (x.ndim == 3 and x.transpose(1, 2).is_contiguous())


def laid_out(x: Tensor) -> Tensor:
    """The activation as planes or rows, copied if it is neither, as BatchNorm does: the result has the same bits."""
    return x if x.is_contiguous() or is_rows(x) else x.contiguous()


def empty_output(x: Tensor) -> Tensor:
    """Memory for a result, laid out as x if that is planes or rows, and contiguous otherwise, as in BatchNorm.

    It is not a view: autograd forbids overwriting a view that a custom function returns, as a `ReLU(inplace=True)`
    after the layer would.
    """
    return torch.empty_like(x) if x.is_contiguous() or is_rows(x) else x.new_empty(x.shape)


def moments(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Mean ``[C]`` and biased covariance ``[G, d, d]`` (math.md, Eq. 3-4).

    Sums of squares lose accuracy where a mean is large compared with its deviation. Then the mean of the first tile is
    subtracted, tile by tile, which bounds the loss. On the CPU a glance at the first samples tells whether that is
    needed; if they misled, the activation is read once more. On other devices a glance would wait for the device, so
    the mean is always subtracted.
    """
    planes = as_planes(laid_out(x))
    means, covariances = [], []
    for part in parts(planes.shape[1], group_size):
        layout = layout_for(planes, part, compute_dtype(planes.dtype))
        view = layout.view(planes)
        needed = x.device.type != "cpu" or _is_offset(*layout.glance(view), 2)
        if not needed or len(tiles := list(layout.tiles(view, copied=True))) > 1:
            mean, covariance = _moments_about(layout, view, layout.first_mean(view) if needed else None)
        elif isinstance(layout, Channels):
            # In one pass, and without a centred copy.
            mean, variance = layout.spread(view, tiles[0])
            covariance = variance[:, :, None]
        else:
            # The mean of the first tile is the mean.
            mean = layout.first_mean(view)
            block = layout.load(view, tiles[0], mean)
            covariance = layout.product(block, block) / layout.num_samples(view)
        # Between the two limits the glance is trusted: reading once more costs more than the digit it would gain.
        if not needed and _is_offset(mean, covariance.diagonal(dim1=-2, dim2=-1), 4):
            mean, covariance = _moments_about(layout, view, mean)
        means.append(mean.flatten())
        covariances.append(covariance)
    return torch.cat(means), pad(covariances)


def _is_offset(mean: Tensor, variance: Tensor, deviations: float) -> bool:
    """Whether a mean exceeds so many deviations: sums of squares then lose accuracy by more than their square."""
    return not bool((mean.square() <= deviations**2 * variance).all())


def _moments_about(layout: Layout, view: Tensor, pilot: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean ``[G, d]`` and covariance from sums about `pilot` (zero where None)."""
    total: Any = 0
    second: Any = 0
    for tile in layout.tiles(view, copied=pilot is not None):
        block = layout.load(view, tile, pilot)
        total = total + layout.channel_sum(block)
        second = second + layout.product(block, block)
    num_samples = layout.num_samples(view)
    delta = total / num_samples
    covariance = second / num_samples - delta[:, :, None] * delta[:, None, :]
    return (delta if pilot is None else pilot + delta), covariance


def cross_moments(grad: Tensor, x: Tensor, mean: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Σ dy ``[C]`` and Σ dy (x - mean)ᵀ ``[G, d, d]`` (math.md, Eq. 21).

    No centred copy is made: the mean is subtracted from each sample's product, before products are added. That costs
    about as much accuracy as rounding x itself.
    """
    grad_planes, planes = as_planes(grad), as_planes(laid_out(x))
    sums, crosses = [], []
    for part in parts(planes.shape[1], group_size):
        layout = layout_for(planes, part, compute_dtype(planes.dtype))
        grad_view, view = layout.view(grad_planes), layout.view(planes)
        part_mean = mean[part.channels].view(part.count, part.size)
        total: Any = 0
        cross: Any = 0
        for tile in layout.tiles(view, copied=grad_view.stride() != view.stride()):
            tile_total, tile_cross = layout.cross(
                layout.load(grad_view, tile, None), layout.load(view, tile, None), part_mean
            )
            total = total + tile_total
            cross = cross + tile_cross
        sums.append(total.flatten())
        crosses.append(cross)
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
        layout = layout_for(result_planes, part, compute_dtype(result.dtype))
        views = [layout.view(p) for p in planes]
        out = layout.view(result_planes)
        part_matrices = [part.of(m) for m in matrices]
        part_offset = offset[part.channels].view(part.count, part.size)
        # An operand in another memory format than the result is transposed tile by tile.
        for tile in layout.tiles(out, copied=any(v.stride() != out.stride() for v in views)):
            layout.map(views, part_matrices, part_offset, tile, out)
    return result
