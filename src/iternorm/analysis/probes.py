"""Hooks on the normalization layers of a model: one streaming pass, bounded memory, the model left as it was."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from iternorm.modules import WhiteningNorm

from .conditioning import Moments, samples_by_channels, update_moments
from .operations import operation_of

# Layers that normalize each example by itself: the batch adds no noise.
PER_EXAMPLE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
NORMALIZATIONS = (nn.modules.batchnorm._BatchNorm, WhiteningNorm, *PER_EXAMPLE)


class LayerProbe:
    """Streaming statistics of the input and the output of one layer.

    Args:
        name: The layer's name in the model.
        layer: The layer.
        positions: Positions (pixels, tokens) of an example to measure, on a regular grid whose origin changes from
            batch to batch; None is all of them.
        pool: What to keep of single examples, or None.
        seed: Decides grid origins.
    """

    def __init__(self, name: str, layer: nn.Module, positions: int | None, pool: "Reservoir | None", seed: int):
        self.name = name
        self.layer = layer
        self.operation = operation_of(layer)
        self.positions = positions
        self.pool = pool
        self.num_examples = 0
        self.num_positions = 0
        self.before: Moments | None = None
        self.after: Moments | None = None
        self.running = _running_statistics(layer)
        self._random = random.Random(seed)
        self._grid: tuple[slice, ...] = ()

    def see_input(self, x: Tensor) -> Tensor:
        """Take in the input of one call. Returns whether all of it is finite, as a tensor on its device."""
        x = self._channels_first(x)
        self.num_examples += x.shape[0]
        self.num_positions = x[0, 0].numel()
        self._grid = self._choose_grid(x.shape[2:])
        self.before = update_moments(self.before, self._rows(x))
        if self.pool is not None:
            self.pool.add(x)
        # A sum is not finite where an element is not: one pass, and nothing the size of the activation is made.
        return x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()

    def see_output(self, y: Tensor) -> None:
        """Take in the output of the call whose input was last seen, at the same positions."""
        self.after = update_moments(self.after, self._rows(self._channels_first(y)))

    def _channels_first(self, x: Tensor) -> Tensor:
        """``[N, C, ...]`` in at least fp32 where it is small; the channels of LayerNorm are what it normalizes over."""
        x = x.detach()
        if isinstance(self.layer, nn.LayerNorm | nn.RMSNorm):
            x = x.movedim(x.ndim - len(self.layer.normalized_shape), 1)
        if x.ndim < 2 or x.numel() == 0:
            raise ValueError(f"layer {self.name!r} got an input of shape {tuple(x.shape)}: [N, C, ...] is needed")
        return x

    def _choose_grid(self, shape: torch.Size) -> tuple[slice, ...]:
        total = shape.numel()
        if self.positions is None or total <= self.positions or not shape:
            return ()
        # The smallest common stride that leaves few enough positions, where a dimension shorter than it keeps one.
        stride = 1
        while _grid_size(shape, stride) > self.positions:
            stride += 1
        return tuple(slice(self._random.randrange(min(stride, size)), None, stride) for size in shape)

    def _rows(self, x: Tensor) -> Tensor:
        rows = samples_by_channels(x[(slice(None), slice(None), *self._grid)])
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _grid_size(shape: torch.Size, stride: int) -> int:
    count = 1
    for size in shape:
        count *= -(-size // stride)
    return count


class Reservoir:
    """A uniform sample of the examples of a stream (Vitter's algorithm R), a few positions of each.

    Args:
        size: Examples to keep.
        positions: Positions to keep of each, at most.
        budget: Bytes to stay below by keeping fewer positions, one at least.
        seed: Decides which examples stay.
    """

    def __init__(self, size: int, positions: int, budget: int, seed: int):
        self.size = size
        self.positions = positions
        self.budget = budget
        self.seen = 0
        # [size, P, C], allocated when the first batch shows its shape.
        self._rows: Tensor | None = None
        self._random = random.Random(seed)

    def add(self, x: Tensor) -> None:
        """Offer the examples of an activation ``[N, C, ...]``."""
        flat = x.flatten(2) if x.ndim > 2 else x[..., None]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self._rows is None:
            example = self.size * x.shape[1] * dtype.itemsize
            count = max(1, min(self.positions, flat.shape[2], self.budget // example))
            self._rows = torch.zeros(self.size, count, x.shape[1], dtype=dtype, device=x.device)
        slots: dict[int, int] = {}
        for example in range(x.shape[0]):
            slot = self.seen if self.seen < self.size else self._random.randrange(self.seen + 1)
            self.seen += 1
            if slot < self.size:
                slots[slot] = example
        if slots:
            # The middles of equal stretches, so that an activation of another size gives as many.
            count = self._rows.shape[1]
            chosen = ((torch.arange(count, device=x.device) + 0.5) * flat.shape[2] / count).long()
            examples = torch.tensor(list(slots.values()), device=x.device)
            kept = flat.index_select(0, examples).index_select(2, chosen).mT
            self._rows[torch.tensor(list(slots.keys()), device=x.device)] = kept.to(dtype)

    @property
    def examples(self) -> Tensor:
        """The kept examples ``[K, C, P]``."""
        assert self._rows is not None
        return self._rows[: min(self.seen, self.size)].mT


def _running_statistics(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A copy of the running mean ``[C]`` and of the whitening matrices ``[G, d, d]`` that eval uses."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        if layer.running_mean is None or layer.running_var is None:
            return None
        scale = (layer.running_var.detach() + layer.eps).rsqrt()
        return layer.running_mean.detach().clone(), scale[:, None, None]
    if isinstance(layer, WhiteningNorm) and layer.running_mean is not None:
        return layer.running_mean.detach().clone(), layer.whitening_matrix().detach().clone()
    return None


def find_layers(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """The layers to probe by name: the named ones, or every normalization layer.

    Raises:
        TypeError: `model` is not a module.
        ValueError: A name is not one of the model's, or the model has no normalization layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but a torch.nn.Module is needed")
    modules = dict(model.named_modules())
    if names is None:
        found = {name: module for name, module in modules.items() if isinstance(module, NORMALIZATIONS)}
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no normalization layer (BatchNorm, SyncBatchNorm, LayerNorm, RMSNorm, "
                "GroupNorm, InstanceNorm, IterNorm, DecorrelatedBatchNorm): name the modules to analyze, layers=[...]"
            )
        return found
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in modules]
    if unknown or not names:
        norms = ", ".join(name for name, module in modules.items() if isinstance(module, NORMALIZATIONS))
        wrong = ", ".join(map(repr, unknown)) or "empty"
        raise ValueError(f"layers: {wrong}; normalization layers of the model are: {norms or 'none'}")
    return {name: modules[name] for name in names}


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put modes, buffers and random states back on the way out, after an exception as well."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    python_state = random.getstate()
    # numpy is no dependency: where nothing has imported it, its state cannot change.
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            with torch.no_grad():
                for module, name, buffer, copy in buffers:
                    if buffer is not None:
                        buffer.copy_(copy)
                    module._buffers[name] = buffer
            for module, training in modes:
                module.training = training


@contextmanager
def hooked(probes: Mapping[str, LayerProbe], finite: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Let the probes see every call of their layers, and note in `finite` which inputs were finite."""

    def before(probe: LayerProbe):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            finite.append((probe.name, probe.see_input(_first_tensor(probe.name, (*args, *kwargs.values())))))

        return hook

    def after(probe: LayerProbe):
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            probe.see_output(_first_tensor(probe.name, output if isinstance(output, tuple) else (output,)))

        return hook

    with ExitStack() as stack:
        for probe in probes.values():
            handle = probe.layer.register_forward_pre_hook(before(probe), with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(probe.layer.register_forward_hook(after(probe)).remove)
        yield


def _first_tensor(name: str, values: Iterable[object]) -> Tensor:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"layer {name!r} was called without a floating-point tensor")
