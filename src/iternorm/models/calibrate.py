"""Population statistics by one exact pass over the data, and statistics frozen for fine-tuning."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.layers.base import WhiteningNorm
from iternorm.models import replace
from iternorm.whitening import groups
from iternorm.whitening.autograd import inverse_sqrt
from iternorm.whitening.processes import collective
from iternorm.whitening.settings import Settings, unbiased


class _Moments:
    """Count, mean and covariance of all the inputs of a layer so far, in fp64."""

    def __init__(self) -> None:
        self.state: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook: the layer itself has checked its input."""
        x = args[0] if args else kwargs["input"]
        if x.numel() == 0:
            return
        mean, covariance = torch_verbs.moments(x.detach(), _group_size(layer))
        count = torch.tensor(float(x.numel() // x.shape[1]), dtype=torch.float64, device=x.device)
        new = count, mean.double(), covariance.double()
        if self.state is not None:
            new = collective.merge_moments(*(torch.stack(pair) for pair in zip(self.state, new, strict=True)))
        self.state = new


@torch.no_grad()
def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Set the running statistics of whitening and BatchNorm layers to those of a population, by one exact pass.

    The model runs once over all batches. During the pass these layers normalize each batch by its own statistics, as
    in training, and everything else is in eval mode (no dropout), so a layer's input is what training would feed it.
    The mean and the covariance of each layer's input are accumulated over all batches in fp64, weighted by the number
    of values, so for the first such layer they do not depend on how the data is split into batches; deeper ones see
    inputs that were normalized batch by batch, so use batches as large as those of training. At the end the running
    mean is that mean, the running whitening is the solver's result on that covariance (the running covariance is the
    covariance itself, BatchNorm's running variance the unbiased variance), and the counter is the number of batches.

    Under an initialized process group, synchronized layers, SyncBatchNorm among them, merge what their ranks saw; every
    rank must run the pass, with as many batches. Frozen layers, and those that keep no running statistics, are left
    alone. The modes of all modules are restored, and when the pass fails nothing is changed.

    Args:
        model: any module.
        batches: an iterable of inputs: a tensor; a tuple or list, whose first item is the input (a data loader's
            ``(images, labels)``); or a mapping of keyword arguments.
        forward: how to run the model on a batch of another kind, called as ``forward(model, batch)``.
        progress: show a progress bar, where `rich` is installed.

    Returns:
        The model itself.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> _ = recalibrate(model, [torch.randn(16, 3) for _ in range(4)], progress=False)
        >>> int(model[1].num_batches_tracked)
        4
    """
    layers = {name: layer for name, layer in _layers(model) if layer.running_mean is not None}
    layers = {name: layer for name, layer in layers.items() if not replace.is_frozen(layer)}
    if not layers:
        raise ValueError(
            "the model has no whitening or BatchNorm layer with running statistics to recalibrate; frozen layers are "
            "left alone until iternorm.unfreeze"
        )
    moments = {name: _Moments() for name in layers}
    run = _run if forward is None else forward
    num_batches = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(_batch_statistics(model, layers.values()))
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(moments[name].update, with_kwargs=True).remove)
        for batch in _tracked(batches, progress):
            run(model, batch)
            num_batches += 1
    if num_batches == 0:
        raise ValueError("batches is empty: there is nothing to take statistics from")
    _write(layers, moments, num_batches)
    return model


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, layer) for n, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def _group_size(layer: Any) -> int:
    """A BatchNorm is whitening in groups of one channel."""
    return groups.effective_size(layer.num_features, layer.group_size) if isinstance(layer, WhiteningNorm) else 1


def _run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


@contextlib.contextmanager
def _batch_statistics(model: nn.Module, layers: Iterable[Any]) -> Iterator[None]:
    """The layers use their batch's statistics and keep none; all else is in eval. Restored at the end."""
    modes = [(module, module.training) for module in model.modules()]
    tracked = [(layer, layer.track_running_stats) for layer in layers]
    try:
        model.eval()
        for layer, _ in tracked:
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, track in tracked:
            layer.track_running_stats = track


def _tracked(batches: Iterable[Any], progress: bool) -> Iterable[Any]:
    if not progress:
        return batches
    try:
        from rich.progress import track
    except ImportError:
        return batches
    return track(batches, description="Recalibrating")


def _write(layers: dict[str, Any], moments: dict[str, _Moments], num_batches: int) -> None:
    """Compute every layer's statistics first, then set them, so that a layer that fails changes nothing."""
    results: list[Callable[[], None]] = []
    unseen = []
    for name, layer in layers.items():
        state = moments[name].state
        group = collective.active_group(layer.process_group) if hasattr(layer, "process_group") else None
        if group is not None:
            state = _over_ranks(layer, state, group)
        if state is None:
            unseen.append(name or "the model itself")
            continue
        count, mean, covariance = state
        if not bool(torch.isfinite(mean).all() & torch.isfinite(covariance).all()):
            raise ValueError(f"the input of {name or 'the model'} was not finite in some batch; nothing was changed")
        values = {"running_mean": mean, "num_batches_tracked": torch.tensor(num_batches)}
        if isinstance(layer, WhiteningNorm):
            settings = Settings(_group_size(layer), layer.solver, layer.num_iters, layer.eps)
            settings = settings._replace(correction=layer.correction, shrinkage=layer.shrinkage)
            covariance = unbiased(covariance, count, settings)
            whitens = layer.running == "whitening"
            matrix = inverse_sqrt(covariance, layer.num_features, settings)[0] if whitens else covariance
            values[f"running_{layer.running}"] = matrix
        else:
            values["running_var"] = covariance.flatten() * (count / (count - 1).clamp(min=1))
        results.append(partial(_set, layer, values))
    if unseen:
        warnings.warn(f"no batch reached these layers, which keep their statistics: {', '.join(unseen)}", stacklevel=3)
    for result in results:
        result()


def _over_ranks(layer: Any, state: tuple[Tensor, Tensor, Tensor] | None, group: collective.Group) -> Any:
    """What all ranks saw together, None if that is nothing; a rank that saw nothing takes part."""
    if state is None:
        mean = layer.running_mean.new_zeros(layer.num_features, dtype=torch.float64)
        size = _group_size(layer)
        state = mean.new_zeros(()), mean, mean.new_zeros(groups.num_groups(len(mean), size), size, size)
    if not bool(collective.sum_over_ranks(state[0].reshape(1), group)):
        return None
    return collective.global_moments(int(state[0]), state[1], state[2], group)


def _set(layer: Any, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if layer._buffers.get(name) is not None:
            layer._buffers[name].copy_(value)


def freeze(model: nn.Module, *, where: replace.Where = "all") -> nn.Module:
    """Keep whitening and BatchNorm layers on their running statistics, whatever mode the model is in.

    For fine-tuning: `model.train()` no longer puts these layers in training mode, so they normalize by their running
    statistics and leave them as they are, while their parameters and all other layers train. `reset_running_stats`,
    which `torch.optim.swa_utils.update_bn` calls, warns and does nothing. `unfreeze` ends it.

    Args:
        model: any module; it is returned.
        where: "all", "first" or a predicate on (name, module).

    Example:
        >>> model = freeze(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).train()
        >>> model[0].training, model[1].training
        (True, False)
    """
    chosen = list(replace.selected(_layers(model), where, "whitening or BatchNorm"))
    for name, layer in chosen:
        if getattr(layer, "running_mean", None) is None:
            raise ValueError(
                f"{replace.named(name, layer)} keeps no running statistics to freeze; leave it out by `where`"
            )
    for _, layer in chosen:
        replace.freeze(layer)
    return model


def unfreeze(model: nn.Module, *, where: replace.Where = "all") -> nn.Module:
    """Undo `freeze`: the layers take the model's mode again, and follow it."""
    for _, layer in replace.selected(_layers(model), where, "whitening or BatchNorm"):
        if replace.is_frozen(layer):
            replace.unfreeze(layer)
            layer.training = model.training
    return model
