"""`analyze`: conditioning, correlation, effective rank, noise and drift of every normalization layer of a model."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iternorm.analysis.layer import summarize_layer
from iternorm.analysis.operations import Whitening, batch_norm, decorrelated_batch_norm, iter_norm, operation_of
from iternorm.analysis.pools import SamplePool, StatisticsPool, statistics_bytes
from iternorm.analysis.probes import LayerProbe, find_layers, hooked, num_channels, preserved, uncompiled
from iternorm.analysis.summary import ModelAnalysis

ALTERNATIVES = (
    batch_norm(),
    decorrelated_batch_norm(group_size=16),
    iter_norm(3, group_size=64),
    iter_norm(5, group_size=64),
    iter_norm(7, group_size=64),
)

# Samples that SND is estimated on, and the fewest mini-groups to draw batches from.
_NOISE_SAMPLES = 256
_MINI_GROUPS = 64


def analyze(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Iterable[str] | None = None,
    batch_sizes: Sequence[int] = (8, 32, 128),
    alternatives: Sequence[Whitening] | None = None,
    mode: Literal["train", "eval"] = "train",
    positions: int | None = 64,
    draws: int = 50,
    pool_size: int = 512,
    seed: int = 0,
    memory_budget: int = 2**30,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> ModelAnalysis:
    """Measure what every normalization layer of a model does to its data, in one pass over `batches`.

    For each layer: condition number, mean absolute correlation and effective rank of input and output; the Stochastic
    Normalization Disturbance (SND) of the layer's own operation and of the alternatives by batch size, and what the
    alternatives would do to the conditioning; the drift of the running statistics. Memory does not grow with the number
    of batches. The model is left as it was (modes, buffers, random states, hooks), also after an exception.

    Covariances are taken over all examples of the pass, in fp32 for half and single precision. For SND the sums of
    mini-groups of examples over all their positions are kept (a common divisor of `batch_sizes` examples each), and
    batches are assembled from them; drawing B of only K examples makes SND smaller by about √(1 - B/K). The order of
    the examples should be random.

    Args:
        model: The model. Gradients are not needed and not touched.
        batches: Tensors, tuples or lists whose first entry is the input, or mappings of keyword arguments. They are
            moved to the model's device.
        layers: Names of the modules to analyze (as in ``model.named_modules()``); None is every normalization layer.
            Channels are dimension 1 of an input, and for LayerNorm and RMSNorm the first of those they normalize over.
        batch_sizes: Batch sizes, in examples, to estimate SND for; empty for none.
        alternatives: Operations to compare each layer with. None is BN, DBN with groups of 16 and IterNorm with T = 3,
            5 and 7 and groups of 64 where `batch_sizes` is not empty, and nothing where it is.
        mode: ``"train"`` runs the model as in training, with batch statistics; ``"eval"`` with running statistics.
        positions: Positions (pixels, tokens) of an example that enter the covariances, on a grid whose origin changes
            from batch to batch; None is all of them.
        draws: Batches drawn for each estimate of SND.
        pool_size: Examples to draw them from; at least four times the largest batch size.
        seed: Decides grids, kept examples and draws.
        memory_budget: Bytes for what is kept for SND in all layers; the pool is made smaller where it does not fit,
            down to twice the largest batch size.
        forward: How to run the model on an entry of `batches`, where that is not one of the three forms above.
        progress: Called as ``progress(stage, done, total)`` after each batch (total None) and each layer.

    Raises:
        TypeError: `model` is not a module, or an alternative not an operation.
        ValueError: No normalization layer, an unknown name, no batches, a batch of one example in train mode, fewer
            examples than a batch size, two alternatives of one label, NaN or Inf in the input or the output of a
            layer (named), a lazy layer without statistics (named), a TorchScript module.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        >>> analysis = analyze(model, [torch.randn(32, 8) for _ in range(4)], batch_sizes=(16,))
        >>> [layer.name for layer in analysis.layers], analysis.layers[0].num_channels
        (['1'], 16)
    """
    if mode not in ("train", "eval"):
        raise ValueError(f"mode is {mode!r}, but 'train' or 'eval' is needed")
    # The result is written as JSON, which takes Python's integers but not numpy's.
    batch_sizes, draws = [operator.index(size) for size in batch_sizes], operator.index(draws)
    if draws < 2:
        raise ValueError(f"draws is {draws}, but 2 or more batches are needed to see a spread")
    if positions is not None and positions < 1:
        raise ValueError(f"positions is {positions}, but None or 1 or more is needed")
    for size in batch_sizes:
        if size < 2:
            raise ValueError(f"batch_sizes holds {size}, but a batch needs 2 or more examples to have a variance")
    if alternatives is None:
        alternatives = ALTERNATIVES if batch_sizes else ()
    for operation in alternatives:
        if not isinstance(operation, Whitening):
            raise TypeError(
                f"alternatives holds {operation!r}, but operations are needed, such as iter_norm(num_iters=5)"
            )
    labels = [operation.label for operation in alternatives]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"alternatives holds {label!r} more than once: analyze those that differ in eps one by one"
            )
    found = find_layers(model, layers)
    pools = _pools(found, batch_sizes, alternatives, pool_size, memory_budget, seed)
    probes = {name: LayerProbe(name, layer, positions, pools.get(name), seed) for name, layer in found.items()}
    _stream(model, batches, probes, mode, forward, progress)

    reached = [probe for probe in probes.values() if probe.before is not None]
    if not reached:
        raise ValueError(f"no call reached the layers {', '.join(map(repr, found))}: does forward use them?")
    _check_batch_sizes(reached, batch_sizes)
    results = []
    for done, probe in enumerate(reached):
        with torch.no_grad():
            results.append(summarize_layer(probe, batch_sizes, alternatives, draws, seed))
        if progress is not None:
            progress("layers", done + 1, len(reached))
    unreached = [name for name, probe in probes.items() if probe.before is None]
    return ModelAnalysis(type(model).__name__, mode, results, unreached)


def _pools(
    layers: Mapping[str, nn.Module],
    batch_sizes: Sequence[int],
    alternatives: Sequence[Whitening],
    pool_size: int,
    memory_budget: int,
    seed: int,
) -> dict[str, tuple[StatisticsPool, SamplePool]]:
    if not batch_sizes:
        return {}
    largest = max(batch_sizes)
    pool_size = max(pool_size, 4 * largest)
    # Large mini-groups take less memory; batches of the largest size must still differ in many ways.
    common = math.gcd(*batch_sizes)
    examples = max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or pool_size // n >= _MINI_GROUPS))
    group_sizes = {}
    for name, layer in layers.items():
        own = operation_of(layer)
        group_sizes[name] = [operation.group_size for operation in (*alternatives, *([own] if own is not None else []))]
    needed = sum(statistics_bytes(num_channels(layer), group_sizes[name]) for name, layer in layers.items())
    size = pool_size // examples
    size = max(min(size, memory_budget // max(needed, 1)), 2 * largest // examples)
    return {
        name: (StatisticsPool(examples, size, group_sizes[name], seed), SamplePool(_NOISE_SAMPLES, seed))
        for name in layers
    }


def _stream(
    model: nn.Module,
    batches: Iterable[Any],
    probes: Mapping[str, LayerProbe],
    mode: str,
    forward: Callable[[nn.Module, Any], Any] | None,
    progress: Callable[[str, int, int | None], None] | None,
) -> None:
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    uses_batch = mode == "train" and any(probe.operation is not None for probe in probes.values())
    index = -1
    with preserved(model), torch.no_grad(), uncompiled():
        model.train(mode == "train")
        for index, batch in enumerate(batches):
            batch = _to(batch, device)
            if uses_batch and _num_examples(batch) == 1:
                raise ValueError(
                    f"batch {index} holds one example, which has no batch statistics: give larger batches "
                    "(drop_last=True drops a short last one), or mode='eval'"
                )
            finite: list[tuple[str, Tensor]] = []
            with hooked(probes, finite):
                try:
                    _run(model, batch, forward)
                except Exception as error:
                    # Name the layer whose input has a NaN: a solver that fails on it would say less.
                    _check_finite(finite, index, error)
                    raise
            _check_finite(finite, index, None)
            if progress is not None:
                progress("batches", index + 1, None)
    if index < 0:
        raise ValueError("batches is empty: give at least one batch (an exhausted generator gives none)")


def _run(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None) -> None:
    if forward is not None:
        forward(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(batch[0])
    else:
        model(batch)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_to(value, device) for value in batch]
    return batch


def _num_examples(batch: Any) -> int | None:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        batch = next((value for value in batch if isinstance(value, Tensor)), None)
    return len(batch) if isinstance(batch, Tensor) and batch.ndim else None


def _check_finite(finite: list[tuple[str, Tensor]], index: int, cause: Exception | None) -> None:
    for name, flag in finite:
        if not flag:
            raise ValueError(f"the input of layer {name!r} holds NaN or Inf in batch {index}") from cause


def _check_batch_sizes(probes: Sequence[LayerProbe], batch_sizes: Sequence[int]) -> None:
    largest = max(batch_sizes, default=0)
    for probe in probes:
        if probe.num_examples < largest:
            raise ValueError(
                f"batch_sizes holds {largest}, but layer {probe.name!r} saw only {probe.num_examples} examples: "
                "give more batches or smaller batch sizes"
            )
