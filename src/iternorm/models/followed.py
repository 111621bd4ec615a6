"""IterNorm in place of a BatchNorm subclass that does more than normalize: it applies child modules afterwards."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import IterNorm1d, IterNorm2d, IterNorm3d
from iternorm.layers.sync import SyncIterNorm

_PROBE_SHAPES = {nn.BatchNorm1d: (3, 2), nn.BatchNorm2d: (3, 2, 2), nn.BatchNorm3d: (3, 2, 2, 2)}


class Followed(WhiteningNorm):
    """A normalization followed by the modules that the layer it came from applied, kept under their own names."""

    followers: tuple[str, ...]
    batchnorm_class: type

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        output = super().forward(input, residual)
        if isinstance(input, Proxy):
            # The node calls this layer, followers and all.
            return output
        for name in self.followers:
            output = getattr(self, name)(output)
        return output


class FollowedIterNorm1d(Followed, IterNorm1d):
    """IterNorm1d, then the modules of the BatchNorm subclass it replaces (an activation, say)."""


class FollowedIterNorm2d(Followed, IterNorm2d):
    """IterNorm2d, then the modules of the BatchNorm subclass it replaces (an activation, say)."""


class FollowedIterNorm3d(Followed, IterNorm3d):
    """IterNorm3d, then the modules of the BatchNorm subclass it replaces (an activation, say)."""


class FollowedSyncIterNorm(Followed, SyncIterNorm):
    """SyncIterNorm, then the modules of the BatchNorm subclass it replaces (an activation, say)."""


FOLLOWED: dict[type, type] = {
    IterNorm1d: FollowedIterNorm1d,
    IterNorm2d: FollowedIterNorm2d,
    IterNorm3d: FollowedIterNorm3d,
    SyncIterNorm: FollowedSyncIterNorm,
}


def has_own_forward(norm: nn.Module) -> bool:
    """Whether a forward of its own, of its class or set on it, does more than the layer that a norm is derived from."""
    return "forward" in vars(norm) or type(norm).forward not in (WhiteningNorm.forward, Followed.forward)


def applies_children(layer: Any, base: Any) -> bool:
    """Whether a layer is its base class and then its children in order: tried on a copy, in eval and in training."""
    if base not in _PROBE_SHAPES or (layer.running_mean is not None and layer.running_mean.is_meta):
        return False
    if len(inspect.signature(type(layer).forward).parameters) != 2:
        # A second argument would be taken for a residual.
        return False
    probe = copy.deepcopy(layer)
    # Hooks may change the output, and are not part of the class.
    probe._forward_hooks.clear()
    probe._forward_pre_hooks.clear()
    reference = copy.deepcopy(probe)
    like = next((t for t in (layer.weight, layer.running_mean) if t is not None), torch.empty(0))
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        shape = _PROBE_SHAPES[base]
        x = torch.randn(shape[0], layer.num_features, *shape[1:], dtype=like.dtype, device=like.device)
        for mode in (False, True):
            results = []
            for module, own in ((probe, True), (reference, False)):
                module.train(mode)
                torch.manual_seed(0)
                try:
                    y = module(x.clone()) if own else base.forward(module, x.clone())
                    for child in () if own else module.children():
                        y = child(y)
                except Exception:
                    # Its forward needs something that is not known here, so it cannot be converted.
                    return False
                results.append(y)
            if not isinstance(results[0], Tensor) or not torch.equal(*results):
                return False
    return True
