"""Eval-mode whitening on weights and on pairs of layers: the verb `apply`, multiplied into a neighbour.

In eval a whitening layer is y = A x + c, with A block-diagonal over its groups. After a linear map it goes into that
map's weight and bias, exactly; before one, too, unless zeros are padded in between; anywhere it is one 1x1 convolution.
Products are computed in fp64.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import _Rank2d, _Rank3d
from iternorm.layers.per_sample import PerSampleWhitening
from iternorm.models.fold import dataflow
from iternorm.models.followed import Followed, has_own_forward
from iternorm.whitening import groups
from iternorm.whitening.autograd import fold_affine


def eval_map(norm: WhiteningNorm) -> tuple[Tensor, Tensor]:
    """A ``[C, C]`` (block-diagonal) and c ``[C]`` of the layer's eval output y = A x + c, in fp64.

    An activation that the layer has comes after it.
    """
    _check_norm(norm)
    if norm.running_mean is None:
        raise ValueError(
            f"{type(norm).__name__} keeps no running statistics (track_running_stats=False), so it has no fixed map"
        )
    size = groups.effective_size(norm.num_features, norm.group_size)
    weight, bias = (None if p is None else p.detach().double() for p in (norm.weight, norm.bias))
    mean = norm.running_mean.detach().double()
    blocks, offset = fold_affine(norm.whitening_matrix().double(), mean, weight, bias, size)
    parts = groups.parts(norm.num_features, norm.group_size)
    return torch.block_diag(*(block for part in parts for block in part.of(blocks))), offset


def fold_into_previous(
    weight: Tensor, bias: Tensor | None, matrix: Tensor, offset: Tensor, *, groups: int = 1, transposed: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Weight, bias and number of groups of A (W x + b) + c: a linear map with the one after it multiplied in.

    Args:
        weight: ``[O, I / groups, ...]`` of a linear layer or convolution, ``[I, O / groups, ...]`` if `transposed`.
        bias: ``[O]``.
        matrix: A, ``[O, O]``.
        offset: c, ``[O]``.
        groups: of the convolution. Where A mixes them, the result has fewer, wider groups.
        transposed: the weight is that of a transposed convolution.

    Example:
        >>> weight, bias, _ = fold_into_previous(torch.eye(2), None, torch.eye(2) * 3, torch.ones(2))
        >>> weight.diagonal(), bias
        (tensor([3., 3.]), tensor([1., 1.]))
    """
    dtype, tail = weight.dtype, weight.shape[2:]
    blocks = _blocks(weight, groups, transposed)  # [g, O / g, I / g, K]
    num_outputs = blocks.shape[0] * blocks.shape[1]
    _check_map(matrix, offset, num_outputs, "output")
    wide = num_groups(matrix, groups)
    blocks = _widen(blocks, wide)
    diagonal = _diagonal_blocks(matrix.double(), wide)
    result = torch.einsum("gpo,goik->gpik", diagonal, blocks)
    shift = offset.double() if bias is None else offset.double() + matrix.double() @ bias.detach().double()
    return _unblock(result, tail, transposed).to(dtype), shift.to(dtype), wide


def fold_into_next(
    weight: Tensor, bias: Tensor | None, matrix: Tensor, offset: Tensor, *, groups: int = 1
) -> tuple[Tensor, Tensor, int]:
    """Weight, bias and number of groups of W (A x + c) + b: a linear map with the one before it multiplied in.

    Exact for a linear layer, and for a convolution that does not pad with zeros. Arguments as `fold_into_previous`,
    with A ``[I, I]`` and c ``[I]``.
    """
    dtype, tail = weight.dtype, weight.shape[2:]
    blocks = _blocks(weight, groups, False)
    _check_map(matrix, offset, blocks.shape[0] * blocks.shape[2], "input")
    shift = torch.einsum("goik,gi->go", blocks, offset.double().view(groups, -1)).flatten()
    shift = shift if bias is None else shift + bias.detach().double()
    wide = num_groups(matrix, groups)
    result = torch.einsum("goik,gij->gojk", _widen(blocks, wide), _diagonal_blocks(matrix.double(), wide))
    return _unblock(result, tail, False).to(dtype), shift.to(dtype), wide


