"""`analyze`: conditioning, correlation, effective rank, noise and drift of every normalization layer of a model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iternorm import groups

from .conditioning import (
    condition_number_of_spectrum,
    correlation,
    effective_rank_of_spectrum,
    mean_absolute_correlation,
    spectrum,
)
from .operations import Whitening, batch_norm, decorrelated_batch_norm, iter_norm, multiply_blocks
from .probes import PER_EXAMPLE, LayerProbe, Reservoir, find_layers, hooked, preserved
from .stochasticity import snd
from .summary import AlternativeAnalysis, LayerAnalysis, ModelAnalysis, NoiseEstimate, SideAnalysis

ALTERNATIVES = (
    batch_norm(),
    decorrelated_batch_norm(group_size=16),
    iter_norm(3, group_size=64),
    iter_norm(5, group_size=64),
    iter_norm(7, group_size=64),
)

# What is kept of a spectrum and of a correlation matrix for the plots.
_SPECTRUM_POINTS = 128
_CORRELATION_CELLS = 32
# Positions of one example that the noise is estimated from, and samples it is watched on.
_POOL_POSITIONS = 16
_NOISE_SAMPLES = 256


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
) -> "ModelAnalysis":
    """Measure what every normalization layer of a model does to its data, in one pass over `batches`.

    For each layer: condition number, mean absolute correlation and effective rank of input and output; the Stochastic
    Normalization Disturbance (SND) of the layer's own operation and of the alternatives by batch size, and what the
    alternatives would do to the conditioning; the drift of the running statistics. Nothing grows with the number of
    batches. The model is left as it was (modes, buffers, random states, hooks), after an exception too.

    Covariances are taken over all examples of the pass, in fp32 for half and single precision. SND is estimated from
    batches drawn from a uniform sample of the examples; drawing B of only K examples makes it smaller by about
    √(1 - B/K).

    Args:
        model: The model. Gradients are not needed and not touched.
        batches: Tensors, tuples or lists whose first entry is the input, or mappings of keyword arguments. They are
            moved to the model's device.
        layers: Names of the modules to analyze (as in ``model.named_modules()``); None is every normalization layer.
        batch_sizes: Batch sizes, in examples, to estimate SND for; empty for none.
        alternatives: Operations to compare each layer with. None is BN, DBN with groups of 16 and IterNorm with T = 3,
            5 and 7 and groups of 64 where `batch_sizes` is not empty, and nothing where it is.
        mode: ``"train"`` runs the model as in training, with batch statistics; ``"eval"`` with running statistics.
        positions: Positions (pixels, tokens) of an example that enter the covariances, on a grid whose origin changes
            from batch to batch; None is all of them.
        draws: Batches drawn for each estimate of SND.
        pool_size: Examples kept for SND; at least four times the largest batch size are kept.
        seed: Decides grids, kept examples and draws.
        memory_budget: Bytes for the kept examples of all layers, by keeping fewer positions of each (one at least).
        forward: How to run the model on an entry of `batches`, where that is not one of the three forms above.
        progress: Called as ``progress(stage, done, total)`` after each batch (total None) and each layer.

    Raises:
        TypeError: `model` is not a module.
        ValueError: No normalization layer, an unknown name, no batches, a batch of one example in train mode, fewer
            examples than a batch size, NaN or Inf in the input of a layer (named).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        >>> analysis = analyze(model, [torch.randn(32, 8) for _ in range(4)], batch_sizes=(16,))
        >>> [layer.name for layer in analysis.layers], analysis.layers[0].num_channels
        (['1'], 16)
    """
    if mode not in ("train", "eval"):
        raise ValueError(f"mode is {mode!r}, but 'train' or 'eval' is needed")
    if positions is not None and positions < 1:
        raise ValueError(f"positions is {positions}, but None or 1 or more is needed")
    for size in batch_sizes:
        if size < 2:
            raise ValueError(f"batch_sizes holds {size}, but a batch needs 2 or more examples to have a variance")
    if alternatives is None:
        alternatives = ALTERNATIVES if batch_sizes else ()
    found = find_layers(model, layers)
    pool_size = max(pool_size, 4 * max(batch_sizes, default=0))
    probes = {}
    for name, layer in found.items():
        pool = Reservoir(pool_size, _POOL_POSITIONS, memory_budget // len(found), seed) if batch_sizes else None
        probes[name] = LayerProbe(name, layer, positions, pool, seed)
    _stream(model, batches, probes, mode, forward, progress)

    reached = [probe for probe in probes.values() if probe.before is not None]
    if not reached:
        raise ValueError(f"no call reached the layers {', '.join(map(repr, found))}: does forward use them?")
    _check_batch_sizes(reached, batch_sizes)
    results = []
    for done, probe in enumerate(reached):
        with torch.no_grad():
            results.append(_summarize(probe, batch_sizes, alternatives, draws, seed))
        if progress is not None:
            progress("layers", done + 1, len(reached))
    unreached = [name for name, probe in probes.items() if probe.before is None]
    return ModelAnalysis(type(model).__name__, mode, results, unreached)


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
    with preserved(model), torch.no_grad():
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
                    # A solver that fails on NaN says so less clearly than the name of the layer that got it.
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


def _summarize(
    probe: LayerProbe, batch_sizes: Sequence[int], alternatives: Sequence[Whitening], draws: int, seed: int
) -> LayerAnalysis:
    assert probe.before is not None
    assert probe.after is not None
    covariance = probe.before.covariance
    noise, own_noise = [], {}
    if probe.pool is not None:
        examples = probe.pool.examples
        rows = examples.mT.flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        samples = rows[torch.randperm(len(rows), generator=generator)[:_NOISE_SAMPLES].to(rows.device)]

        def estimate(operation: Whitening, size: int) -> tuple[float, float]:
            result = snd(operation, examples, size, samples=samples, draws=draws, seed=seed)
            return result.value, result.standard_error

        for size in batch_sizes:
            if isinstance(probe.layer, PER_EXAMPLE):
                own_noise[size] = (0.0, 0.0)
            elif probe.operation is not None:
                own_noise[size] = estimate(probe.operation, size)
            for operation in alternatives:
                # The layer's own operation is among the alternatives more often than not.
                known = own_noise.get(size) if operation == probe.operation else None
                noise.append(NoiseEstimate(operation.label, size, *(known or estimate(operation, size))))
    own_label = probe.operation.label if probe.operation is not None else type(probe.layer).__name__
    return LayerAnalysis(
        name=probe.name,
        kind=type(probe.layer).__name__,
        operation=own_label,
        num_channels=covariance.shape[0],
        num_samples=probe.before.num_samples,
        num_examples=probe.num_examples,
        num_positions=probe.num_positions,
        before=_side(covariance),
        after=_side(probe.after.covariance),
        noise=[NoiseEstimate(own_label, size, *value) for size, value in own_noise.items()],
        noise_pool=0 if probe.pool is None else len(probe.pool.examples),
        alternatives=[_alternative(operation, covariance, noise) for operation in alternatives],
        drift=_drift(probe, covariance),
    )


def _side(covariance: Tensor) -> SideAnalysis:
    eigenvalues = spectrum(covariance)
    return SideAnalysis(
        condition_number=condition_number_of_spectrum(eigenvalues).item(),
        mean_absolute_correlation=mean_absolute_correlation(covariance).item(),
        effective_rank=effective_rank_of_spectrum(eigenvalues).item(),
        spectrum=_thinned(eigenvalues),
        correlation=_pooled(correlation(covariance).abs()),
    )


def _alternative(operation: Whitening, covariance: Tensor, noise: Sequence[NoiseEstimate]) -> AlternativeAnalysis:
    output = operation.normalized_covariance(covariance)
    return AlternativeAnalysis(
        operation=operation.label,
        condition_number=condition_number_of_spectrum(spectrum(output)).item(),
        mean_absolute_correlation=mean_absolute_correlation(output).item(),
        noise=[estimate for estimate in noise if estimate.operation == operation.label],
    )


def _thinned(eigenvalues: Tensor) -> list[tuple[int, float]]:
    """(rank, eigenvalue) of all eigenvalues, or of evenly spread ones that include the first and the last."""
    count = len(eigenvalues)
    ranks = torch.linspace(0, count - 1, min(count, _SPECTRUM_POINTS)).round().long().unique().tolist()
    values = eigenvalues.tolist()
    return [(rank + 1, values[rank]) for rank in ranks]


def _pooled(matrix: Tensor) -> list[list[float]]:
    """The matrix averaged over square blocks, small enough for a picture of it."""
    cells = math.ceil(matrix.shape[0] / math.ceil(matrix.shape[0] / _CORRELATION_CELLS))
    pooled = nn.functional.adaptive_avg_pool2d(matrix[None].float(), cells)[0]
    return [[round(value, 3) for value in row] for row in pooled.tolist()]


def _drift(probe: LayerProbe, covariance: Tensor) -> float | None:
    """The root mean square distance, by channel, between the outputs by running and by measured statistics.

    With A, m of the running statistics and B, µ of the data, E‖A (x - m) - B (x - µ)‖² / C over data of mean µ and
    covariance Σ is (tr (A - B) Σ (A - B)ᵀ + ‖A (µ - m)‖²) / C.
    """
    if probe.running is None or probe.operation is None or probe.before is None:
        return None
    mean, matrices = (statistic.to(covariance) for statistic in probe.running)
    parts = groups.parts(len(mean), probe.operation.group_size)
    running = [part.of(matrices) for part in parts]
    measured = probe.operation.whitening_blocks(covariance)
    difference = [a - b for a, b in zip(running, measured, strict=True)]
    half = multiply_blocks(difference, covariance)
    spread = multiply_blocks(difference, half.mT).trace()
    offset = multiply_blocks(running, (probe.before.mean - mean)[:, None]).square().sum()
    return ((spread.clamp_min(0) + offset) / len(mean)).sqrt().item()
