"""Norm and ReLU, and norm, addition and ReLU, joined into one layer where the structure of a model allows it.

`plan` looks at a model and changes nothing; `Plan.apply` changes it. `separate` undoes it. In an `nn.Sequential` and in
a module that has a ReLU for each of its norms the norm takes the activation, and an `Absorbed` takes the ReLU's place.
In any other module the forward is rewritten (`iternorm.models.fuse.rewrite`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from iternorm.layers.base import WhiteningNorm
from iternorm.models import replace
from iternorm.models.fold.dataflow import has_hooks
from iternorm.models.followed import Followed, has_own_forward
from iternorm.models.fuse import patterns, rewrite
from iternorm.models.fuse.patterns import Junction

Rows = list[tuple[str, str]]


class Absorbed(nn.Identity):
    """In the place of an `nn.ReLU` that the whitening layer before it applies itself."""

    def __init__(self, relu: nn.ReLU) -> None:
        super().__init__()
        self.inplace = relu.inplace

    def extra_repr(self) -> str:
        return "ReLU"


@dataclass
class Plan:
    """What can be joined: rows for a report, in the model's order, and the changes."""

    fused: Rows = field(default_factory=list)
    unfused: Rows = field(default_factory=list)
    changes: list[Callable[[], None]] = field(default_factory=list)

    def apply(self) -> None:
        for change in self.changes:
            change()


class _Site(NamedTuple):
    """A module, the graph of its forward, and the layer that each node calls."""

    module: nn.Module
    graph: fx.Graph
    called: dict[fx.Node, nn.Module]
    # A chain's forward runs over its layers, whichever they are, so it stays.
    is_chain: bool = False


