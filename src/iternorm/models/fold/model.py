"""An eval-mode model -> the same model without its whitening layers, by `iternorm.models.fold.weights`."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import _Rank2d, _Rank3d
from iternorm.layers.per_sample import PerSampleWhitening
from iternorm.models import replace
from iternorm.models.features import DecorrelatedLinear
from iternorm.models.fold import dataflow, recording
from iternorm.models.fold import weights as fold_layers
from iternorm.models.followed import Followed, has_own_forward
from iternorm.models.fuse import junctions


class Folded(NamedTuple):
    """One row of the table: the whitening layer, what became of it, the layer it went into, and why not a neighbour."""

    name: str
    how: str
    into: str
    reason: str


class FoldTable(list[Folded]):
    """What went where; printed as a table."""

    def __str__(self) -> str:
        rows = [Folded._fields, *(tuple(row) for row in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(Folded._fields))]
        return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def fold(model: nn.Module, example_inputs: Any = None, *, max_growth: float = 2.0) -> tuple[nn.Module, FoldTable]:
    """An eval-mode copy of the model without its whitening layers, and a table of what went where.

    Each whitening layer goes, in this order of preference, into the convolution, transposed convolution or linear
    layer before it ("previous"), into the unpadded convolution or linear layer after it ("next"), or becomes one
    grouped 1x1 convolution or linear map ("pointwise"). The last happens if there is a ReLU or an addition in between,
    or if a neighbour is used more than once, shares its weights, is parametrized, or has a hook. `nn.Identity` replaces
    a folded layer. Layers that whiten each sample on its own have no fixed map and stay ("kept"), and so do those whose
    parameters or buffers the model's own code reads, and those with a forward of their own.

    Neighbours are found by tracing with torch.fx. For models that torch.fx cannot trace, give `example_inputs`: then
    they are found by following one run of the model, and the result holds for the path that this run took. Without
    them, it is the path of a call with the required arguments only, and a linear layer next to an IterNorm1d is assumed
    to have ``[N, C]`` between them.

    Args:
        model: in eval mode. It is not changed.
        example_inputs: a tensor, a tuple of the model's arguments, or a mapping of keyword arguments. A model that
            takes a mapping as its argument needs the tuple ``(inputs,)``.
        max_growth: where whitening mixes the groups of a grouped convolution, folding makes them wider. They may become
            wider until the multiplications are this many times those of the convolution and a separate 1x1 convolution.
            Infinity always folds, and makes depthwise convolutions dense.

    Example:
        >>> from iternorm import IterNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), IterNorm2d(8), nn.ReLU()).eval()
        >>> folded, table = fold(model)
        >>> print(table)
        name  how       into  reason
        1     previous  0
        >>> folded[1]
        Identity()
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError("a DistributedDataParallel keeps its parameters in step; fold the model in it, model.module")
    norms = {layer: name for name, layer in model.named_modules() if isinstance(layer, WhiteningNorm)}
    kept = [name for name, layer in model.named_modules() if isinstance(layer, PerSampleWhitening)]
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    if model.training:
        raise ValueError("the model is in training mode, where whitening is no fixed map; call model.eval() first")
    for norm, name in norms.items():
        if isinstance(norm, LazyModuleMixin):
            raise ValueError(f"{name or 'the model'} has not seen a batch, so it has no map yet; run one batch first")
        if norm.training:
            raise ValueError(
                f"{name or 'the model'} is in training mode, so it has no fixed map; call model.eval() first"
            )
        if norm.running_mean is None:
            raise ValueError(
                f"{name or 'the model'} keeps no running statistics (track_running_stats=False), so it has no fixed "
                "map; it cannot be folded"
            )
        if norm.running_mean.is_meta:
            raise ValueError(f"{name or 'the model'} is on the meta device and has no values to fold; load them first")
    if not max_growth >= 1:
        raise ValueError(f"max_growth={max_growth} must be at least 1; 2 is the default, infinity folds always")
    model = _copied(model)
    junctions.separate(model)
    table = FoldTable()
    model = _fold_decorrelated(model, example_inputs, table)
    if any(isinstance(layer, WhiteningNorm) for layer in model.modules()):
        model = _fold_all(model, _flow(model, example_inputs), max_growth, table)
    table += [Folded(name, "kept", "", "it whitens each sample by itself: no fixed map") for name in kept]
    table.sort(key=lambda row: order[row.name])
    return model, table


