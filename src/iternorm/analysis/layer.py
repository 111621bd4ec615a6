"""The values of one layer, from what its probe has seen."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from iternorm.analysis.conditioning import (
    condition_number_of_spectrum,
    correlation,
    effective_rank_of_spectrum,
    mean_absolute_correlation,
    spectrum,
)
from iternorm.analysis.operations import Whitening, multiply_blocks
from iternorm.analysis.pools import StatisticsPool
from iternorm.analysis.probes import PER_EXAMPLE, LayerProbe
from iternorm.analysis.stochasticity import SND, spread, summarize
from iternorm.analysis.summary import AlternativeAnalysis, LayerAnalysis, NoiseEstimate, SideAnalysis
from iternorm.whitening import groups

# What is kept of a spectrum and of a correlation matrix for the plots, and bytes of working memory for SND.
_SPECTRUM_POINTS = 128
_CORRELATION_CELLS = 32
_NOISE_BUDGET = 256 * 2**20


def summarize_layer(
    probe: LayerProbe, batch_sizes: Sequence[int], alternatives: Sequence[Whitening], draws: int, seed: int
) -> LayerAnalysis:
    """All values of a layer that was reached."""
    assert probe.before is not None
    assert probe.after is not None
    covariance, output_covariance = probe.before.covariance, probe.after.covariance
    for side, measured in (("input", covariance), ("output", output_covariance)):
        if not measured.isfinite().all():
            raise ValueError(f"the {side} of layer {probe.name!r} holds NaN, Inf or values whose squares are too large")
    noise, own_noise = [], {}
    if probe.pools is not None:
        statistics, pool = probe.pools

        def estimate(operation: Whitening, size: int) -> tuple[float, float, float]:
            result = _noise(operation, statistics, pool.samples, size, draws, seed)
            return result.value, result.standard_error, result.relative

        for size in batch_sizes:
            if isinstance(probe.layer, PER_EXAMPLE):
                own_noise[size] = (0.0, 0.0, 0.0)
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
        after=_side(output_covariance),
        noise=[NoiseEstimate(own_label, size, *value) for size, value in own_noise.items()],
        noise_pool=0 if probe.pools is None else probe.pools[0].num_examples,
        alternatives=[_alternative(operation, covariance, noise) for operation in alternatives],
        drift=_drift(probe, covariance),
    )


def _noise(
    operation: Whitening, statistics: StatisticsPool, samples: Tensor, batch_size: int, draws: int, seed: int
) -> SND:
    batches = statistics.draw(batch_size, draws, torch.Generator().manual_seed(seed))
    parts = groups.parts(samples.shape[1], operation.group_size)
    kept = draws * samples.element_size() * sum(part.count * part.size**2 for part in parts) <= _NOISE_BUDGET
    fits = partial(statistics.fits, operation, batches, samples.dtype, _NOISE_BUDGET)
    points = samples - statistics.center.to(samples.dtype)
    return summarize(*spread(fits, parts, points, kept, _NOISE_BUDGET), batch_size)


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
