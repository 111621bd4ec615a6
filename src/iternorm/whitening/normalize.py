"""The entrance to the operation: takes a batch and its settings to the backend that computes it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import autograd, by_reference, dispatch, fused, groups, running
from iternorm.whitening.dispatch import Backend
from iternorm.whitening.operators import no_autocast
from iternorm.whitening.processes import synchronized
from iternorm.whitening.settings import Running, Settings


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    statistics: Running | None,
    training: bool,
    backend: Backend | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalize `x` by its own statistics and update `statistics`, or normalize it by `statistics` in eval.

    Args:
        x: ``[N, C, ...]``, checked.
        weight: ``[C]``, or None.
        bias: ``[C]``, or None.
        settings: what to compute.
        statistics: running statistics to update, or to use; None keeps none.
        training: use the statistics of the batch. Without running ones they are always used.
        backend: the choice of `dispatch.choose`, if it has been made already.
        residual: added to the output before the activation; checked.
    """
    if backend is None:
        backend = dispatch.choose(settings, x)
    if settings.process_group is None and x.numel() == 0:
        # Nothing to whiten and nothing to learn from: gradients of zero, and the statistics stay.
        planes = autograd.scale_and_shift(torch_verbs.as_planes(x.clone()), weight, bias)
        return _finished(planes.view(x.shape), residual, settings)
    if not training and statistics is not None:
        return _infer(x, weight, bias, settings, statistics, backend, residual)
    if settings.process_group is None and x.numel() == x.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)}; "
            "use a larger batch, or eval mode"
        )
    if backend is Backend.TRITON:
        whiten = fused.whiten if settings.process_group is None else synchronized.whiten
        return whiten(x, weight, bias, settings, statistics, residual)
    if backend is Backend.REFERENCE:
        y, mean, covariance, whitening = by_reference.whiten(x, weight, bias, settings)
    elif backend is Backend.COMPOSED:
        y, mean, covariance, whitening = autograd.composed(x, weight, bias, settings)
    else:
        iteration = dispatch.iteration_for(backend, settings, x)
        y, mean, covariance, whitening = autograd.whiten(x, weight, bias, settings, iteration)
    if statistics is not None:
        running.update(statistics, mean, covariance, whitening)
    return _finished(y, residual, settings)


def _infer(x, weight, bias, settings: Settings, statistics: Running, backend: Backend, residual) -> Tensor:
    with torch.no_grad():
        dtype = torch_verbs.compute_dtype(x.dtype)
        whitening, mean = statistics.matrix.to(dtype), statistics.mean.to(dtype)
        if statistics.is_covariance:
            whitening, _ = autograd.inverse_sqrt(whitening, x.shape[1], settings)
    if dispatch.has_inference_kernel(backend, x, weight, bias):
        return fused.apply(x, whitening, mean, weight, bias, settings.group_size, settings.relu, residual)
    return _finished(apply(x, whitening, mean, weight, bias, settings.group_size), residual, settings)


def apply(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """The third verb on given statistics, as one grouped 1x1 convolution (one more for a smaller last group).

    Groups of one channel are scaled and shifted. Built of ordinary operators, so that it exports, and differentiable in
    everything but the statistics.
    """
    spatial = max(x.ndim - 2, 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    dtype = torch_verbs.compute_dtype(x.dtype)
    with no_autocast(x):
        matrix, offset = autograd.fold_affine(whitening, mean, weight, bias, group_size)
        activation = (x.unsqueeze(2) if x.ndim == 2 else x).to(dtype)
        parts = groups.parts(x.shape[1], group_size)
        operands = [(activation, matrix, offset)]
        if len(parts) > 1:
            # Inductor of torch 2.6 to 2.9 cannot lower a convolution of a slice on the CPU, and removes some copies of
            # slices. A product it keeps. Eager convolutions copy a slice anyway.
            operands = [(activation[:, p.channels] * 1, p.of(matrix) * 1, offset[p.channels] * 1) for p in parts]
        ones = (1,) * spatial
        outputs = [
            convolve(values, weights.reshape(-1, part.size, *ones), shift, groups=part.count)
            if part.size > 1
            # Unlike a convolution it would keep any order of memory, and BatchNorm's output is planes or rows.
            else torch.addcmul(shift.view(-1, *ones), torch_verbs.laid_out(values), weights.reshape(-1, *ones))
            for part, (values, weights, shift) in zip(parts, operands, strict=True)
        ]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if torch_verbs.is_channels_last(x) and not x.is_contiguous():
        # A grouped conv3d on the CPU returns contiguous memory, and so does a conv2d where an extent of 1 has a stride
        # of its own; a no-op where the input's format was kept.
        y = y.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return (y.squeeze(2) if x.ndim == 2 else y).to(x.dtype)


def _finished(y: Tensor, residual: Tensor | None, settings: Settings) -> Tensor:
    """The addition and the activation that follow the normalization, if there are any."""
    if residual is not None:
        y = y + residual
    # Not `settings.relu`: the compilers up to torch 2.9 take a property of a named tuple for a value of the graph.
    return F.relu(y) if settings.activation == "relu" else y