def _copied(model: nn.Module) -> nn.Module:
    """A copy, whose whitening layers have plain weights where pruning and the like compute them at each call."""
    try:
        model = copy.deepcopy(model)
    except RuntimeError as error:
        if "deepcopy protocol" not in str(error):
            raise
        raise ValueError(
            "the model cannot be copied while it holds a tensor with a gradient's history, as pruning and weight norm "
            "leave in a layer: run it once under torch.no_grad(), or make the weights permanent "
            "(torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm)"
        ) from error
    for norm in [layer for layer in model.modules() if isinstance(layer, WhiteningNorm)]:
        for hook in list(norm._forward_pre_hooks.values()):
            if isinstance(hook, BasePruningMethod):
                prune.remove(norm, hook._tensor_name)
            elif isinstance(hook, WeightNorm):
                remove_weight_norm(norm, hook.name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(norm, hook.name)
    return model


def _flow(model: nn.Module, example_inputs: Any) -> dataflow.Flow:
    if example_inputs is None:
        return dataflow.traced(model)
    return recording.recorded(model, *_arguments(model, example_inputs))


def _arguments(model: nn.Module, example_inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and the keyword arguments to run the model with."""
    if not isinstance(example_inputs, Mapping):
        return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}
    try:
        inspect.signature(model.forward).bind(**example_inputs)
    except TypeError as error:
        raise TypeError(
            f"example_inputs is a mapping of {', '.join(map(repr, example_inputs))}, which {type(model).__name__} does "
            f"not take as keyword arguments: {error}. For a model that takes a mapping, give a tuple: (example_inputs,)"
        ) from None
    return (), example_inputs


def _fold_decorrelated(model: nn.Module, example_inputs: Any, table: FoldTable) -> nn.Module:
    """Fold the norm of each linear layer that `decorrelate_features` made into that layer."""
    replacements: dict[nn.Module, nn.Module] = {}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DecorrelatedLinear)]
    layers = [(name, layer) for name, layer in layers if isinstance(layer.norm, WhiteningNorm)]
    try:
        is_alone = isinstance(model, DecorrelatedLinear)
        read = set() if is_alone or not layers else _flow(model, example_inputs).read
    except ValueError:
        if example_inputs is not None:
            raise
        # A model that cannot be traced is taken not to read their weights.
        read = set()
    for name, layer in layers:
        is_watched = dataflow.has_hooks(layer.norm) or has_own_forward(layer.norm) or "forward" in vars(layer)
        # A weight that is computed from others, by weight norm or pruning, cannot be set.
        if layer._parameters.get("weight") is not None and not is_watched and not read & {layer, layer.norm}:
            plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
            replace.carry(layer, plain, without=("norm",))
            replacements[layer] = fold_layers.with_weights(
                plain, fold_layers.fold_into_next(layer.weight, layer.bias, *fold_layers.eval_map(layer.norm))
            )
            table.append(Folded(f"{name}.norm".lstrip("."), "next", name, ""))
    return replace.replace_modules(model, replacements)


def _fold_all(model: nn.Module, flow: dataflow.Flow, max_growth: float, table: FoldTable) -> nn.Module:
    names = {layer: name for name, layer in model.named_modules()}
    # What a neighbour has become: it may have a norm on either side.
    current: dict[nn.Module, nn.Module] = {}
    for norm in [layer for layer in names if isinstance(layer, WhiteningNorm)]:
        if norm in flow.read:
            table.append(Folded(names[norm], "kept", "", "the model's own code reads its parameters or buffers"))
            continue
        if has_own_forward(norm):
            table.append(Folded(names[norm], "kept", "", "it has a forward of its own: no fixed map is known"))
            continue
        matrix, _ = fold_layers.eval_map(norm)
        reasons, place = [], None
        for how, neighbour in (("previous", flow.previous.get(norm)), ("next", flow.following.get(norm))):
            reason = "no linear map that is used once, joined to it alone" if neighbour is None else None
            if neighbour is not None:
                reason = _reason_against(how, norm, current.get(neighbour, neighbour), matrix, flow, max_growth)
            if reason is None and neighbour is not None:
                layer = current.get(neighbour, neighbour)
                if how == "previous":
                    current[neighbour] = fold_layers.fold_into_previous_layer(layer, _linear_part(norm))
                else:
                    current[neighbour] = fold_layers.fold_into_next_layer(norm, layer)
                place = nn.Identity()
                table.append(Folded(names[norm], how, names[neighbour], ""))
                break
            reasons.append(f"{how}: {reason}")
        if place is None:
            known = _only(flow.dimensions[norm]), _only(flow.dtypes[norm])
            place = fold_layers.fold_pointwise(_linear_part(norm), *known)
            table.append(Folded(names[norm], "pointwise", "", "; ".join(reasons)))
        current[norm] = _in_place_of(norm, place, norm in flow.added_to)
    return replace.replace_modules(model, current)


def _only(values: set[Any]) -> Any:
    """What all calls of a layer have in common, or None."""
    return next(iter(values)) if len(values) == 1 else None


def _reason_against(
    how: str, norm: Any, layer: Any, matrix: Tensor, flow: dataflow.Flow, max_growth: float
) -> str | None:
    """Why a norm does not go into a neighbour; None where it does."""
    if how == "next" and (isinstance(norm, Followed) or norm.activation is not None):
        return "an activation lies between"
    if how == "next" and norm in flow.added_to:
        return "an addition lies between"
    if isinstance(layer, nn.Linear):
        dimensions = flow.dimensions[norm]
        if (dimensions and dimensions != {2}) or isinstance(norm, (_Rank2d, _Rank3d)):
            return "the linear layer's features are not the norm's channels"
    if how == "next" and not fold_layers.takes_a_shift(layer):
        return "zeros are padded between"
    if _width(layer, how) != norm.num_features:
        return f"it has {_width(layer, how)} channels there, the norm {norm.num_features}"
    count = getattr(layer, "groups", 1)
    wide = fold_layers.num_groups(matrix, count)
    if wide < count:
        pointwise = len(matrix) ** 2 // fold_layers.num_groups(matrix, len(matrix))
        growth = layer.weight.numel() * (count // wide) / (layer.weight.numel() + pointwise)
        if growth > max_growth:
            return f"its {count} groups would become {wide}, {growth:.1f} times the multiplications"
    return None


def _width(layer: Any, how: str) -> int:
    """The number of channels on the side of the layer that the norm is on."""
    if isinstance(layer, nn.Linear):
        return layer.out_features if how == "previous" else layer.in_features
    return layer.out_channels if how == "previous" else layer.in_channels


def _linear_part(norm: WhiteningNorm) -> WhiteningNorm:
    """The norm without its activation and what follows in it, which `_in_place_of` puts back."""
    # Not `copy.copy`, which a parametrized layer refuses.
    bare = type(norm).__new__(type(norm))
    vars(bare).update(vars(norm), activation=None, followers=())
    return bare


class Sum(nn.Sequential):
    """In the place of a norm that is called with a residual: its map, the addition, and what followed inside it."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        linear, *rest = self
        output = linear(input)
        output = output if residual is None else output + residual
        for module in rest:
            output = module(output)
        return output


def _in_place_of(norm: WhiteningNorm, layer: nn.Module, is_added_to: bool) -> nn.Module:
    """What takes the norm's place: the layer, the modules that followed the norm inside it, and its hooks."""
    kept: list[tuple[str, nn.Module]] = [] if norm.activation is None else [("activation", nn.ReLU().eval())]
    if isinstance(norm, Followed):
        kept += [(name, norm.get_submodule(name)) for name in norm.followers]
    layer.eval()
    if kept or is_added_to:
        layer = (Sum if is_added_to else nn.Sequential)(OrderedDict([("map", layer), *kept]))
        # Not `eval()`: a dropout that followed may be in training mode.
        layer.training = False
    replace.carry_hooks(norm, layer)
    return layer
