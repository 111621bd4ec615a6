"""The figures of the demonstration."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iternorm.report.palette import color_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A line of its own for each, beside its colour; IterNorm has all channels in one group here.
_LINES: dict[str, Any] = {"none": (0, (1, 1)), "BN": (0, (5, 2)), "DBN": (0, (6, 2, 1, 2)), "IterNorm": "solid"}


def _color(name: str) -> str | None:
    return color_of("IterNorm T=5" if name == "IterNorm" else name)


def training_figure(results: dict) -> "Figure":
    """Training loss and test error by step: the mean over the seeds, and all of them in a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in results["methods"]:
        name = method["name"]
        label = f"{name} (learning rate {method['learning_rate']:g})"
        for axes, column in ((left, "train_loss"), (right, "test_error")):
            low, mean, high = _over_seeds([run[column] for run in method["runs"]])
            color = _color(name)
            axes.plot(mean, color=color, linestyle=_LINES[name], linewidth=2, label=label)
            axes.fill_between(range(len(mean)), low, high, color=color, alpha=0.18, linewidth=0)
    left.set(yscale="log", xlabel="step", title="training loss")
    # Logarithmic above 1 %, linear below, so that an error of zero has a place.
    right.set_yscale("symlog", linthresh=1, linscale=0.3)
    ticks = [0, 1, 2, 5, 10, 20, 50, 100]
    right.set(
        ylim=(0, 100), xlabel="step", title="test error, %", yticks=ticks, yticklabels=[str(tick) for tick in ticks]
    )
    right.minorticks_off()
    for axes in (left, right):
        _tidy(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


def _over_seeds(curves: Sequence[Sequence[float | None]]) -> tuple[list[float], list[float], list[float]]:
    """The least, the mean and the largest of all runs at each step; NaN where one has diverged."""
    steps = [[float("nan") if value is None else value for value in values] for values in zip(*curves, strict=True)]
    return [min(values) for values in steps], [sum(values) / len(values) for values in steps], [max(v) for v in steps]


def spectrum_figure(results: dict) -> "Figure":
    """The eigenvalues before and after each normalization, of the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(results["methods"]), sharey=True)
    for axes, method in zip(panels, results["methods"], strict=True):
        axes.axhline(1, color="#9aa3af", linewidth=1, linestyle=":")
        conditioning = method["runs"][0]["conditioning"]
        for place, width, alpha in (("before", 1.2, 0.65), ("after", 2.6, 1.0)):
            if conditioning is not None:
                eigenvalues = conditioning[place]["eigenvalues"]
                mean = sum(eigenvalues) / len(eigenvalues)
                relative = [value / mean if mean > 0 else 0 for value in eigenvalues]
                look = {"color": _color(method["name"]), "linewidth": width, "alpha": alpha}
                axes.plot(range(1, len(relative) + 1), relative, label=place, **look)
        axes.set(yscale="log", ylim=(1e-7, 1e2), xlabel="eigenvalue number", title=method["name"])
        if method["name"] != "none" and conditioning is not None:
            axes.legend(loc="lower left", frameon=False, fontsize=10)
        _tidy(axes)
    panels[0].set_ylabel("eigenvalue / mean", fontsize=11)
    return figure


def trade_figure(results: dict) -> "Figure":
    """Conditioning against noise: a point for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for method in results["methods"]:
        points = [
            (run["noise"], run["conditioning"]["after"]["effective_rank"])
            for run in method["runs"]
            if run["noise"] is not None and run["conditioning"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=_color(method["name"]), alpha=0.8, label=method["name"])
    axes.set(
        xlabel=f"noise of batches of {results['config']['noise_batch']}, % of the output",
        ylabel="effective rank, of 100",
        xlim=(0, None),
        ylim=(0, 100),
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=11)
    _tidy(axes)
    return figure


def _tidy(axes: Any) -> None:
    axes.grid(color="#e5e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    axes.xaxis.label.set_size(11)
    axes.title.set_size(12)