def plan(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> Plan:
    """What can be joined in the model after `replacements` will have taken the places of their keys."""
    return _Planner(model, replacements).plan()


def separate(model: nn.Module) -> None:
    """Undo `Plan.apply`: modules have their own forward again, and ReLUs stand where they stood."""
    joined = joined_norms(model)
    absorbed = [module for module in model.modules() if isinstance(module, Absorbed)]
    relus = [nn.ReLU(each.inplace).train(each.training) for each in absorbed]
    for each, relu in zip(absorbed, relus, strict=True):
        replace.carry_hooks(each, relu)
    replace.replace_modules(model, dict(zip(absorbed, relus, strict=True)))
    for module in model.modules():
        if isinstance(module, rewrite.Rewritten):
            module.__class__ = module.original_class
    for norm in joined:
        del norm._joined
        _activate(norm, None)


def joined_norms(model: nn.Module) -> set[Any]:
    """The whitening layers that apply a ReLU which `separate` can put back.

    A graph that was traced from a fused model has no place for it: the layers that it calls keep their activation.
    """
    norms = {module for module in model.modules() if isinstance(module, WhiteningNorm) and "_joined" in vars(module)}
    for graph_module in model.modules():
        if isinstance(graph_module, fx.GraphModule):
            targets = (str(node.target) for node in graph_module.graph.nodes if node.op == "call_module")
            called = map(graph_module.get_submodule, targets)
            norms -= {layer for layer in called if not isinstance(layer, Followed)}
    return norms


class _Planner:
    def __init__(self, model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
        self.names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self.names[replacements.get(module, module)] = name
        self.replacements = replacements
        self.places = Counter(self.now(module) for _, module in model.named_modules(remove_duplicate=False))
        # How often the code that could be followed calls each module, and why other code could not.
        self.calls: Counter[nn.Module] = Counter()
        self.reasons: dict[nn.Module, str] = {}
        self.texts: dict[nn.Module, str] = {}
        self.changes: list[Callable[[], None]] = []

    def now(self, module: nn.Module) -> nn.Module:
        return self.replacements.get(module, module)

    def plan(self) -> Plan:
        norms = [module for module in self.names if isinstance(module, WhiteningNorm)]
        sites = list(self.sites())
        for site in sites:
            self.calls.update(layer for layer in site.called.values() if layer is not site.module)
        for site in sites:
            self.join(site)
        result = Plan(changes=self.changes)
        for norm in norms:
            row = self.texts.get(norm) or self.reasons.get(norm, "no forward that torch.fx can trace calls it")
            (result.fused if norm in self.texts else result.unfused).append((self.names[norm], row))
        return result

    def sites(self) -> Iterator[_Site]:
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):
                # Whitening layers cannot be in it, and its class has no forward to look at.
                continue
            if isinstance(module, Followed):
                yield self.chain(module, [module, *(module.get_submodule(name) for name in module.followers)])
            elif type(module).forward is nn.Sequential.forward and "forward" not in vars(module):
                yield self.chain(module, [child for child in module._modules.values() if child is not None])
            elif not isinstance(module, (WhiteningNorm, nn.ModuleList, nn.ModuleDict)):
                inside = dict(module.named_modules(remove_duplicate=False))
                if not any(isinstance(self.now(each), WhiteningNorm) for each in inside.values()):
                    continue
                try:
                    graph = rewrite.trace(module)
                except rewrite.CannotTraceError as error:
                    for norm in self.own_norms(module):
                        self.reasons[norm] = f"{type(module).__name__} {error}"
                    continue
                calls = (node for node in graph.nodes if node.op == "call_module")
                yield _Site(module, graph, {node: self.now(inside[str(node.target)]) for node in calls})

    def chain(self, module: nn.Module, layers: list[nn.Module]) -> _Site:
        """Layers called one after the other."""
        graph, called = fx.Graph(), {}
        value = graph.placeholder("input")
        names = {layer: name for name, layer in module._modules.items()}
        for layer in layers:
            value = graph.call_module(names.get(layer, ""), (value,))
            called[value] = self.now(layer)
        graph.output(value)
        return _Site(module, graph, called, is_chain=True)

    def own_norms(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(self.now(child), WhiteningNorm):
                yield self.now(child)
            elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from self.own_norms(child)

    def join(self, site: _Site) -> None:
        junctions: list[Junction] = []
        for node, norm in site.called.items():
            if not isinstance(norm, WhiteningNorm) or norm in self.texts:
                continue
            found = self.obstacle(norm, site) or patterns.find(node, norm, site.called)
            if isinstance(found, Junction):
                found = self.conflict(found, site, junctions) or found
            if isinstance(found, Junction):
                junctions.append(found)
            else:
                self.reasons[norm] = found
        uses = Counter(site.called.get(each.relu) for each in junctions if each.relu is not None)
        absorbed = [each for each in junctions if self.is_absorbed(each, site, uses)]
        if site.is_chain or len(absorbed) == len(junctions):
            left = [each for each in junctions if each not in absorbed]
            self.reasons.update({site.called[each.norm]: "the ReLU after it is used elsewhere, too" for each in left})
            self.changes += [partial(_absorb, site, each) for each in absorbed]
            self.take(site, absorbed)
            return
        for each in junctions:
            patterns.rewrite(site.graph, each, site.called)
        try:
            kind = rewrite.subclass(site.module, site.graph)
        except Exception as error:
            reason = f"{type(site.module).__name__} cannot be rewritten: {error}"
            self.reasons.update({site.called[each.norm]: reason for each in junctions})
            return
        self.changes.append(partial(setattr, site.module, "__class__", kind))
        self.take(site, junctions)

    def take(self, site: _Site, junctions: list[Junction]) -> None:
        for each in junctions:
            norm: Any = site.called[each.norm]
            self.texts[norm] = each.text
            if each.relu is not None:
                self.changes.append(partial(_join, norm))

    def obstacle(self, norm: WhiteningNorm, site: _Site) -> str | None:
        """Why a norm is left alone whatever follows it; None where it is not."""
        if isinstance(norm, LazyModuleMixin):
            return "it has not seen a batch"
        if norm.activation is not None:
            return f"it has activation={norm.activation!r} already"
        if has_own_forward(norm):
            return "it has a forward of its own"
        if has_hooks(norm):
            return "a hook watches it"
        if self.places[norm] > 1 or self.calls[norm] > 1:
            return "it is used in more than one place"
        if norm is not site.module and not patterns.is_bare(norm):
            return "it applies modules of its own"
        return None

    def conflict(self, found: Junction, site: _Site, others: list[Junction]) -> str | None:
        """Why what follows a norm cannot become part of it."""
        layers = [site.called[node] for node in found.removed if node in site.called]
        hooked = next((layer for layer in layers if has_hooks(layer)), None)
        if hooked is not None:
            return f"a hook watches {self.names[hooked]}, which follows it"
        if any(node in other.removed for other in others for node in found.removed):
            return "it is the shortcut that another layer adds"
        return None

    def is_absorbed(self, junction: Junction, site: _Site, uses: Counter) -> bool:
        """Whether the ReLU is a module of which no use is left when the norms have taken theirs."""
        relu = None if junction.add is not None or junction.relu is None else site.called.get(junction.relu)
        return relu is not None and self.places[relu] == 1 and self.calls[relu] == uses[relu]


def _absorb(site: _Site, junction: Junction) -> None:
    assert junction.relu is not None
    relu: Any = site.called[junction.relu]
    replace.replace_modules(site.module, {relu: Absorbed(relu).train(relu.training)})


def _join(norm: Any) -> None:
    norm._joined = True
    _activate(norm, "relu")


def _activate(norm: WhiteningNorm, activation: str | None) -> None:
    norm.activation = activation
    norm._check_attributes()