def num_groups(matrix: Tensor, most: int) -> int:
    """The largest divisor of `most` into whose groups of channels the matrix falls: it mixes none of them."""
    row, column = matrix.nonzero(as_tuple=True)
    for candidate in range(most, 0, -1):
        size = len(matrix) // candidate
        if most % candidate == 0 and bool((row // size == column // size).all()):
            return candidate
    return 1


def _check_map(matrix: Tensor, offset: Tensor, channels: int, side: str) -> None:
    if matrix.shape != (channels, channels) or offset.shape != (channels,):
        raise ValueError(
            f"matrix has shape {list(matrix.shape)} and offset {list(offset.shape)}; a weight of {channels} {side} "
            f"channels needs {[channels, channels]} and {[channels]}"
        )


def _blocks(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """A weight as ``[g, O / g, I / g, K]`` in fp64."""
    blocks = weight.detach().double().flatten(2) if weight.ndim > 2 else weight.detach().double()[:, :, None]
    blocks = blocks.unflatten(0, (groups, -1))
    return blocks.transpose(1, 2) if transposed else blocks


def _unblock(blocks: Tensor, tail: torch.Size, transposed: bool) -> Tensor:
    blocks = blocks.transpose(1, 2) if transposed else blocks
    return blocks.flatten(0, 1).reshape(-1, blocks.shape[2], *tail)


def _widen(blocks: Tensor, wide: int) -> Tensor:
    """The same map with `wide` groups, each holding several of the old ones on its diagonal."""
    count, outputs, inputs, taps = blocks.shape
    each = count // wide
    result = blocks.new_zeros(wide, each, outputs, each, inputs, taps)
    index = torch.arange(each, device=blocks.device)
    result[:, index, :, index] = blocks.view(wide, each, outputs, inputs, taps).transpose(0, 1)
    return result.view(wide, each * outputs, each * inputs, taps)


def _diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    size = len(matrix) // count
    return torch.stack([matrix[i : i + size, i : i + size] for i in range(0, len(matrix), size)])


def fold_into_previous_layer(layer: Any, norm: WhiteningNorm) -> nn.Module:
    """A copy of a convolution, transposed convolution or linear layer with the eval-mode `norm` after it multiplied in.

    The linear layer's output must be ``[N, C]``: there the features are what the norm takes for channels.
    """
    _check_pair(layer, norm)
    matrix, offset = eval_map(norm)
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    options = {"groups": getattr(layer, "groups", 1), "transposed": transposed}
    return with_weights(layer, fold_into_previous(layer.weight, layer.bias, matrix, offset, **options))


def fold_into_next_layer(norm: WhiteningNorm, layer: Any) -> nn.Module:
    """A copy of a convolution or linear layer with the eval-mode `norm` before it multiplied in.

    Raises ValueError for a convolution that pads with zeros, and for a transposed one: zeros that are padded in after
    the norm would not be zeros before it, so there is no exact fold.
    """
    _check_pair(layer, norm)
    if not takes_a_shift(layer):
        raise ValueError(
            f"{type(layer).__name__} pads with zeros after the norm, so folding would not be exact; "
            "use iternorm.fold_pointwise(norm)"
        )
    return with_weights(
        layer, fold_into_next(layer.weight, layer.bias, *eval_map(norm), groups=getattr(layer, "groups", 1))
    )


def fold_pointwise(norm: WhiteningNorm, dimensions: int | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The eval-mode norm as one grouped 1x1 convolution (a linear layer for ``[N, C]``).

    Args:
        norm: in eval mode.
        dimensions: of its input, if known; the norms of 2-D and 3-D images know it themselves.
        dtype: of its input, which the new layer then has; None is that of the running statistics. They differ where a
            model is in half precision and its norms are in fp32.
    """
    _check_eval(norm)
    _check_linear(norm)
    matrix, offset = eval_map(norm)
    like: Any = {"device": norm.running_mean.device, "dtype": dtype or norm.running_mean.dtype}  # pyright: ignore
    channels = norm.num_features
    rank = 2 if isinstance(norm, _Rank2d) else 3 if isinstance(norm, _Rank3d) else (dimensions or 1) - 2
    if rank == 0:
        layer: Any = nn.Linear(channels, channels, device="meta")
        matrix = matrix.to(**like)
    else:
        count = num_groups(matrix, channels)
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}.get(rank, PointwiseMap)
        layer = kind(channels, channels, 1, groups=count, device="meta")
        matrix = _diagonal_blocks(matrix, count).to(**like).reshape(layer.weight.shape)
    layer.weight, layer.bias = nn.Parameter(matrix), nn.Parameter(offset.to(**like))
    return layer.train(norm.training)


class PointwiseMap(nn.Conv1d):
    """A grouped 1x1 convolution of ``[N, C]`` or ``[N, C, ...]``, for a norm whose input may be either."""

    def forward(self, input: Tensor) -> Tensor:
        planes = input.flatten(2) if input.ndim > 2 else input.unsqueeze(2)
        return super().forward(planes).view(input.shape)


def _check_norm(norm: Any) -> None:
    if isinstance(norm, PerSampleWhitening):
        raise TypeError(f"{type(norm).__name__} whitens each sample by itself, so it has no fixed map; keep the layer")
    if not isinstance(norm, WhiteningNorm):
        raise TypeError(f"norm is a {type(norm).__name__}; give a whitening layer, such as iternorm.IterNorm2d")


def _check_linear(norm: WhiteningNorm) -> None:
    if has_own_forward(norm) or (isinstance(norm, Followed) and norm.followers):
        raise TypeError(
            f"{type(norm).__name__} does more than whiten, in a forward of its own or in modules that follow, which "
            "weights cannot take in; use iternorm.fold, which keeps that"
        )
    if norm.activation is not None:
        raise ValueError(
            f"{type(norm).__name__} has activation={norm.activation!r} in it, which weights cannot take in; use "
            "iternorm.fold, which leaves it in place, or set norm.activation to None and put a module behind it"
        )


def _check_eval(norm: WhiteningNorm) -> None:
    _check_norm(norm)
    if norm.training:
        raise ValueError(f"{type(norm).__name__} is in training mode: its map is the batch's; call eval() first")


def _check_pair(layer: Any, norm: WhiteningNorm) -> None:
    _check_eval(norm)
    _check_linear(norm)
    if not dataflow.is_linear_map(layer):
        raise TypeError(
            f"{type(layer).__name__} is not a convolution or linear layer of torch.nn that can be folded into"
        )
    if isinstance(layer, nn.Linear) and isinstance(norm, (_Rank2d, _Rank3d)):
        raise ValueError(
            f"the features of a linear layer are not the channels of {type(norm).__name__}, which are the second "
            "dimension of its input; use iternorm.fold_pointwise(norm)"
        )


def takes_a_shift(layer: Any) -> bool:
    """Whether a constant added to the input reaches every output equally, that is, no zeros are padded in."""
    if isinstance(layer, nn.Linear):
        return True
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return False
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return True
    return all(k == 1 for k in layer.kernel_size) if layer.padding == "same" else not any(layer.padding)


def with_weights(layer: Any, folded: tuple[Tensor, Tensor, int]) -> Any:
    """A copy of the layer with new weights. Tensors that the layer shared with others are not changed."""
    weight, bias, count = folded
    result = copy.copy(layer)
    result._parameters = dict(layer._parameters)
    result.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    result.bias = nn.Parameter(bias, requires_grad=layer.weight.requires_grad)
    if hasattr(layer, "groups"):
        result.groups = count
    return result
