"""Replace one layer by another: what is carried over, and every place where a model uses the old one."""

import copy
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.utils import parametrize

_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# Attributes of a frozen layer that override the methods of its class.
_FROZEN = ("train", "reset_running_stats")

_CONTAINERS = (list, tuple, set, frozenset, dict)

Where = str | Callable[[str, nn.Module], bool]


class Frozen:
    """A layer's `train` while its statistics are frozen: the layer stays in eval, its children follow the mode."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, mode: bool = True) -> nn.Module:
        nn.Module.train(self.layer, mode)
        self.layer.training = False
        return self.layer


class Kept:
    """A layer's `reset_running_stats` while its statistics are frozen: it warns the tool that resets all layers."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self) -> None:
        name = type(self.layer).__name__
        warnings.warn(f"{name} is frozen and keeps its statistics; call iternorm.unfreeze first", stacklevel=2)


def changed(layer: nn.Module) -> str | None:
    """What was done to a layer that a new one in its place would lose."""
    if "forward" in vars(layer):
        return "has a forward of its own set on the instance; replace it by hand"
    if parametrize.is_parametrized(layer):
        return "is parametrized; remove the parametrization first (torch.nn.utils.parametrize)"
    return None


def freeze(layer: nn.Module) -> None:
    """Keep a layer in eval mode, with the statistics that it has, until `unfreeze`."""
    layer.__dict__.update(train=Frozen(layer), reset_running_stats=Kept(layer))
    layer.training = False


def unfreeze(layer: nn.Module) -> None:
    """Undo `freeze`."""
    for name in _FROZEN:
        layer.__dict__.pop(name, None)


def is_frozen(layer: nn.Module) -> bool:
    """Whether `freeze` was called on the layer."""
    return isinstance(vars(layer).get("train"), Frozen)


def carry(old: nn.Module, new: nn.Module, without: tuple[str, ...] = ()) -> None:
    """Give `new` the parameters, buffers, children, mode, hooks and other attributes of `old`, less those `without`.

    The tensors themselves are carried over, so optimizers and tied layers still hold them. Attributes that only `new`
    has stay.
    """
    # Weight norm and pruning keep a weight under other names: the one that `new` was made with would stand in its way.
    new._parameters.clear()
    for kind in ("_parameters", "_buffers", "_modules"):
        taken = {name: value for name, value in getattr(old, kind).items() if name not in without}
        getattr(new, kind).update(taken)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set - set(without)
    carry_hooks(old, new)
    # What `compile` leaves on a layer calls that layer, and not the new one.
    without = (*without, "_compiled_call_impl", *(_FROZEN if is_frozen(old) else ()))
    for name, value in vars(old).items():
        if name not in vars(new) and name not in without:
            new.__dict__[name] = value
    new.training = old.training
    if is_frozen(old):
        freeze(new)


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the hooks of `old`: the same dicts, so that existing handles still remove them."""
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    for handle, hook in new._load_state_dict_pre_hooks.items():
        if isinstance(hook, _WrappedHook) and hook.with_module:
            new._load_state_dict_pre_hooks[handle] = _WrappedHook(hook.hook, new)


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each replacement wherever its key is used. Returns the model, or its own replacement."""
    for parent in [*model.modules(), *replacements.values()]:
        for name, child in parent._modules.items():
            if child is not None and child in replacements and replacements[child] is not parent:
                parent._modules[name] = replacements[child]
        # A forward may run over a list, or look into a dict or an object, of children that are registered elsewhere.
        renewed = {name: _renewed(value, replacements) for name, value in vars(parent).items() if name != "_modules"}
        vars(parent).update(renewed)
    return replacements.get(model, model)


def _renewed(value: Any, replacements: Mapping[nn.Module, nn.Module], above: tuple[Any, ...] = ()) -> Any:
    """The value, or a container like it, with replacements in it. An object is changed in place, but none inside it."""
    if isinstance(value, nn.Module):
        return replacements.get(value, value)
    if isinstance(value, type) or any(value is each for each in above):
        return value
    inside = (*above, value)
    if not isinstance(value, _CONTAINERS):
        attributes = getattr(value, "__dict__", {}) if all(isinstance(each, _CONTAINERS) for each in above) else {}
        for name, held in list(attributes.items()):
            if (renewed := _renewed(held, replacements, inside)) is not held:
                attributes[name] = renewed
        return value
    old = list(value.values() if isinstance(value, dict) else value)
    new = [_renewed(each, replacements, inside) for each in old]
    if all(map(operator.is_, new, old)):
        return value
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update(zip(value, new, strict=True))
        return result
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def selected(layers: list[tuple[str, nn.Module]], where: Where, kind: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that `where` asks for: "all", "first" in the model's own order, or a predicate on (name, module)."""
    if callable(where):
        return ((name, layer) for name, layer in layers if where(name, layer))
    if where not in ("all", "first"):
        raise ValueError(f'where={where!r} is not known; give "all", "first" or a predicate on (name, module)')
    if where == "first" and not layers:
        raise ValueError(f'where="first" needs a {kind} layer, and the model has none; nothing was changed')
    return iter(layers if where == "all" else layers[:1])


def named(name: str, layer: Any) -> str:
    """A layer as messages name it."""
    return f"{name or 'the model itself'} ({type(layer).__name__})"
