"""Hooks on the normalization layers of a model: one streaming pass, bounded memory, the model left as it was."""

import numbers
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iternorm.analysis.conditioning import Moments, merge_moments, samples_by_channels, update_moments
from iternorm.analysis.operations import operation_of
from iternorm.analysis.pools import SamplePool, StatisticsPool
from iternorm.layers.base import WhiteningNorm
from iternorm.layers.per_sample import PerSampleWhitening

# Layers that normalize each example on its own: the batch adds no noise.
PER_EXAMPLE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, PerSampleWhitening)
# Layers whose output is known to be a scale and a shift of each channel; a subclass or a hook may add an activation.
CHANNELWISE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMALIZATIONS = (nn.modules.batchnorm._BatchNorm, *PER_EXAMPLE)


class LayerProbe:
    """Streaming statistics of the input and the output of one layer.

    Args:
        name: The layer's name in the model.
        layer: The layer.
        positions: Positions (pixels, tokens) of an example to measure, on a regular grid whose origin changes from
            batch to batch; None is all of them.
        pools: What to keep of batches and of single examples for SND, or None.
        seed: Decides grid origins.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        positions: int | None,
        pools: tuple[StatisticsPool, SamplePool] | None,
        seed: int,
    ):
        self.name = name
        self.layer = layer
        self.operation = operation_of(layer)
        self.positions = positions
        self.pools = pools
        self.num_examples = 0
        self.num_positions = 0
        self.before: Moments | None = None
        self.after: Moments | None = None
        self.running = _running_statistics(layer)
        changed = bool(layer._forward_hooks) or "forward" in vars(layer)
        self._channelwise = type(layer) in CHANNELWISE and not changed
        self._random = random.Random(seed)
        # The shape of an example's positions, and the slices of it that are measured.
        self._grid: tuple[torch.Size, tuple[slice, ...]] = (torch.Size(), ())
        # The last input and its moments, of a channelwise layer, until its output is seen.
        self._last: tuple[Tensor, Moments] | None = None

    def see_input(self, x: Tensor) -> Tensor:
        """Take in the input of one call. Returns whether all of it is finite, as a tensor on its device."""
        x = self._channels_first(x)
        self.num_examples += x.shape[0]
        self.num_positions = x[0, 0].numel()
        self._grid = x.shape[2:], self._choose_grid(x.shape[2:])
        rows = self._rows(x)
        if self._channelwise:
            self._last = rows, update_moments(None, rows)
            self.before = merge_moments(self.before, self._last[1])
        else:
            self.before = update_moments(self.before, rows)
        for pool in self.pools or ():
            pool.add(x)
        # The sum is not finite if an element is not. This is one pass, without a temporary of the activation's size.
        return x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()

    def see_output(self, y: Tensor) -> None:
        """Take in the output of the call whose input was last seen, at the same positions where they are the same."""
        rows = self._rows(self._channels_first(y))
        if self._last is None:
            self.after = update_moments(self.after, rows)
            return
        # A regression gives the scale of each channel, and the scatter of the output follows from that of the input.
        # The products of all pairs of channels, which are most of the work, are not repeated.
        inputs, batch = self._last
        self._last = None
        mean = rows.mean(0)
        variance = batch.scatter.diagonal()
        slope = ((inputs - batch.mean) * (rows - mean)).sum(0) / torch.where(variance > 0, variance, 1)
        batch.scatter.mul_(slope).mul_(slope[:, None])
        self.after = merge_moments(self.after, Moments(batch.num_samples, mean, batch.scatter))

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
        shape, grid = self._grid
        # A module that is not a normalization may change the shape.
        if x.shape[2:] != shape:
            grid = self._choose_grid(x.shape[2:])
        rows = samples_by_channels(x[(slice(None), slice(None), *grid)])
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _grid_size(shape: torch.Size, stride: int) -> int:
    count = 1
    for size in shape:
        count *= -(-size // stride)
    return count


def _running_statistics(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A copy of the running mean ``[C]`` and of the whitening matrices ``[G, d, d]`` that eval uses."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.running_mean is None:
        return None
    mean = layer.running_mean.detach().clone()
    if isinstance(layer, WhiteningNorm):
        return mean, layer.whitening_matrix().clone()
    if layer.running_var is None:
        return None
    return mean, (layer.running_var.detach() + layer.eps).rsqrt()[:, None, None]


def find_layers(model: nn.Module, names: Iterable[str] | None) -> Mapping[str, nn.Module]:
    """The layers to probe by name: the named ones, or every normalization layer.

    Raises:
        TypeError: `model` is not a module.
        ValueError: A name is not one of the model's, the model has no normalization layer, a lazy one without
            statistics, or is TorchScript.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but a torch.nn.Module is needed")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "model is a TorchScript module, which does not call hooks: analyze the one that it was made from"
        )
    modules = dict(model.named_modules())
    lazy = [name or "(model)" for name, module in modules.items() if any(map(is_lazy, module.buffers(recurse=False)))]
    if lazy:
        raise ValueError(f"the model has uninitialized layers: {', '.join(lazy)}; run it on a batch first")
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


def num_channels(layer: nn.Module) -> int:
    """Channels of a normalization layer, or a typical number for a module that does not say."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return layer.normalized_shape[0]
    declared = getattr(layer, "num_features", getattr(layer, "num_channels", None))
    return int(declared) if isinstance(declared, numbers.Integral) else 256


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
    # numpy is not a dependency. If nothing has imported it, its random state cannot change.
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
                    if buffer is not None and copy is not None:
                        # Not seen by autograd, which would refuse a backward that is still to come.
                        buffer.data.copy_(copy)
                    module._buffers[name] = buffer
            for module, training in modes:
                module.training = training


def uncompiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` has compiled as it was written: compiled code does not see hooks added later."""
    # If nothing has imported the compiler, which takes a second, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def hooked(probes: Mapping[str, LayerProbe], finite: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Let the probes see every call of their layers, and note in `finite` which inputs were finite."""

    def before(probe: LayerProbe):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            finite.append(
                (probe.name, probe.see_input(_first_tensor(probe.name, (*args, kwargs.get("input"), *kwargs.values()))))
            )

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
