"""The report of the demonstration, drawn from its results alone."""

import json
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from iternorm.report.files import write_text_atomically
from iternorm.report.html import figure_svg, html_page, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

COLUMNS = (
    "normalization",
    "learning rate",
    "training loss",
    "test error",
    "time",
    "condition number",
    "effective rank",
)
# Colours that stay apart for the colour-blind, and a line of its own for each.
_LOOKS = (("#6b7280", (0, (1, 1))), ("#0072b2", (0, (5, 2))), ("#d55e00", (0, (6, 2, 1, 2))), ("#00795c", "solid"))


def table(results: dict) -> "Table":
    """The results as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    config = results["config"]
    title = f"4-layer MLP on handwritten digits, {config['epochs']} full-batch steps"
    printed = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for index, name in enumerate(COLUMNS):
        # One word a line: the table fits 80 columns.
        printed.add_column(name.replace(" ", "\n"), justify="right" if index else "left", no_wrap=True)
    for row in _rows(results):
        printed.add_row(*row)
    return printed


def write(results: dict, folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `results.json` into `folder`; returns the page's path."""
    # The page first: where a package for the figures is missing, nothing is written.
    text = page(results)
    write_text_atomically(Path(folder) / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    return write_text_atomically(Path(folder) / "report.html", text)


def page(results: dict) -> str:
    """The whole report as one HTML page."""
    config = results["config"]
    intro = (
        "<p>A normalization layer keeps the activations of a network in shape while it trains. Batch normalization "
        "(BN) gives every channel mean 0 and variance 1 but leaves channels correlated. <em>Whitening</em> removes the "
        "correlation too: decorrelated batch normalization (DBN) does it exactly, from an eigendecomposition, and "
        "iterative normalization (IterNorm) nearly, with a few matrix products. The same small network was trained "
        f"here with each of them on {config['num_train']} handwritten digits, from the same initial weights.</p>"
    )
    return html_page(
        "Whitening on handwritten digits",
        [
            ("What was seen", intro + _observations(results) + html_table(COLUMNS, _rows(results)) + _DEFINITIONS),
            ("Training", _figure(training_figure(results), _TRAINING_CAPTION, "Training loss and test error")),
            (
                "Spectrum of the last hidden layer",
                _SPECTRUM_TEXT
                + _figure(spectrum_figure(results), _SPECTRUM_CAPTION, "Eigenvalues before and after normalization"),
            ),
            ("What was run", _method(results)),
            ("Where it was run", _provenance(results)),
        ],
        subtitle=f"A 4-layer MLP, four normalizations, {config['epochs']} full-batch steps, seed {config['seed']}",
    )


_DEFINITIONS = (
    "<ul><li><strong>Training loss</strong>: mean cross-entropy over the training set after the last step.</li>"
    "<li><strong>Test error</strong>: share of the test digits misread after the last step, with running "
    "statistics.</li><li><strong>Time</strong>: of the run with the learning rate shown, testing included. The network "
    "is far too small for it to tell anything of larger ones; <code>iternorm bench</code> is for that.</li>"
    "<li><strong>Condition number</strong>: largest over smallest eigenvalue of the covariance of the last hidden "
    "layer's 100 channels, with the whole training set as one batch, after normalization and before scale, shift and "
    "ReLU. It is 1 for white data and ∞ where a direction holds no variance.</li>"
    "<li><strong>Effective rank</strong>: the exponential of the entropy of the same eigenvalues, roughly the number "
    "of directions that carry the variance: 100 for white data, 1 where all channels say the same.</li></ul>"
)
_TRAINING_CAPTION = (
    "Left: loss on the training set, on a logarithmic scale. Right: error on the test digits. The test uses running "
    "averages of the statistics, which lag behind the network during the first steps and cost accuracy then."
)
_SPECTRUM_TEXT = (
    "<p>The eigenvalues of a layer's covariance are the variances along its principal directions. Were they all equal, "
    "the data would be white and gradient descent would move equally fast in all directions. A steep curve means a few "
    "directions dominate. BN rescales channels and can hardly change the curve. DBN whitens each group of 16 channels "
    "and leaves the correlation between groups. IterNorm brings the largest eigenvalues to one level and amplifies the "
    "others by no more than a fixed factor, so that directions of little but noise stay small: the number of steps "
    "decides how far whitening goes.</p>"
)
_SPECTRUM_CAPTION = (
    "Eigenvalues of the covariance of the last hidden layer, in descending order, relative to their mean (dotted line: "
    "white data). Thin: the layer's input to the normalization. Thick: its output, before scale and shift. Eigenvalues "
    "below the frame are rounding errors or exact zeros."
)


def training_figure(results: dict) -> "Figure":
    """Training loss and test error by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (colour, line) in zip(results["methods"], _LOOKS, strict=True):
        label = f"{method['name']} (learning rate {method['learning_rate']:g})"
        losses = [float("nan") if loss is None else loss for loss in method["train_loss"]]
        left.plot(losses, color=colour, linestyle=line, linewidth=2, label=label)
        right.plot(method["test_error"], color=colour, linestyle=line, linewidth=2)
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
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


def spectrum_figure(results: dict) -> "Figure":
    """The eigenvalues before and after each normalization."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(results["methods"]), sharey=True)
    for axes, method, (colour, _) in zip(panels, results["methods"], _LOOKS, strict=True):
        axes.axhline(1, color="#9aa3af", linewidth=1, linestyle=":")
        for place, width, alpha in (("before", 1.2, 0.65), ("after", 2.6, 1.0)):
            if method["conditioning"] is not None:
                eigenvalues = method["conditioning"][place]["eigenvalues"]
                mean = sum(eigenvalues) / len(eigenvalues)
                relative = [value / mean if mean > 0 else 0 for value in eigenvalues]
                axes.plot(
                    range(1, len(relative) + 1), relative, color=colour, linewidth=width, alpha=alpha, label=place
                )
        axes.set(yscale="log", ylim=(1e-7, 1e2), xlabel="eigenvalue number", title=method["name"])
        if method["name"] != "none" and method["conditioning"] is not None:
            axes.legend(loc="lower left", frameon=False, fontsize=10)
        _tidy(axes)
    panels[0].set_ylabel("eigenvalue / mean", fontsize=11)
    return figure


def _tidy(axes) -> None:
    axes.grid(color="#e5e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    axes.xaxis.label.set_size(11)
    axes.title.set_size(12)


def _figure(figure: "Figure", caption: str, label: str) -> str:
    return f"<figure>{figure_svg(figure, label=label)}<figcaption>{escape(caption)}</figcaption></figure>"


def _rows(results: dict) -> list[list[str]]:
    rows = []
    for method in results["methods"]:
        loss, after = method["train_loss"][-1], (method["conditioning"] or {}).get("after")
        rows.append(
            [
                method["name"],
                f"{method['learning_rate']:g}",
                "diverged" if loss is None else f"{loss:.5f}",
                f"{method['test_error'][-1]:.2f} %",
                f"{method['seconds']:.2f} s",
                "–" if after is None else _large(after["condition_number"]),
                "–" if after is None else f"{after['effective_rank']:.1f}",
            ]
        )
    return rows


def _large(number: float | None) -> str:
    if number is None:
        return "∞"
    return f"{number:.1f}" if number < 1e4 else f"{number:.1e}"


def _observations(results: dict) -> str:
    """What the numbers of this very run say, in sentences."""
    methods = {method["name"]: method for method in results["methods"]}
    lines = []
    finished = [method for method in results["methods"] if method["train_loss"][-1] is not None]
    if finished:
        ranked = sorted(finished, key=lambda method: method["train_loss"][-1])
        order = ", ".join(f"{method['name']} {method['train_loss'][-1]:.3g}" for method in ranked)
        lines.append(
            f"<strong>Training loss</strong> after {results['config']['epochs']} steps, lowest first: {order}."
        )
    plain = methods["none"]["train_loss"][-1]
    if plain is not None:
        reached = []
        for name in ("BN", "DBN", "IterNorm"):
            step = next(
                (i for i, loss in enumerate(methods[name]["train_loss"]) if loss is not None and loss <= plain), None
            )
            reached.append(f"{name} {'never' if step is None else f'after {step}'}")
        lines.append(
            f"<strong>Speed</strong>: the network without normalization ends at a loss of {plain:.3g}. "
            f"Steps needed to get there with a normalization: {', '.join(reached)}."
        )
    errors = ", ".join(f"{method['name']} {method['test_error'][-1]:.1f}\u00a0%" for method in results["methods"])
    lines.append(
        f"<strong>Test error</strong>: {errors}. One test digit is {100 / results['config']['num_test']:.2f}\u00a0%, "
        "so differences of a few tenths may well be chance."
    )
    ranks = [
        f"{name} {method['conditioning']['before']['effective_rank']:.0f} → "
        f"{method['conditioning']['after']['effective_rank']:.0f}"
        for name, method in methods.items()
        if name != "none" and method["conditioning"] is not None
    ]
    if ranks:
        lines.append(
            "<strong>Conditioning</strong>: directions that carry the last hidden layer's variance (effective rank, of "
            f"100), before → after normalization: {', '.join(ranks)}."
        )
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _method(results: dict) -> str:
    config = results["config"]
    rates = ", ".join(f"{rate:g}" for rate in config["learning_rates"])
    methods = html_table(["normalization", "layer"], [[m["name"], m["description"]] for m in results["methods"]])
    columns = ["normalization", *(f"{rate:g}" for rate in config["learning_rates"])]
    losses = [
        [
            method["name"],
            *("diverged" if loss is None else f"{loss:.4f}" for loss in method["loss_of_learning_rate"].values()),
        ]
        for method in results["methods"]
    ]
    return (
        f"<p>Data: scikit-learn's digits, 8×8 pixels in [0, 1], {config['num_train']} to train on and "
        f"{config['num_test']} to test on, a fixed stratified split. Network: three hidden layers of 100 units, each "
        "linear, normalization, ReLU; then a linear layer. Plain SGD without momentum or weight decay on the whole "
        f"training set at once, {config['epochs']} steps, as in Section 4.2 of the paper (there on MNIST). Every "
        f"normalization was trained with the paper's learning rates {rates}, and the one with the least final training "
        "loss is shown. Batches and initial weights are the same for all.</p>"
        + methods
        + html_table(columns, losses, caption="Final training loss by learning rate")
        + f"<p>To repeat it: <code>iternorm demo --epochs {config['epochs']} --seed {config['seed']}</code>. All "
        "numbers of this page, every step included, are in <code>results.json</code> beside it.</p>"
        "<p>The paper: L. Huang, Y. Zhou, F. Zhu, L. Liu, L. Shao, “Iterative Normalization: Beyond Standardization "
        "towards Efficient Whitening”, CVPR 2019, arXiv:1904.03441.</p>"
    )


def _provenance(results: dict) -> str:
    found = results["provenance"]
    machine = found["machine"]
    rows = [
        ["processor", f"{machine['cpu']}, {machine['cores']} cores; threads used: {machine['threads']}"],
        ["memory", "unknown" if machine["memory_gib"] is None else f"{machine['memory_gib']} GiB"],
        ["system", found["os"]],
        ["versions", f"iternorm {found['iternorm']}, torch {found['torch']['version']}, python {found['python']}"],
        ["commit", found["commit"] or "not a checkout"],
        ["finished", found["time"]],
        ["time for all runs", f"{results['seconds']:.1f} s"],
    ]
    return html_table(["what", "value"], rows)
