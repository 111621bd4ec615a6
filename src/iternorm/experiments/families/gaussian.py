"""Condition number and SND of normalizations of Gaussian data: what Figures 4, 5 and A2 have in common."""

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from iternorm.analysis import Whitening, condition_number, covariance, snd
from iternorm.experiments.jobs.findings import Comparison
from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.jobs.results import Config, Result, Row
from iternorm.report import palette
from iternorm.timing.threads import num_threads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One marker for each operation, the same in every figure.
_MARKERS = {"BN": "o", "DBN": "s"} | {
    f"IterNorm T={steps}": marker for steps, marker in zip((1, 3, 5, 7, 9), "v<^>D", strict=True)
}


def configuration(
    job: str, operations: Sequence[str], dimension: int, batch_size: int, smoke: bool, **settings: Any
) -> Config:
    """The configuration of one point of the figures: the paper's 60,000 examples and 10 repeats, or little of both."""
    size = {"examples": 2000, "repeats": 2, "draws": 10, "samples": 50}
    if not smoke:
        # The paper states neither the number of draws s nor that of samples N.
        size = {"examples": 60000, "repeats": 10, "draws": 100, "samples": 1000}
    common = {"job": job, "operations": list(operations), "dimension": dimension, "batch_size": batch_size}
    return {**common, **size, "eps": 1e-5, "seed": 0, **settings}


def measure(config: Config, context: Context) -> list[Row]:
    """One row for each operation: the mean over repeats, and the standard error of that mean.

    Each repeat draws new examples. The condition number is that of one batch normalized by its own statistics, the SND
    that over many batches. Repeats run side by side, one thread each: an eigendecomposition of this size gains little
    from a second thread.
    """
    repeats = config["repeats"]
    workers = min(torch.get_num_threads(), repeats) if context.device == "cpu" else 1
    measured: list[dict[str, tuple[float, float]]] = []
    with num_threads(1), ThreadPoolExecutor(workers) as pool:
        for values in pool.map(partial(_measure_once, config, context.device), range(repeats)):
            measured.append(values)
            context.step(len(measured), repeats)
    return [_row(label, [values[label] for values in measured]) for label in measured[0]]


def _measure_once(config: Config, device: str, repeat: int) -> dict[str, tuple[float, float]]:
    """Condition number and SND by operation."""
    seed = config["seed"] + repeat
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(config["examples"], config["dimension"], generator=generator).to(device)
    batch = covariance(data[: config["batch_size"]].double())
    values = {}
    for label in config["operations"]:
        operation = Whitening.parse(label, eps=config["eps"])
        condition = condition_number(operation.normalized_covariance(batch)).item()
        options = {"samples": config["samples"], "draws": config["draws"], "seed": seed}
        values[label] = (condition, snd(operation, data, config["batch_size"], **options).value)
    return values


def _row(label: str, measured: Sequence[tuple[float, float]]) -> Row:
    row: dict[str, Any] = {"operation": label}
    for name, repeats in zip(("condition_number", "snd"), zip(*measured, strict=True), strict=True):
        # A batch smaller than the dimension leaves directions without variance: null stands for infinite.
        finite = all(map(math.isfinite, repeats))
        row[name] = statistics.fmean(repeats) if finite else None
        row[f"{name}_standard_error"] = statistics.stdev(repeats) / len(repeats) ** 0.5 if finite else None
    return row


def draw(axes: "Axes", results: Sequence[Result], x: str, y: str, *, y_log: bool = True) -> None:
    """Curves of `y` over the configuration's `x`, one for each operation, with their standard errors."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for result in results:
        for row in result.rows:
            if row[y] is not None:
                point = (result.config[x], row[y], row[f"{y}_standard_error"])
                curves.setdefault(row["operation"], []).append(point)
    for label, points in curves.items():
        xs, ys, errors = zip(*sorted(points), strict=True)
        # T=1 hardly lowers BN's condition number, so its curve lies on BN's; both should be visible.
        size, width = (6, 2.4) if label == "BN" else (4, 1.4)
        style = {"color": palette.color_of(label), "marker": _MARKERS[label], "markersize": size, "linewidth": width}
        axes.errorbar(xs, ys, yerr=errors, label=label, capsize=2, **style)
    axes.set_xscale("log", base=2)
    if y_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)


def curves(results: Sequence[Result], x: str, y: str) -> dict[str, dict[int, float]]:
    """Values of `y` by operation and by the configuration's `x`, in order; those that are not finite are left out."""
    found: dict[str, dict[int, float]] = {}
    for result in sorted(results, key=lambda result: result.config[x]):
        for row in result.rows:
            if row[y] is not None:
                found.setdefault(row["operation"], {})[result.config[x]] = row[y]
    return found


def listed(curve: dict[int, float], digits: int = 3) -> str:
    """A curve in words.

    Example:
        >>> listed({2: 1.0, 512: 32.408})
        '1.00 at 2, 32.4 at 512'
    """
    # All with as many digits, zeros at the end too.
    return ", ".join(f"{f'{value:#.{digits}g}'.rstrip('.')} at {x}" for x, value in curve.items())


def compare_at(
    results: Sequence[Result], operations: Sequence[str], what: str, key: str, where: str, **config: int
) -> list[Comparison]:
    """A row for each operation: what was measured at the configuration with these values."""
    chosen = [result for result in results if all(result.config[name] == value for name, value in config.items())]
    rows = {row["operation"]: row for result in chosen for row in result.rows if row[key] is not None}
    return [
        Comparison(
            f"{what} of {name}, {where}",
            "",
            (rows[name][key],) if name in rows else (),
            unit="",
            note=f"standard error {rows[name][f'{key}_standard_error']:.1g}" if name in rows else "",
            count=chosen[0].config["repeats"] if name in rows else None,
        )
        for name in operations
    ]
