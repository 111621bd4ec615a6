"""The forward of one module as a graph, with its children as single nodes, and a module with such a graph as forward.

A graph stands for a forward only if every call takes the same way through the code. `trace` refuses what it can see to
be otherwise. `subclass` makes a class with a new forward that derives from the module's own, so that the module stays
what it is: the same object, attributes, children, hooks and methods, and an instance of its class.
"""

import functools
import importlib
import inspect
import itertools
import linecache
import operator
import random
import types
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What code calls that asks for the type of a value, which a proxy does not have, or enters a context, which a graph
# does not keep. no_grad is seen when it is entered.
_BEYOND_VALUES = {"isinstance", "issubclass", "type", "hasattr", "autocast", "a decorator"}

_CHECKPOINT = "a graph does not keep what saves activations in another way (checkpoint, save_on_cpu)"

_IN_PLACE = ("iadd", "isub", "imul", "itruediv")

_counter = itertools.count()


class CannotTraceError(Exception):
    """Says why, in words that follow the name of the module's class."""


class Rewritten:
    """Mixed into the class of a module whose forward was rewritten, so that the module copies and pickles."""

    original_class: type
    program: tuple[str, tuple[tuple[str, Any], ...]]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        _, arguments, *state = super().__reduce_ex__(max(2, protocol))
        return _new, (self.original_class, *self.program, *arguments[1:]), *state  # pyright: ignore


def _new(original_class: type, source: str, scope: tuple[tuple[str, Any], ...], *arguments: Any) -> Any:
    kind = _subclass(original_class, source, scope)
    return kind.__new__(kind, *arguments)


def subclass(module: nn.Module, graph: fx.Graph) -> type:
    """A subclass of the module's class, of the same name, whose forward is the graph."""
    graph.lint()
    code = graph.python_code("self")
    # Modules are kept by name, because they do not pickle.
    scope = ((n, f"{v.__name__}:" if isinstance(v, types.ModuleType) else v) for n, v in code.globals.items())
    original = module.original_class if isinstance(module, Rewritten) else type(module)
    return _subclass(original, code.src, tuple(scope))


# The blocks of a network share a class, so that a compiler compiles it once.
@functools.cache
def _subclass(original_class: type, source: str, scope: tuple[tuple[str, Any], ...]) -> type:
    names: dict[str, Any] = {
        name: importlib.import_module(value[:-1]) if isinstance(value, str) and value.endswith(":") else value
        for name, value in scope
    }
    filename = f"<iternorm: {original_class.__qualname__}.forward {next(_counter)}>"
    # Tracebacks and compilers look for the source of a function.
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename
    exec(compile(source, filename, "exec"), names)
    body = {
        "forward": names["forward"],
        "original_class": original_class,
        "program": (source, scope),
        "__module__": original_class.__module__,
        "__qualname__": original_class.__qualname__,
        "__doc__": original_class.__doc__,
    }
    return types.new_class(original_class.__name__, (Rewritten, original_class), exec_body=lambda ns: ns.update(body))


def trace(module: nn.Module) -> fx.Graph:
    """The graph of a module's own forward. Raises `CannotTraceError`; the module stays as it was."""
    sources, graph = [], fx.Graph()
    modes = [(each, each.training) for each in module.modules()]
    lists = (value for value in vars(module).values() if isinstance(value, list))
    kept_lists = [(value, value[:]) for value in lists]
    dicts = (vars(module), *(value for value in vars(module).values() if isinstance(value, dict)))
    kept_dicts = [(value, dict(value)) for value in dicts]
    chance = random.getstate()
    try:
        _check_code(module)
        for training in (True, False):
            for each, _ in modes:
                each.training = training
            tracer = _Tracer()
            with _OnlyProxies(), torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINT):
                graph = tracer.trace(module)
            sources.append(graph.python_code("self").src)
    except CannotTraceError:
        raise
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CannotTraceError(f"cannot be traced by torch.fx: {text}") from error
    finally:
        for each, mode in modes:
            each.training = mode
        changed = [container for container, before in (*kept_lists, *kept_dicts) if not _same(container, before)]
        for container, before in kept_lists:
            container[:] = before
        for container, before in kept_dicts:
            container.clear()
            container.update(before)
        drawn = random.getstate() != chance
        random.setstate(chance)
    if drawn:
        raise CannotTraceError("draws random numbers in its forward")
    if changed:
        raise CannotTraceError("sets attributes of its own in its forward")
    if sources[0] != sources[1]:
        raise CannotTraceError("does something else in training than in eval")
    return graph


def _same(container: Any, before: Any) -> bool:
    if isinstance(container, list):
        return len(container) == len(before) and all(map(operator.is_, container, before))
    return container.keys() == before.keys() and all(container[name] is value for name, value in before.items())


def _check_code(module: nn.Module) -> None:
    """Refuse a forward of which a graph would show one way of several."""
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        raise CannotTraceError("is a program already, of TorchScript or of torch.fx")
    if "forward" in vars(module):
        raise CannotTraceError("has a forward of its own set on the instance")
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) != 1 or parameters[0].kind not in named or parameters[0].default is not inspect.Parameter.empty:
        # Such code asks whether an argument is None, and a proxy is not.
        raise CannotTraceError("has a forward that takes more, or less, than one argument")
    names = _names(type(module))
    beyond = sorted(names & _BEYOND_VALUES)
    if beyond:
        raise CannotTraceError(f"has a forward with {', '.join(beyond)} in it, which a graph cannot follow")
    if any("checkpoint" in name for name in names):
        # A checkpoint imports it when first called. Inside the trace that import may fail, as in torch 2.6.
        importlib.import_module("torch._dynamo")


def _names(kind: Any) -> set[str]:
    """The names in the code of a class's forward, and of the class's methods that it names."""
    found: set[str] = {"a decorator"} if hasattr(kind.forward, "__wrapped__") else set()
    codes = [inspect.unwrap(kind.forward).__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in set(code.co_names) - found:
            found.add(name)
            # A value's `type` or `to` is no method of the module.
            method: Any = None if hasattr(nn.Module, name) else getattr(kind, name, None)
            codes += [method.__code__] if hasattr(method, "__code__") else []
            if hasattr(method, "__wrapped__"):
                found.add("a decorator")
    return found


class _OnlyProxies(TorchFunctionMode):
    """Refuses a function that no value of the traced forward goes into: a draw, a constant, a context."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", str(func))
            raise RuntimeError(f"{name} is called on nothing that comes from the input")
        return func(*args, **kwargs)


class _Proxy(fx.Proxy):
    """A proxy that tells `y += x` from `y + x`."""


def _in_place(name: str) -> Any:
    target = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    """Takes every child as one node, and buffers as they are when the graph runs."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)
