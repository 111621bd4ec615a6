"""The neighbours of whitening layers as one run of a model on given inputs shows them: see `dataflow`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iternorm.layers.base import WhiteningNorm
from iternorm.models.fold.dataflow import (
    LINEAR_MAPS,
    Flow,
    called_once,
    has_hooks,
    is_linear_map,
    owners_of,
    residual_of,
)


def recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flow:
    """The flow of one run of the model on these arguments, and the dimensions of the whitening layers' inputs."""
    recorder = _Recorder()
    handles = []
    for layer in model.modules():
        if has_hooks(layer):
            handles.append(layer.register_forward_pre_hook(recorder.look, prepend=True, with_kwargs=True))
            handles.append(layer.register_forward_hook(recorder.look, prepend=True))
        if isinstance(layer, (WhiteningNorm, *LINEAR_MAPS)):
            handles.append(layer.register_forward_pre_hook(recorder.enter, prepend=True, with_kwargs=True))
            handles.append(layer.register_forward_hook(recorder.leave))
    try:
        with torch.no_grad(), recorder, recorder.attributes():
            outputs = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.flow(model, outputs)


class _Recorder(TorchDispatchMode):
    """Every tensor with the layer that made it and those that used it; what is outside any such layer is None."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[nn.Module] = []
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self.inputs: list[Any] = []
        self.added_to: set[nn.Module] = set()
        self.dtypes: dict[nn.Module, set[torch.dtype]] = defaultdict(set)
        self.users: dict[int, set[nn.Module | None]] = defaultdict(set)
        # Tensors of whitening layers that others ask for, if only for their shape or dtype.
        self.looked_at: set[int] = set()
        # Of each output of a whitening layer: the layer's input and its version then, and whether it changed before
        # another layer took the output.
        self.sources: dict[int, tuple[Tensor, int | None]] = {}
        self.changed: set[int] = set()
        # Tensors are told apart by their address, so none may be freed while the model runs.
        self.kept: list[Any] = []

    @contextmanager
    def attributes(self) -> Iterator[None]:
        """Note which tensors of a whitening layer are asked for outside it; torch.fx does it in the same way."""
        ask = nn.Module.__getattr__

        def noted(layer: nn.Module, name: str) -> Any:
            value = ask(layer, name)
            if isinstance(value, Tensor) and isinstance(layer, WhiteningNorm) and layer not in self.stack:
                self.looked_at.add(id(value))
            return value

        nn.Module.__getattr__ = noted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            nn.Module.__getattr__ = ask

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.use((args, kwargs))
        result = func(*args, **kwargs)
        self.kept.append(result)
        return result

    def use(self, tree: Any) -> None:
        user = self.stack[-1] if self.stack else None
        for value in tree_leaves(tree):
            if isinstance(value, Tensor):
                self.users[id(value)].add(user)
                self.kept.append(value)

    def look(self, layer: nn.Module, *values: Any) -> None:
        """What other hooks of a module see."""
        self.use(values)

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = residual_of(args, kwargs)
        if isinstance(layer, WhiteningNorm) and residual is not None:
            self.added_to.add(layer)
            # It goes past the layer's map.
            self.use(residual)
        self.stack.append(layer)
        self.inputs.append(args[0] if args else kwargs.get("input"))
        # A kernel of our own takes its input without an operation that could be seen.
        self.use(self.inputs[-1])
        source, version = self.sources.get(id(self.inputs[-1]), (None, None))
        if source is not None and _version(source) != version:
            self.changed.add(id(self.inputs[-1]))
        # Under autocast a convolution takes any dtype, and the weights around it have their own.
        if isinstance(self.inputs[-1], Tensor) and not torch.is_autocast_enabled(self.inputs[-1].device.type):
            self.dtypes[layer].add(self.inputs[-1].dtype)

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.calls.append((self.stack.pop(), self.inputs.pop(), output))
        self.kept.append(output)
        source = self.calls[-1][1]
        if isinstance(layer, WhiteningNorm) and isinstance(source, Tensor):
            self.sources[id(output)] = source, _version(source)

    def flow(self, model: nn.Module, outputs: Any) -> Flow:
        made = {id(output) for _, _, output in self.calls}
        kept = [value for layer in model.modules() for value in tree_leaves(vars(layer)) if id(value) in made]
        self.use((_leaves(outputs), kept))
        owned, seen = owners_of(model).items(), self.looked_at
        read = {
            layer for value, owners in owned if value in seen or not self.users[value] <= owners for layer in owners
        }
        once = called_once((layer for layer, _, _ in self.calls), model) - read
        maker = {id(output): layer for layer, _, output in reversed(self.calls)}
        flow = Flow(added_to=self.added_to, dtypes=self.dtypes, read=read)
        for layer, source, output in self.calls:
            if isinstance(layer, WhiteningNorm) and isinstance(source, Tensor):
                flow.dimensions[layer].add(source.ndim)
                previous = maker.get(id(source))
                if layer in once and previous in once and is_linear_map(previous) and self.users[id(source)] == {layer}:
                    flow.previous[layer] = previous
            following = next((user for user in self.users[id(output)] if user is not None), None)
            if isinstance(layer, WhiteningNorm) and layer in once and following in once and is_linear_map(following):
                takes = any(user is following and taken is output for user, taken, _ in self.calls)
                if takes and self.users[id(output)] == {following} and id(output) not in self.changed:
                    flow.following[layer] = following
        return flow


def _leaves(outputs: Any) -> list[Any]:
    """What a model returns, in the attributes of objects too."""
    leaves, seen = tree_leaves(outputs), set()
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, nn.Module, type)) and id(leaf) not in seen:
            seen.add(id(leaf))
            slots = (getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ()))
            leaves += tree_leaves((getattr(leaf, "__dict__", None), *slots))
    return leaves


def _version(tensor: Tensor) -> int | None:
    """Counts changes in place, those of views included. Tensors of inference mode have none."""
    return None if tensor.is_inference() else tensor._version
