"""What follows a norm in a graph, if nothing else looks at the values in between: a ReLU, an addition, or both."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import _Rank1d
from iternorm.models.followed import Followed

_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_}
_ADDITIONS = {operator.add, operator.iadd, torch.add}
_IN_PLACE = {operator.iadd, "add_"}
# Layers that give their input's number of channels, and as many positions unless the input is pooled to one.
_PASSING = (
    nn.Identity,
    nn.ReLU,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
)
_POOLS = (nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd)
_REDUCTIONS = ("mean", "sum", "amax", "amin", "max", "min")

Called = Mapping[fx.Node, nn.Module]


class Junction(NamedTuple):
    """A norm, the addition and the ReLU that follow it; `removed` is every node that the norm takes over."""

    norm: fx.Node
    add: fx.Node | None
    relu: fx.Node | None
    removed: tuple[fx.Node, ...]

    @property
    def text(self) -> str:
        if self.add is None:
            return "ReLU"
        return "adds the shortcut, then ReLU" if self.relu is not None else "adds the shortcut"


def is_bare(norm: WhiteningNorm) -> bool:
    """Whether the norm's output is the layer's: it applies no modules of its own that do something."""
    followers = norm.followers if isinstance(norm, Followed) else ()
    return all(isinstance(norm.get_submodule(name), nn.Identity) for name in followers)


def find(node: fx.Node, norm: WhiteningNorm, called: Called) -> Junction | str:
    """What follows a call of a norm, or why it cannot be joined with it."""
    if len(node.args) + len(node.kwargs) != 1:
        return "it is called with a residual already"
    value, user, passed = _follow(node, called)
    if user is None:
        return "its output is used more than once"
    if is_relu(user, called):
        return Junction(node, None, user, (*passed, user))
    if user.op == "output":
        return "its module returns its output"
    if not _is_addition(user):
        return "neither a ReLU nor an addition follows it"
    left, right = user.args
    residual = right if left is value else left
    if user.target in _IN_PLACE and left is not value:
        return "it is added to another value in place"
    if not isinstance(residual, fx.Node) or residual is value:
        return "what it is added to is not a second value of the forward"
    reason = _shape_obstacle(node, residual, norm, called)
    if reason is not None:
        return reason
    # The norm moves to the addition, so nobody may change its input before that.
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    source: Any = source_of(node)
    if any(order[node] < order[each] < order[user] for each in source.users):
        return "its input is used between it and the addition"
    _, after, passed_too = _follow(user, called)
    if after is None or not is_relu(after, called):
        return Junction(node, user, None, (*passed, user))
    return Junction(node, user, after, (*passed, user, *passed_too, after))


def rewrite(graph: fx.Graph, junction: Junction, called: Called) -> None:
    """Let the norm do what the nodes after it did."""
    norm, add = junction.norm, junction.add
    if add is not None:
        value = _follow(norm, called)[0]
        residual = add.args[1] if add.args[0] is value else add.args[0]
        with graph.inserting_before(add):
            norm = graph.call_module(str(norm.target), (source_of(norm),), {"residual": residual})
    junction.removed[-1].replace_all_uses_with(norm)
    for node in reversed(junction.removed):
        graph.erase_node(node)
    if norm is not junction.norm:
        graph.erase_node(junction.norm)


def source_of(node: fx.Node) -> Any:
    """The input of a call."""
    return node.args[0] if node.args else next(iter(node.kwargs.values()))


def is_relu(node: fx.Node, called: Called) -> bool:
    """Whether a node is a ReLU, written in any of the ways that there are."""
    # A subclass, such as ReLU6, is something else.
    if node.op == "call_module":
        return type(called[node]) is nn.ReLU
    return node.target in _RELUS if node.op == "call_function" else node.target in ("relu", "relu_")


def _is_addition(node: fx.Node) -> bool:
    known = node.target in _ADDITIONS if node.op == "call_function" else node.target in ("add", "add_")
    # A third argument, or alpha, scales what is added.
    return known and node.op != "call_module" and len(node.args) == 2 and not node.kwargs


def _follow(node: fx.Node, called: Called) -> tuple[fx.Node, fx.Node | None, tuple[fx.Node, ...]]:
    """The value that leaves a node and any nn.Identity behind it, its only user, and the calls of nn.Identity."""
    passed = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        if type(called.get(user)) is not nn.Identity:
            return node, user, tuple(passed)
        passed.append(user)
        node = user
    return node, None, tuple(passed)


def _shape_obstacle(node: fx.Node, residual: fx.Node, norm: Any, called: Called) -> str | None:
    """Why an addition may broadcast, which the layer does not do; None where shapes are alike by structure."""
    channels = _channels(residual, called, linear=isinstance(norm, _Rank1d))
    if channels is None:
        return "what is added to it is of unknown shape"
    if channels != norm.num_features:
        return f"what is added to it has {channels} channels, it has {norm.num_features}"
    if _is_pooled(node, called) or _is_pooled(residual, called):
        return "one of the two that are added may be pooled, so they may differ in shape"
    return None


def _channels(node: fx.Node, called: Called, linear: bool) -> int | None:
    """The number of channels of a value, where the layers around it tell."""
    if node.op == "placeholder":
        # What takes the module's input knows its channels.
        known = (_width(called[user], False, linear) for user in node.users if user in called)
        return next((width for width in known if width), None)
    if node.op == "call_module":
        width = _width(called[node], True, linear)
        if width != 0:
            return width
    elif not is_relu(node, called):
        return None
    source = source_of(node)
    return _channels(source, called, linear) if isinstance(source, fx.Node) else None


def _width(layer: Any, out: bool, linear: bool) -> int | None:
    """The channels that a layer gives (or takes); 0 if it gives what it takes, None if it does not say."""
    if isinstance(layer, _PASSING):
        return 0
    if isinstance(layer, _BatchNorm):
        return layer.num_features
    if isinstance(layer, (_ConvNd, _ConvTransposeNd)):
        return layer.out_channels if out else layer.in_channels
    if isinstance(layer, nn.Linear) and linear:
        return layer.out_features if out else layer.in_features
    if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
        for child in reversed(list(layer)) if out else layer:
            width = _width(child, out, linear)
            if width != 0:
                return width
        return 0
    return None


def _is_pooled(node: fx.Node, called: Called) -> bool:
    """Whether a value may have lost its positions on the way from the module's input."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_module":
            layers = called[node].children() if isinstance(called[node], nn.Sequential) else [called[node]]
            if any(isinstance(layer, _POOLS) for layer in layers):
                return True
        elif node.op in ("call_function", "call_method"):
            name = getattr(node.target, "__name__", str(node.target))
            if name in _REDUCTIONS or name.startswith("adaptive"):
                return True
        waiting += node.all_input_nodes
    return False
