"""Checkpoints of other layers: what a state_dict of BatchNorm, or of the authors' layer, means here."""

import warnings
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.torch.verbs import compute_dtype
from iternorm.whitening import groups


class StateDictError(RuntimeError, ValueError):
    """A state_dict that does not fit the layer. `load_state_dict` callers expect the first base, users the second."""


def translate(layer, state: dict[str, Any], *, assigned: bool = False) -> dict[str, Any]:
    """BatchNorm's keys, and those of the authors' 2019 layer, in the terms of `layer`, a `WhiteningNorm`.

    Values that are to be assigned, not copied, keep the dtype of the checkpoint.
    """
    state = dict(state)
    for name in ("weight", "bias", "running_mean"):
        # The authors keep the scale as [1, C, 1, 1] or [1, C] and the mean as [g, d, 1].
        value = state.get(name)
        if isinstance(value, Tensor) and value.ndim > 1 and value.numel() == layer.num_features:
            state[name] = value.reshape(-1)
    if layer.running_matrix is None:
        return state
    matrix_name = f"running_{layer.running}"
    if "running_wm" in state:
        blocks = state.pop("running_wm")
        if layer.running != "whitening":
            raise StateDictError(
                "the state_dict holds averaged whitening matrices (running_wm) and this layer averages "
                'covariances; build it with running="whitening"'
            )
        state[matrix_name] = _regroup(layer, blocks)
    elif "running_variance" in state:
        state[matrix_name] = _of_w_mse(layer, state.pop("running_variance"))
    elif "running_var" in state and matrix_name not in state:
        variance = state.pop("running_var")
        # In the finer dtype of the two: a checkpoint in half precision is no reason to round the root too.
        dtype = variance.dtype if assigned else torch.promote_types(variance.dtype, layer.running_matrix.dtype)
        state[matrix_name] = diagonal_from_variance(layer, variance).to(dtype)
    other = "covariance" if layer.running == "whitening" else "whitening"
    if f"running_{other}" in state and matrix_name not in state:
        raise StateDictError(
            f"the state_dict holds running_{other} and this layer keeps {matrix_name}; build it with running={other!r}"
        )
    # BatchNorm before its version 2, and the authors, count no batches.
    mean = state.get("running_mean")
    if isinstance(mean, Tensor):
        # Where the mean is: the count may be assigned, not copied.
        state.setdefault("num_batches_tracked", torch.tensor(0, device=mean.device))
    return state


def diagonal_from_variance(layer, variance: Tensor) -> Tensor:
    """BatchNorm's running variance as the layer's running statistic: it whitens as BatchNorm standardizes.

    Of half precision it is in fp32.
    """
    if variance.shape != (layer.num_features,):
        raise StateDictError(
            f"running_var has shape {list(variance.shape)}, this layer has num_features={layer.num_features}; "
            "build it with the number of channels of the saved BatchNorm"
        )
    if layer.running == "covariance" and layer.solver == "newton" and layer.group_size != 1:
        warnings.warn(
            f"a BatchNorm state_dict was loaded into a layer with running='covariance': {layer.num_iters} Newton "
            "steps may stop short of the exact root of its variances, so eval may differ from that BatchNorm; "
            "running='whitening' reproduces it",
            stacklevel=2,
        )
    variance = variance.to(compute_dtype(variance.dtype))
    regularized = (1 - layer.shrinkage) * variance + (layer.shrinkage + layer.eps)
    values = variance if layer.running == "covariance" else regularized.rsqrt()
    return torch.diag_embed(groups.pad_vector(values, layer.group_size))


def _of_w_mse(layer, covariance: Tensor) -> Tensor:
    """The running covariance ``[C, C]`` of W-MSE's whitening layer, which is in no groups."""
    if layer.running != "covariance" or layer.running_matrix.shape != (1, *covariance.shape):
        raise StateDictError(
            f"running_variance of shape {list(covariance.shape)} is a covariance of all channels, as W-MSE keeps it; "
            'build the layer with that many channels, running="covariance" and group_size=None'
        )
    return covariance[None]


def _regroup(layer, blocks: Tensor) -> Tensor:
    """Whitening blocks ``[g, e, e]`` as the layer's ``[G, d, d]``, where every block fits inside a group."""
    size = groups.effective_size(layer.num_features, layer.group_size)
    block = blocks.shape[2] if blocks.ndim == 3 and blocks.shape[1] == blocks.shape[2] else 0
    if block == 0 or blocks.shape[0] * block != layer.num_features or size % block:
        raise StateDictError(
            f"running_wm has shape {list(blocks.shape)}, which does not divide {layer.num_features} channels in "
            f"groups of {layer.group_size}; build the layer with group_size={block or None}"
        )
    each = size // block
    matrices = [torch.block_diag(*blocks[i : i + each]) for i in range(0, len(blocks), each)]
    return groups.pad([torch.stack([m]) for m in matrices]) if len(matrices) > 1 else matrices[0][None]
