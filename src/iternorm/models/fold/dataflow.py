"""Which layers feed a whitening layer and nothing else: what folding has to know about a model.

Two ways to find out. `traced` follows the model symbolically with torch.fx and needs no input; it stops at control flow
that depends on the input. `recording.recorded` runs the model once on given inputs and watches every operation.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iternorm.layers.base import WhiteningNorm

LINEAR_MAPS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# Layers that give back their input in eval.
_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Layers whose output may be their input's memory.
_VIEWING = (*_PASSING, nn.Flatten, nn.Unflatten)
# Layers whose output has the dtype of their input, whatever that of their weights is.
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}


@dataclass
class Flow:
    """The neighbours of each whitening layer that is called once, and dimensions and dtype of its input where known.

    `previous` is a linear map called once, whose output goes into the whitening layer and nowhere else; `following` is
    one called once, that alone takes the whitening layer's output. `added_to` are layers called with a residual, `read`
    those whose parameters or buffers the model's own code reads.
    """

    previous: dict[nn.Module, nn.Module] = field(default_factory=dict)
    following: dict[nn.Module, nn.Module] = field(default_factory=dict)
    dimensions: dict[nn.Module, set[int]] = field(default_factory=lambda: defaultdict(set))
    dtypes: dict[nn.Module, set[torch.dtype]] = field(default_factory=lambda: defaultdict(set))
    added_to: set[nn.Module] = field(default_factory=set)
    read: set[nn.Module] = field(default_factory=set)


def is_linear_map(layer: Any) -> bool:
    """Whether a layer is one of torch's own convolutions or linear layers, or behaves as one."""
    base = next((base for base in LINEAR_MAPS if isinstance(layer, base)), None)
    if base is None or "forward" in vars(layer) or layer._parameters.get("weight") is None:
        return False
    methods = ("forward", "_conv_forward") if hasattr(base, "_conv_forward") else ("forward",)
    # A parametrization derives a new class, and recomputes the weight at every use.
    own = type(layer).__module__.startswith("torch.nn.utils.parametri")
    return (
        not own
        and "parametrizations" not in layer._modules
        and all(getattr(type(layer), name) is getattr(base, name) for name in methods)
    )


def traced(model: nn.Module) -> Flow:
    """The flow by torch.fx. Raises ValueError, naming the module, where the model cannot be traced."""
    if isinstance(model, WhiteningNorm):
        return Flow()
    tracer, used = _Tracer(), _Used()
    attributes = [(vars(layer), dict(vars(layer))) for layer in model.modules()]
    try:
        # Operations on the parameters alone happen now, and are no nodes.
        with used:
            graph = tracer.trace(model)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(model).__name__} at {tracer.innermost}: {error}. "
            "Give example_inputs to follow a run of the model instead, or fold layer by layer with "
            "iternorm.fold_into_previous_layer and iternorm.fold_into_next_layer"
        ) from error
    finally:
        for now, before in attributes:
            # What a forward keeps in an attribute is looked at, and the model shall not keep what is no tensor.
            tracer.watch(now)
            now.clear()
            now.update(before)
    layers = dict(model.named_modules(remove_duplicate=False))
    called = {node: layers[str(node.target)] for node in graph.nodes if node.op == "call_module"}
    # What the model's code reads directly must keep its value: as an attribute, or from `parameters()`.
    kept = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    taken = {id(kept[str(node.target)]) for node in graph.nodes if node.op == "get_attr" and node.target in kept}
    looked_at = tracer.looked_at | used.seen | taken
    read = {layer for value, owners in owners_of(model).items() if value in looked_at for layer in owners}
    once = called_once(called.values(), model) - read
    flow = Flow(read=read)
    for node, norm in called.items():
        if not isinstance(norm, WhiteningNorm):
            continue
        flow.dtypes[norm] |= _dtype(node, called)
        residual = residual_of(node.args, node.kwargs)
        if residual is not None:
            flow.added_to.add(norm)
        if norm not in once:
            continue
        source = _source(node)
        alone = source is not residual
        while isinstance(source, fx.Node):
            alone = alone and len(source.users) == 1 and source not in tracer.watched
            if not _passes(called.get(source)):
                break
            source = _source(source)
        if alone and isinstance(source, fx.Node) and is_linear_map(called.get(source)) and called[source] in once:
            flow.previous[norm] = called[source]
        target = node
        while len(target.users) == 1 and target not in tracer.watched:
            target = next(iter(target.users))
            if not _passes(called.get(target)):
                joined = is_linear_map(called.get(target)) and called[target] in once
                if joined and not _may_change(_source(node), node, target, called):
                    flow.following[norm] = called[target]
                break
    return flow


