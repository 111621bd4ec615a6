"""What tables of final errors are made of: the paper's number beside ours, over seeds, and whether one is lower."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from . import curves
from .findings import Claim, Comparison
from .results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER_COLOR, _OUR_COLOR = "#d55e00", "#0072b2"


class Seeds(NamedTuple):
    """A number of the same training with several seeds: of each that ended well, and how many diverged."""

    values: tuple[float, ...]
    num_diverged: int = 0

    def __str__(self) -> str:
        """Mean and deviation: ``3.56 ± 0.12 (5 seeds)``."""
        if not self.values:
            return "diverged" if self.num_diverged else "not run"
        mean, count = statistics.fmean(self.values), len(self.values)
        text = f"{mean:.2f} (one seed)"
        if count > 1:
            text = f"{mean:.2f} ± {statistics.stdev(self.values):.2f} ({count} seeds)"
        return text + (f", {self.num_diverged} diverged" if self.num_diverged else "")

    @property
    def squared_error(self) -> float | None:
        """The square of the standard error of the mean; None where one seed says nothing of it."""
        return statistics.variance(self.values) / len(self.values) if len(self.values) > 1 else None


def select(results: Sequence[Result], model: str, norm: str) -> list[Result]:
    """The results of a network with a norm."""
    return curves.by(results, "model", "norm").get((model, norm), [])


def over_seeds(results: Sequence[Result], value: Callable[[Result], float]) -> Seeds:
    """A number of each of the results, which differ in their seeds."""
    return Seeds(curves.seeds(results, value), sum(map(curves.diverged, results)))


def finals(results: Sequence[Result], column: str = "test_error") -> Seeds:
    """A column of the last rows."""
    return over_seeds(results, partial(curves.final, name=column))


def compare(what: str, paper: str, results: Sequence[Result], column: str = "test_error") -> Comparison:
    """The paper's number beside a column of our last rows, in percent."""
    return Comparison(what, paper, finals(results, column).values, note=curves.divergence_note(results))


def is_lower(low: Seeds, high: Seeds) -> bool | None:
    """Whether the mean of the first is below that of the second.

    None where one was not run, and where the difference is within its standard error. With one seed, which gives no
    error, the sign decides. A training that diverged is worse than any that did not.
    """
    if not low.values or not high.values:
        both_run = all(each.values or each.num_diverged for each in (low, high))
        return bool(low.values) if both_run and (low.values or high.values) else None
    difference, error = _difference(low, high)
    return None if error is not None and abs(difference) <= error else difference > 0


def _difference(low: Seeds, high: Seeds) -> tuple[float, float | None]:
    """How far the mean of the first is below that of the second, and the standard error of that."""
    difference = statistics.fmean(high.values) - statistics.fmean(low.values)
    if low.squared_error is None or high.squared_error is None:
        return difference, None
    return difference, math.sqrt(low.squared_error + high.squared_error)


def claim_lower(text: str, names: tuple[str, str], seeds: tuple[Seeds, Seeds]) -> Claim:
    """The claim that the first is lower than the second, decided by `is_lower`."""
    evidence = ", ".join(f"{name} {each}" for name, each in zip(names, seeds, strict=True))
    holds = is_lower(*seeds)
    if all(each.values for each in seeds):
        difference, error = _difference(*seeds)
        evidence += f": {'lower' if difference >= 0 else 'higher'} by {abs(difference):.2f}"
        evidence += "" if error is None else f" ± {error:.2f}"
        evidence += ", within the error" if holds is None else ""
    return Claim(text, holds, evidence)


def draw_numbers(axes: "Axes", rows: Mapping[str, Comparison]) -> None:
    """The paper's numbers and ours, a line for each name: marks on a scale, and the figures in words."""
    heights = range(len(rows))
    style: dict[str, Any] = {"markersize": 5, "capsize": 3}
    for height, row in zip(heights, rows.values(), strict=True):
        if found := re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?", row.paper):
            error = float(found[2]) if found[2] else None
            axes.errorbar(float(found[1]), height - 0.15, xerr=error, fmt="D", color=_PAPER_COLOR, **style)
        if row.ours:
            error = statistics.stdev(row.ours) if len(row.ours) > 1 else None
            axes.errorbar(statistics.fmean(row.ours), height + 0.15, xerr=error, fmt="o", color=_OUR_COLOR, **style)
        # The note of a run that diverged says more than that there is no number.
        ours = str(Seeds(row.ours)) if not row.note else f"{Seeds(row.ours)}, {row.note}" if row.ours else row.note
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
        axes.text(1.0, height, f" paper {row.paper}\n ours {ours}", **place)
    axes.set_yticks(heights, list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel("test error (%)")


def label_numbers(axes: "Axes") -> None:
    """A legend for `draw_numbers`."""
    axes.plot([], [], "D", color=_PAPER_COLOR, markersize=5, label="the paper")
    axes.plot([], [], "o", color=_OUR_COLOR, markersize=5, label="ours")
    axes.legend(fontsize=8, loc="best")
