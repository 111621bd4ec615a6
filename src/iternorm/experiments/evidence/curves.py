"""What experiments that train make of their rows: numbers of a run, of several seeds, and curves.

A run that diverged has an infinite loss and error: it is never the best, and worse than any other.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.jobs.results import Result
from iternorm.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The name of an axis of errors over which `draw` draws both.
BOTH_ERRORS = "error (%): training solid, test dashed"


def by(results: Iterable[Result], *fields: str) -> dict:
    """Results by the value of a field of their configurations, or by the tuple of several; in the order they come."""
    groups: dict = {}
    for result in results:
        values = tuple(result.config.get(field) for field in fields)
        groups.setdefault(values[0] if len(values) == 1 else values, []).append(result)
    return groups


def diverged(result: Result) -> bool:
    """Whether a run ended because its loss was not finite."""
    return bool(result.rows[-1].get("diverged"))


def final(result: Result, name: str, rows: int = 1) -> float:
    """A value at the end of a run, averaged over its last so many rows that have it."""
    values = [row[name] for row in result.rows if row.get(name) is not None]
    if diverged(result) or not values:
        return math.inf
    return statistics.fmean(values[-rows:])


def mean_over_run(result: Result, name: str) -> float:
    """A value averaged over a run: of an error or a loss, the less, the faster the network learned."""
    return final(result, name, len(result.rows))


def seeds(results: Sequence[Result] | None, value: Callable[[Result], float]) -> tuple[float, ...]:
    """A value of each seed, in the order of the seeds; those that diverged are left out."""
    ordered = sorted(results or (), key=lambda result: result.config.get("seed", 0))
    return tuple(number for number in map(value, ordered) if math.isfinite(number))


def mean(results: Sequence[Result] | None, value: Callable[[Result], float]) -> float | None:
    """The mean of a value over the seeds, infinite where one diverged; None where there is no result."""
    return statistics.fmean(map(value, results)) if results else None


def num_diverged(results: Sequence[Result] | None) -> int:
    """How many of the seeds diverged."""
    return sum(map(diverged, results or ()))


def divergence_note(results: Sequence[Result] | None) -> str:
    """How many of the seeds diverged, empty where none did."""
    count = num_diverged(results)
    return f"{count} of {len(results or ())} runs diverged" if count else ""


def draw(
    axes: "Axes",
    runs: Mapping[str, Sequence[Result]],
    x: str,
    train: str | None = "train_error",
    test: str | None = "test_error",
) -> None:
    """A curve for each label, the mean over its seeds: training solid, test dashed. One row is a mark.

    Args:
        axes: Where to draw.
        runs: The seeds of each label. Of runs that end at different places the common part is drawn.
        x: The field of a row to draw over, ``epoch`` or ``iteration``.
        train: The field of the solid line; None draws none.
        test: The field of the dashed line; None draws none.
    """
    norms = {label: str(results[0].config.get("norm", label)) for label, results in runs.items()}
    # By what a curve is called where several are of one norm.
    keys = norms if len(set(norms.values())) == len(norms) else {label: label for label in norms}
    colors = palette.colors_of(keys.values())
    for label, results in runs.items():
        color = colors[keys[label]]
        name = f"{label} (diverged)" if any(map(diverged, results)) else label
        # With batches of 2, DBN and IterNorm are the same map and their curves coincide; both should be visible.
        width = 2.4 if label == "DBN" else 1.3
        for field, line in ((train, "-"), (test, "--")):
            if field is None:
                continue
            points = [{row[x]: row[field] for row in run.rows if row.get(field) is not None} for run in results]
            shared = [place for place in points[0] if all(place in run for run in points)]
            heights = [statistics.fmean(run[place] for run in points) for place in shared]
            # A line needs two points.
            mark = "o" if len(shared) == 1 else None
            face = color if line == "-" else "white"
            # The label is drawn for a run without points too: it was run, and diverged at once.
            label = name if field == train else None
            axes.plot(
                shared, heights, line, color=color, linewidth=width, marker=mark, markerfacecolor=face, label=label
            )
    axes.set_xlabel(x)
    axes.grid(alpha=0.25)


def note_missing(axes: "Axes", names: Sequence[str]) -> None:
    """Note on a panel which of its runs are missing; in the middle if all are."""
    if not names:
        return
    place = {"transform": axes.transAxes, "color": palette.GREY, "wrap": True}
    if not axes.lines:
        axes.text(0.5, 0.5, "not run", ha="center", va="center", **place)
        axes.set_xticks([])
        axes.set_yticks([])
    else:
        axes.text(0.98, 0.3, f"not run: {', '.join(names)}", fontsize=7, ha="right", **place)


def limit_errors(axes: "Axes", runs: Iterable[Result], quantile: float = 0.9) -> None:
    """Limit the error axis to nine tenths of each curve, so that their ends can be distinguished.

    Runs that diverged have no end, and count where there are no others.
    """
    tops, most, runs = [], 0.0, list(runs)
    for run in [run for run in runs if not diverged(run)] or runs:
        for name in ("train_error", "test_error"):
            heights = sorted(row[name] for row in run.rows if row.get(name) is not None and math.isfinite(row[name]))
            if heights:
                tops.append(heights[min(len(heights) - 1, int(quantile * len(heights)))])
                most = max(most, heights[-1])
    if most > 0:
        axes.set_ylim(0, 1.15 * max(tops) or most)