def _may_change(source: Any, first: fx.Node, last: fx.Node, called: Mapping[fx.Node, nn.Module]) -> bool:
    """Whether a value may be changed in place between two nodes: folded into the latter, a norm would take it there.

    A trace shows ``x += 1`` as an addition, so of all that uses the value only torch's layers are known to leave it.
    Some of them give back the value itself, or a view of it.
    """
    order = {each: index for index, each in enumerate(first.graph.nodes)}
    between = [each for each in getattr(source, "users", ()) if order[first] < order[each] < order[last]]
    return any(
        each not in called
        or getattr(called[each], "inplace", False)
        or (isinstance(called[each], _VIEWING) and _may_change(each, first, last, called))
        for each in between
    )


def _passes(layer: Any) -> bool:
    """Whether a layer gives back its input. Dropout that was left in training mode does not."""
    if not isinstance(layer, _PASSING) or "forward" in vars(layer):
        return False
    return isinstance(layer, nn.Identity) or not layer.training


def _source(node: fx.Node) -> Any:
    """The input of a call of a layer."""
    return node.args[0] if node.args else node.kwargs.get("input")


def _dtype(node: fx.Node, called: Mapping[fx.Node, nn.Module]) -> set[torch.dtype]:
    """The dtype that a norm takes and gives: of the weights that made its input, else of those that use its output.

    Empty where there are none, or where the model's code casts in between.
    """
    for neighbours in (lambda node: node.all_input_nodes, lambda node: list(node.users)):
        near = neighbours(node)
        while near and near[0].target not in _CASTS:
            layer = called.get(near[0])
            weights = () if layer is None or isinstance(layer, _NORMS) else layer.parameters()
            dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
            if dtype is not None:
                return {dtype}
            near = neighbours(near[0])
    return set()


def residual_of(args: Any, kwargs: Any) -> Any:
    """What is added to the output of a whitening layer, in a call of it."""
    return args[1] if len(args) > 1 else kwargs.get("residual")


def called_once(calls: Iterable[nn.Module], model: nn.Module) -> set[nn.Module]:
    """Layers that are called once, in one place, with their own parameters and without hooks."""
    places = Counter(layer for _, layer in model.named_modules(remove_duplicate=False))
    owners = Counter(p for layer in model.modules() for p in layer._parameters.values())
    return {
        layer
        for layer, times in Counter(calls).items()
        if times == 1
        and places[layer] == 1
        and not has_hooks(layer)
        and all(owners[p] == 1 for p in layer._parameters.values() if p is not None)
    }


def owners_of(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The layers that have each parameter and buffer, by its address."""
    found: dict[int, set[nn.Module]] = defaultdict(set)
    for layer in model.modules():
        for value in (*layer._parameters.values(), *layer._buffers.values()):
            if value is not None:
                found[id(value)].add(layer)
    return found


def has_hooks(layer: nn.Module) -> bool:
    """Whether hooks see, or change, what goes through the layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


class _Tracer(fx.Tracer):
    """Keeps whitening layers whole, gives the model its required arguments only, and knows where it is.

    It also notes what the model's code looks at.
    """

    innermost = "its own forward"

    def __init__(self) -> None:
        super().__init__()
        # Parameters and buffers, by their addresses.
        self.looked_at: set[int] = set()
        # Values that hooks see, or attributes keep.
        self.watched: set[fx.Node] = set()

    def watch(self, tree: Any) -> None:
        self.watched.update(leaf.node for leaf in tree_leaves(tree) if isinstance(leaf, fx.Proxy))

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, Tensor):
            self.looked_at.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (WhiteningNorm, *LINEAR_MAPS)) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        parameters = list(inspect.signature(self.root.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        # A wrapper, such as AveragedModel, hands on what it is given: one argument.
        positional = positional or [p for p in parameters if p.kind is p.VAR_POSITIONAL]
        required = [p for p in positional if p.default is p.empty] or positional[:1]
        return root_fn, [self.root, *(self.create_proxy("placeholder", p.name, (), {}) for p in required)]

    def call_module(self, m, forward, args, kwargs):
        outer = self.innermost
        self.innermost = f"{self.path_of_module(m)!r} ({type(m).__name__})"
        result = super().call_module(m, forward, args, kwargs)
        if has_hooks(m):
            self.watch((args, kwargs, result))
        # Not reset by an exception, because the message names it.
        self.innermost = outer
        return result


class _Used(TorchDispatchMode):
    """The tensors that operations take, by their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))
