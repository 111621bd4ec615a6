"""What finished training runs came to: errors at the end, over seeds; curves; and whether one is lower than another."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .findings import Claim, Comparison
from .recipe import Recipe
from .results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER_COLOR, _OUR_COLOR = "#d55e00", "#0072b2"


class Runs(NamedTuple):
    """The same training with several seeds: a value of each that ended well, and how many diverged."""

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


def select(results: Sequence[Result], **values: Any) -> list[Result]:
    """The results whose recipes have these values."""
    return [
        result
        for result in results
        if all(getattr(Recipe.from_config(result.config), name) == value for name, value in values.items())
    ]


def finals(results: Sequence[Result], column: str = "test_error", **values: Any) -> Runs:
    """A column of the last rows of the results whose recipes have these values."""
    last = [result.rows[-1] for result in select(results, **values)]
    ended = tuple(row[column] for row in last if not row.get("diverged") and row.get(column) is not None)
    return Runs(ended, sum(bool(row.get("diverged")) for row in last))


def averages(results: Sequence[Result], column: str, **values: Any) -> Runs:
    """A column's mean over all rows, of the results whose recipes have these values."""
    found = select(results, **values)
    ended = [result for result in found if not result.rows[-1].get("diverged")]
    means = tuple(statistics.fmean(row[column] for row in result.rows) for result in ended)
    return Runs(means, len(found) - len(ended))


def comparison(what: str, paper: str, runs: Runs) -> Comparison:
    """The paper's number beside ours, in percent."""
    note = f"{runs.num_diverged} diverged" if runs.num_diverged else ""
    return Comparison(what, paper, runs.values, note=note)


def claim_lower(text: str, names: tuple[str, str], runs: tuple[Runs, Runs]) -> Claim:
    """The claim that the first is lower than the second.

    It is left open where the difference of the means is within its standard error. With one seed, which gives no
    error, the sign decides.
    """
    evidence = ", ".join(f"{name} {each}" for name, each in zip(names, runs, strict=True))
    low, high = runs
    if not low.values or not high.values:
        # A run that diverged is worse than any that did not; what was not run decides nothing.
        decided = (low.values or low.num_diverged) and (high.values or high.num_diverged)
        holds = bool(low.values) if decided and (low.values or high.values) else None
        return Claim(text, holds, evidence)
    difference = statistics.fmean(high.values) - statistics.fmean(low.values)
    evidence += f": {'lower' if difference >= 0 else 'higher'} by {abs(difference):.2f}"
    if low.squared_error is None or high.squared_error is None:
        return Claim(text, difference > 0, evidence)
    error = math.sqrt(low.squared_error + high.squared_error)
    evidence += f" ± {error:.2f}"
    if abs(difference) <= error:
        return Claim(text, None, evidence + ", within the error")
    return Claim(text, difference > 0, evidence)


def draw_errors(axes: "Axes", groups: Mapping[str, Sequence[Result]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Training (solid) and test (dashed) error over the epochs, the mean over the seeds, with a band of a deviation.

    Args:
        axes: To draw on.
        groups: By name, the results of one training with several seeds; those without results are left out.
        styles: matplotlib's words for each name.
    """
    tops = []
    for name, results in groups.items():
        for column, line in (("train_error", "-"), ("test_error", "--")):
            by_epoch: dict[int, list[float]] = {}
            for result in results:
                for row in result.rows:
                    if row.get(column) is not None:
                        by_epoch.setdefault(row["epoch"], []).append(row[column])
            if not by_epoch:
                continue
            epochs = sorted(by_epoch)
            means = [statistics.fmean(by_epoch[epoch]) for epoch in epochs]
            label = f"{name}, {column.removesuffix('_error')}"
            axes.plot(epochs, means, linestyle=line, linewidth=1.2, label=label, **styles.get(name, {}))
            if len(results) > 1:
                spreads = [statistics.pstdev(by_epoch[epoch]) for epoch in epochs]
                low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
                axes.fill_between(epochs, low, high, alpha=0.15, linewidth=0, **styles.get(name, {}))
            # The first epochs would take most of the height.
            tops += means[len(means) // 10 :]
    if tops:
        axes.set_ylim(0, 1.05 * max(tops) or None)
    axes.set(xlabel="epoch", ylabel="error, %")
    axes.grid(alpha=0.25)


def draw_numbers(axes: "Axes", rows: Mapping[str, Comparison]) -> None:
    """The paper's numbers and ours, a line for each name: marks on a scale, and the figures in words."""
    heights = range(len(rows))
    for height, row in zip(heights, rows.values(), strict=True):
        if found := re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?", row.paper):
            error = float(found[2]) if found[2] else None
            style = {"color": _PAPER_COLOR, "fmt": "D", "markersize": 5, "capsize": 3}
            axes.errorbar(float(found[1]), height - 0.15, xerr=error, **style)
        if row.ours:
            error = statistics.stdev(row.ours) if len(row.ours) > 1 else None
            style = {"color": _OUR_COLOR, "fmt": "o", "markersize": 5, "capsize": 3}
            axes.errorbar(statistics.fmean(row.ours), height + 0.15, xerr=error, **style)
        ours = "diverged" if row.note and not row.ours else f"{Runs(row.ours)}{row.note and ', '}{row.note}"
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
        axes.text(1.0, height, f" paper {row.paper}\n ours {ours}", **place)
    axes.set_yticks(heights, list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel("test error, %")


def label_numbers(axes: "Axes") -> None:
    """A legend for `draw_numbers`."""
    axes.plot([], [], "D", color=_PAPER_COLOR, markersize=5, label="the paper")
    axes.plot([], [], "o", color=_OUR_COLOR, markersize=5, label="ours")
    axes.legend(fontsize=8, loc="best")
