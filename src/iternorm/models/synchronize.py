"""Whitening layers of a model -> layers that compute their statistics over the batches of all processes."""

import warnings
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import _DecorrelatedBatchNorm, _IterNorm
from iternorm.layers.sync import SyncDecorrelatedBatchNorm, Synchronized, SyncIterNorm
from iternorm.models import replace
from iternorm.models.convert import batchnorm_class
from iternorm.models.followed import FOLLOWED, Followed, has_own_forward


def convert_sync_iternorm(module: nn.Module, process_group: Any = None, *, batchnorm: bool = False) -> nn.Module:
    """Replace IterNorm layers by SyncIterNorm and DecorrelatedBatchNorm layers by SyncDecorrelatedBatchNorm.

    Parameters and buffers stay the same. As in `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, children are replaced
    in place and the module is returned (a new one where it is itself such a layer). Layers that are synchronized
    already take the new process group. Lazy layers before their first batch and parametrized ones are left as they are,
    with a warning that names them, and so are subclasses with a forward of their own, those of BatchNorm if
    `batchnorm` is set.

    Args:
        module: the model.
        process_group: the processes to synchronize over; None is all of them.
        batchnorm: replace BatchNorm layers by `torch.nn.SyncBatchNorm`, too. Torch's own conversion raises on a model
            with layers of this package in it.

    Example:
        >>> from iternorm import IterNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), IterNorm2d(8))
        >>> convert_sync_iternorm(model)[1]
        SyncIterNorm(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, group_size=64, num_iters=5, \
running='whitening')
    """
    replacements: dict[nn.Module, nn.Module] = {}
    left = []
    for name, layer in module.named_modules():
        if isinstance(layer, Synchronized) or not isinstance(layer, _BatchNorm):
            continue
        is_own = isinstance(layer, (_IterNorm, _DecorrelatedBatchNorm)) and not isinstance(layer, LazyModuleMixin)
        if is_own and not replace.changed(layer) and not has_own_forward(layer):
            replacements[layer] = _synchronized(layer, process_group)
        elif batchnorm and _is_plain_batchnorm(layer) and not replace.changed(layer):
            replacements[layer] = _sync_batchnorm(layer, process_group)
        elif batchnorm or isinstance(layer, WhiteningNorm):
            left.append(replace.named(name, layer))
    if left:
        warnings.warn(f"these layers have no synchronized form and stay as they are: {', '.join(left)}", stacklevel=2)
    for layer in module.modules():
        if isinstance(layer, Synchronized):
            layer.process_group = process_group
    return replace.replace_modules(module, replacements)


def _is_plain_batchnorm(layer: nn.Module) -> bool:
    base = batchnorm_class(layer)
    return base is not None and type(layer).forward is base.forward


def _sync_batchnorm(layer: Any, process_group: Any) -> nn.Module:
    args = layer.num_features, layer.eps, layer.momentum, layer.affine, layer.running_mean is not None
    result = nn.SyncBatchNorm(*args, process_group, device="meta")
    replace.carry(layer, result)
    result.track_running_stats = layer.track_running_stats
    return result


def _synchronized(layer: Any, process_group: Any) -> Synchronized:
    impl = layer.impl if layer.impl in ("torch", "native") else "auto"
    names = ("group_size", "running", "activation", "correction", "shrinkage", "shuffle")
    options = {"impl": impl, **{name: getattr(layer, name) for name in names}}
    if isinstance(layer, _IterNorm):
        kind, options["num_iters"] = SyncIterNorm, layer.num_iters
    else:
        kind, options["solver"] = SyncDecorrelatedBatchNorm, layer.solver
    kind = FOLLOWED[kind] if isinstance(layer, Followed) else kind
    args = layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    result = kind(*args, process_group, device="meta", **options)
    replace.carry(layer, result)
    return result
