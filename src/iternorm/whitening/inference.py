"""Eval: the verb `apply` on running statistics, in operators that every exporter knows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import groups
from iternorm.whitening.autograd import fold_affine
from iternorm.whitening.operators import no_autocast


def apply(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """The third verb on given statistics, as one grouped 1x1 convolution (one more for a smaller last group).

    Built of ordinary operators, so that it exports, and differentiable in everything but the statistics.
    """
    spatial = max(x.ndim - 2, 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    dtype = torch_verbs.compute_dtype(x.dtype)
    with no_autocast(x):
        matrix, offset = fold_affine(whitening, mean, weight, bias, group_size)
        activation = (x.unsqueeze(2) if x.ndim == 2 else x).to(dtype)
        parts = groups.parts(x.shape[1], group_size)
        operands = [(activation, matrix, offset)]
        if len(parts) > 1:
            # Inductor of torch 2.6 to 2.9 cannot lower a convolution of a slice on the CPU, and removes some copies of
            # slices. A product it keeps. Eager convolutions copy a slice anyway.
            operands = [(activation[:, p.channels] * 1, p.of(matrix) * 1, offset[p.channels] * 1) for p in parts]
        outputs = [
            convolve(values, weights.reshape(-1, part.size, *(1,) * spatial), shift, groups=part.count)
            for part, (values, weights, shift) in zip(parts, operands, strict=True)
        ]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if torch_verbs.is_channels_last(x) and not x.is_contiguous():
        # A grouped conv3d on the CPU returns contiguous memory, and so does a conv2d where an extent of 1 has a stride
        # of its own; a no-op where the input's format was kept.
        y = y.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return (y.squeeze(2) if x.ndim == 2 else y).to(x.dtype)
