"""A model with BatchNorm -> the same model with IterNorm, and back."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.layers import checkpoints
from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import (
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
    _Rank1d,
    _Rank2d,
    _Rank3d,
)
from iternorm.layers.per_sample import PerSampleWhitening
from iternorm.layers.sync import Synchronized, SyncIterNorm
from iternorm.models import replace
from iternorm.models.followed import FOLLOWED, Followed, applies_children, has_own_forward
from iternorm.models.fuse import junctions
from iternorm.whitening import groups

_TO_ITERNORM: dict[type[nn.Module], type] = {
    nn.BatchNorm1d: IterNorm1d,
    nn.BatchNorm2d: IterNorm2d,
    nn.BatchNorm3d: IterNorm3d,
    nn.SyncBatchNorm: SyncIterNorm,
}
# What the whitening layers of a rank, IterNorm and DecorrelatedBatchNorm, have in common.
_TO_BATCHNORM: dict[type[nn.Module], type] = {
    _Rank1d: nn.BatchNorm1d,
    _Rank2d: nn.BatchNorm2d,
    _Rank3d: nn.BatchNorm3d,
    Synchronized: nn.SyncBatchNorm,
}


@dataclass
class ConversionReport:
    """What a conversion did, as lists of (name, text) in the model's order; an empty name is the model itself.

    With ``fuse=True`` each whitening layer is a row of `fused`, which says what it does now beside normalizing, or of
    `unfused`, which says why it does not.
    """

    converted: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    fused: list[tuple[str, str]] = field(default_factory=list)
    unfused: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = {"converted": self.converted, "skipped": self.skipped, "fused": self.fused, "not fused": self.unfused}
        rows = [(kind, *row) for kind, rows in kinds.items() for row in rows]
        return "\n".join(f"{kind:<9}  {name or '(the model)'}: {text}" for kind, name, text in rows)


def convert_batchnorm(
    model: nn.Module,
    *,
    where: replace.Where = "all",
    group_size: int | None = 64,
    num_iters: int = 5,
    running: str = "whitening",
    impl: str = "auto",
    fuse: bool = False,
    report: ConversionReport | None = None,
) -> nn.Module:
    """Replace BatchNorm layers by the IterNorm of their rank, SyncBatchNorm by SyncIterNorm.

    Parameters, buffers, dtype, device, mode, requires_grad, hooks and other attributes are carried over. The whitening
    matrix starts as the diagonal of BatchNorm's 1/√(var + eps), so the converted model gives the original's output in
    eval. As in `torch.nn.SyncBatchNorm.convert_sync_batchnorm` children are replaced in place, and the model is
    returned (a new layer where it is itself a BatchNorm). A layer used in several places is still one layer. Nothing is
    changed when an error is raised.

    A subclass that applies its own child modules after normalizing (timm's BatchNormAct2d: `drop`, then `act`) keeps
    them, under their names. A trial on a small random input shows whether it does that. A layer that cannot be
    converted stays as it is and is named in a warning: a lazy layer before its first batch, a parametrized one, a
    subclass whose `forward` does something else or that has its own `train`, an eps or a momentum that IterNorm does
    not take.

    With `fuse`, a ReLU that alone takes a whitening layer's output becomes part of the layer (``activation="relu"``),
    and so does an addition, with or without a ReLU after it (``layer(x, residual=z)``). Names, parameters and the
    output stay. Where each ReLU is a separate module, an identity replaces it. In other modules the forward is
    rewritten: the module becomes an instance of a subclass of its class, with the same name. The new forward is the old
    one as it was at the conversion, with the flags and children of that time. Modules that torch.fx cannot trace
    completely stay as they are: those that act differently in training and in eval, take more than one argument, ask
    for types, or draw random numbers. The layer does not broadcast, so a sum is fused only if the convolutions and
    norms around it show that both of its parts have the layer's number of channels, and none is pooled.
    `convert_to_batchnorm` and `fold` undo the fusion first.

    Args:
        model: any module.
        where: "all"; "first", the first BatchNorm in the order of `model.named_modules()` (the paper's L1); or a
            predicate on (name, module).
        group_size: channels whitened together; None is all of them.
        num_iters: the paper's T.
        running: "whitening" or "covariance"; the second does not reproduce BatchNorm exactly in eval.
        impl: "auto", "triton", "native", "torch" or "reference".
        fuse: let the whitening layers apply the ReLU, or the addition and the ReLU, that follow them.
        report: filled with what was converted and what was not, and with what was fused.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> convert_batchnorm(model, group_size=4)[1]
        IterNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, group_size=4, num_iters=5, \
running='whitening')
    """
    options: dict[str, Any] = {"group_size": group_size, "num_iters": num_iters, "running": running, "impl": impl}
    # The arguments are checked by the layer, before anything is touched.
    IterNorm1d(1, device="meta", **options)
    report = ConversionReport() if report is None else report
    chosen = list(replace.selected(_batchnorms(model), where, "BatchNorm"))
    replacements, converted, skipped = {}, [], []
    for name, layer in chosen:
        reason = _obstacle(layer)
        if reason is None:
            try:
                new = _to_iternorm(layer, options)
            except (TypeError, ValueError) as error:
                reason = str(error)
            else:
                replacements[layer] = new
                converted.append((name, f"{type(layer).__name__} -> {type(new).__name__}"))
        if reason is not None:
            skipped.append((name, f"{type(layer).__name__} {reason}"))
    if skipped and where == "first":
        raise ValueError(f"the first BatchNorm cannot be converted: {skipped[0][0]}: {skipped[0][1]}")
    plan = junctions.plan(model, replacements) if fuse else junctions.Plan()
    if not chosen and not plan.fused:
        warnings.warn("no BatchNorm layer was selected: the model is returned as it was", stacklevel=2)
    _warn_of(skipped)
    report.converted += converted
    report.skipped += skipped
    report.fused += plan.fused
    report.unfused += plan.unfused
    model = replace.replace_modules(model, replacements)
    plan.apply()
    return model


def _warn_of(skipped: list[tuple[str, str]]) -> None:
    if skipped:
        each = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in skipped)
        warnings.warn(f"{len(skipped)} layer(s) were not converted and stay as they are: {each}", stacklevel=3)


def _batchnorms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if (isinstance(layer, _BatchNorm) and not isinstance(layer, WhiteningNorm))
        or (isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in getattr(layer, "original_name", ""))
    ]


def _obstacle(layer: Any) -> str | None:
    """Why a layer cannot be converted, in words that follow its class; None where it can."""
    if isinstance(layer, torch.jit.ScriptModule):
        return "is compiled by TorchScript; convert the model before scripting it"
    if isinstance(layer, LazyModuleMixin):
        return _LAZY
    if reason := replace.changed(layer):
        return reason
    if type(layer).train is not nn.Module.train:
        return "has a train of its own, which the new layer would not have; use a BatchNorm and iternorm.freeze"
    base = batchnorm_class(layer)
    if base is None:
        return "is derived from _BatchNorm directly, so the rank of its input is not known; replace it by hand"
    if type(layer).forward is not base.forward and not applies_children(layer, base):
        return "has a forward of its own, which is not a BatchNorm followed by its child modules; replace it by hand"
    if type(layer)._check_input_dim is not base._check_input_dim or "_check_input_dim" in vars(layer):
        return "has a _check_input_dim of its own, so the rank of its input is not known; replace it by hand"
    return None


_PER_SAMPLE = "whitens each sample by itself, which no BatchNorm does; use GroupNorm or InstanceNorm in its place"
_LAZY = "has not seen a batch, so its number of channels is not known; run one batch first"


def batchnorm_class(layer: nn.Module) -> Any:
    """The BatchNorm of torch that a layer is, or is derived from; None if it is none."""
    return next((base for base in _TO_ITERNORM if isinstance(layer, base)), None)


def _to_iternorm(layer: Any, options: dict[str, Any]) -> nn.Module:
    base = batchnorm_class(layer)
    target = _TO_ITERNORM[base]
    follows = type(layer).forward is not base.forward
    target = FOLLOWED[target] if follows else target
    tracked = layer.running_mean is not None
    args: list[Any] = [layer.num_features, layer.eps, layer.momentum, layer.affine, tracked]
    new = target(*args, *([layer.process_group] if base is nn.SyncBatchNorm else []), device="meta", **options)
    variance = layer.running_var
    replace.carry(layer, new, without=("running_var", "process_group"))
    new.track_running_stats = layer.track_running_stats
    if tracked:
        new._buffers[f"running_{new.running}"] = checkpoints.diagonal_from_variance(new, variance).to(variance.dtype)
        if new.num_batches_tracked is None or new.num_batches_tracked.is_meta:
            new.num_batches_tracked = torch.tensor(0, device=variance.device)
    if follows:
        new.followers = tuple(name for name, child in layer._modules.items() if child is not None)
        new.batchnorm_class = type(layer)
    return new


def convert_to_batchnorm(model: nn.Module, *, report: ConversionReport | None = None) -> nn.Module:
    """Replace whitening layers by BatchNorm layers with the diagonal of their whitening matrix: the way back.

    A layer that `convert_batchnorm` made and that was not trained since becomes the BatchNorm it was. What whitening
    has learned between channels is lost: fine-tune afterwards, or at least `recalibrate`. In place, as
    `convert_batchnorm`. A layer whose diagonal is not a scale (``solver="pca"`` with averaged whitening matrices)
    stays, with a warning that names it, and so does one that was built with an activation. What
    ``convert_batchnorm(model, fuse=True)`` has fused is taken apart.
    """
    report = ConversionReport() if report is None else report
    replacements, skipped = {}, []
    joined = junctions.joined_norms(model)
    for name, layer in model.named_modules():
        if isinstance(layer, PerSampleWhitening):
            skipped.append((name, f"{type(layer).__name__} {_PER_SAMPLE}"))
        if not isinstance(layer, WhiteningNorm):
            continue
        reason = _diagonal_obstacle(layer, is_joined=layer in joined)
        if reason is None:
            new = _to_batchnorm(layer)
            replacements[layer] = new
            report.converted.append((name, f"{type(layer).__name__} -> {type(new).__name__}"))
        else:
            skipped.append((name, f"{type(layer).__name__} {reason}"))
    report.skipped += skipped
    _warn_of(skipped)
    model = replace.replace_modules(model, replacements)
    junctions.separate(model)
    return model


def _diagonal_obstacle(layer: WhiteningNorm, is_joined: bool) -> str | None:
    if isinstance(layer, LazyModuleMixin):
        return _LAZY
    if reason := replace.changed(layer):
        return reason
    if has_own_forward(layer):
        return "has a forward of its own, which a BatchNorm would not have; replace it by hand"
    if layer.activation is not None and not is_joined:
        return f"has activation={layer.activation!r} in it, which no BatchNorm has; put a module behind it instead"
    if layer.running_whitening is None:
        return None
    if layer.solver == "pca":
        return "averages whitening matrices along principal axes, whose diagonal is no scale of channels"
    diagonal = groups.unpad_vector(layer.running_whitening.diagonal(dim1=-2, dim2=-1), layer.num_features)
    positive = diagonal.is_meta or bool((diagonal > 0).all())
    return None if positive else "has a whitening matrix whose diagonal is not positive"


def _to_batchnorm(whitening: WhiteningNorm) -> nn.Module:
    layer: Any = whitening
    base = next(target for kind, target in _TO_BATCHNORM.items() if isinstance(whitening, kind))
    tracked = layer.running_mean is not None
    args: list[Any] = [layer.num_features, layer.eps, layer.momentum, layer.affine, tracked]
    new: Any = base(*args, *([layer.process_group] if base is nn.SyncBatchNorm else []), device="meta")
    if isinstance(whitening, Followed):
        new.__class__ = whitening.batchnorm_class
    whitening_words = ("group_size", "num_iters", "running", "impl", "activation", "solver", "followers")
    whitening_words += ("correction", "shrinkage", "shuffle")
    matrices = ("running_whitening", "running_covariance")
    # What a layer remembers of its last batch is not carried over.
    private = (name for name in vars(layer) if name.startswith("_") and name not in vars(new))
    replace.carry(layer, new, without=(*whitening_words, "batchnorm_class", *matrices, "process_group", *private))
    new.track_running_stats = layer.track_running_stats
    if tracked:
        matrix = layer.running_matrix
        diagonal = groups.unpad_vector(matrix.diagonal(dim1=-2, dim2=-1), layer.num_features)
        if layer.running == "whitening":
            # 1/√(var + eps) is the diagonal; a variance below eps may come out below zero by rounding.
            scale = diagonal.to(torch_verbs.compute_dtype(diagonal.dtype))
            variance = (scale**-2 - layer.eps - layer.shrinkage) / max(1 - layer.shrinkage, 1e-9)
            diagonal = variance.clamp(min=0).to(matrix.dtype)
        new.running_var = diagonal.clone()
    return new
