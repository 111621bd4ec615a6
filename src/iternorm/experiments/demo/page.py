"""The report of the demonstration, drawn from its results alone."""

import json
import math
import os
import statistics
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from iternorm.experiments.demo.figures import spectrum_figure, trade_figure, training_figure
from iternorm.experiments.evidence import rule
from iternorm.experiments.evidence.rule import Seeds
from iternorm.experiments.jobs.findings import Verdict
from iternorm.report.files import write_text_atomically
from iternorm.report.html import figure_svg, html_page, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

COLUMNS = (
    "normalization",
    "learning rate",
    "training loss",
    "test error %",
    "condition number",
    "effective rank",
    "noise %",
)


def table(results: dict) -> "Table":
    """The results as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    config = results["config"]
    title = f"4-layer MLP on handwritten digits, {config['epochs']} full-batch steps, {_seeds(config)}"
    printed = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for index, name in enumerate(COLUMNS):
        # One word a line: the table fits 80 columns.
        printed.add_column(
            name.removeprefix("learning ").replace(" ", "\n"), justify="right" if index else "left", no_wrap=True
        )
    for row in _rows(results):
        printed.add_row(*(cell.replace(" ± ", "±") for cell in row))
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
        f"here with each of them on {config['num_train']} handwritten digits, from the same initial weights, with "
        f"{_seeds(config)}.</p>"
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
            (
                "Conditioning against noise",
                _TRADE_TEXT + _figure(trade_figure(results), _TRADE_CAPTION, "Effective rank against batch noise"),
            ),
            ("What this does not show", _limits(results)),
            ("What was run", _method(results)),
            ("Where it was run", _provenance(results)),
        ],
        subtitle=f"A 4-layer MLP, four normalizations, {config['epochs']} full-batch steps, {_seeds(config)}",
    )


def _seeds(config: dict) -> str:
    count = len(config["seeds"])
    return "one seed" if count == 1 else f"{count} seeds"


_DEFINITIONS = (
    "<p>Numbers are means over the seeds, ± their standard deviation. Condition numbers are medians.</p>"
    "<ul><li><strong>Training loss</strong>: mean cross-entropy over the training set after the last step.</li>"
    "<li><strong>Test error</strong>: share of the test digits misread after the last step, with running "
    "statistics.</li>"
    "<li><strong>Condition number</strong>: largest over smallest eigenvalue of the covariance of the last hidden "
    "layer's 100 channels, with the whole training set as one batch, after normalization and before scale, shift and "
    "ReLU. It is 1 for white data and ∞ where a direction holds no variance.</li>"
    "<li><strong>Effective rank</strong>: the exponential of the entropy of the same eigenvalues, roughly the number "
    "of directions that carry the variance: 100 for white data, 1 where all channels say the same.</li>"
    "<li><strong>Noise</strong>: how far the normalized output of a digit moves when it is normalized with another "
    "batch, in % of its length (SND, the paper's Equations 9 and 10).</li></ul>"
)
_TRAINING_CAPTION = (
    "Left: loss on the training set, on a logarithmic scale. Right: error on the test digits. Lines are means over the "
    "seeds, bands hold all of them. The test uses running averages of the statistics, which lag behind the network "
    "during the first steps and cost accuracy then."
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
    "Eigenvalues of the covariance of the last hidden layer of the first seed, in descending order, relative to their "
    "mean (dotted line: white data). Thin: the layer's input to the normalization. Thick: its output, before scale and "
    "shift. Eigenvalues below the frame are rounding errors or exact zeros."
)
_TRADE_TEXT = (
    "<p>More whitening spreads the variance over more directions, and makes the output depend more on the batch. The "
    "paper's point is that the number of Newton steps chooses a place between the two.</p>"
)
_TRADE_CAPTION = "The last hidden layer after training, a point for each seed. Up is whiter, left is quieter."


def _figure(figure: "Figure", caption: str, label: str) -> str:
    return f"<figure>{figure_svg(figure, label=label)}<figcaption>{escape(caption)}</figcaption></figure>"


def _rows(results: dict) -> list[list[str]]:
    rows = []
    for method in results["methods"]:
        after = [run["conditioning"]["after"] for run in method["runs"] if run["conditioning"] is not None]
        numbers = [math.inf if found["condition_number"] is None else found["condition_number"] for found in after]
        noise = [run["noise"] for run in method["runs"] if run["noise"] is not None]
        rows.append(
            [
                method["name"],
                f"{method['learning_rate']:g}",
                _spread(_finals(method, "train_loss"), ".2g"),
                _spread(_finals(method, "test_error"), ".2f"),
                _large(statistics.median(numbers)) if numbers else "–",
                f"{statistics.fmean(found['effective_rank'] for found in after):.1f}" if after else "–",
                f"{statistics.fmean(noise):.1f}" if noise else "–",
            ]
        )
    return rows


def _finals(method: dict, column: str) -> Seeds:
    """The last value of every run that did not diverge."""
    last = [run[column][-1] for run in method["runs"] if run["train_loss"][-1] is not None]
    return Seeds(tuple(last), len(method["runs"]) - len(last))


def _spread(seeds: Seeds, form: str) -> str:
    """Mean and deviation, without their number, which is the same for all."""
    if not seeds.values:
        return "diverged"
    text = f"{seeds.mean:{form}}"
    if len(seeds.values) > 1:
        text += f" ± {statistics.stdev(seeds.values):{'.1g' if form == '.2g' else form}}"
    return text + (f", {seeds.num_diverged} diverged" if seeds.num_diverged else "")


def _large(number: float) -> str:
    if math.isinf(number):
        return "∞"
    return f"{number:.1f}" if number < 1e4 else f"{number:.1e}"


def _observations(results: dict) -> str:
    """What the numbers of this very run say, in sentences."""
    methods = {method["name"]: method for method in results["methods"]}
    losses = {name: _finals(method, "train_loss") for name, method in methods.items()}
    ranked = sorted((name for name in losses if losses[name].values), key=lambda name: losses[name].mean)
    lines = []
    if ranked:
        order = ", ".join(f"{name} {losses[name].mean:.2g}" for name in ranked)
        lines.append(
            f"<strong>Training loss</strong> after {results['config']['epochs']} steps, lowest first: {order}."
        )
    if losses["none"].values:
        plain = losses["none"].mean
        reached = ", ".join(f"{name} {_steps_to(methods[name], plain)}" for name in ("BN", "DBN", "IterNorm"))
        lines.append(
            f"<strong>Speed</strong>: the network without normalization ends at a loss of {plain:.2g}. "
            f"Steps needed to get there with a normalization, on average: {reached}."
        )
    lines.append(_test_errors(methods, results["config"]["num_test"]))
    ranks, noise = [], []
    for name in ("BN", "DBN", "IterNorm"):
        runs = [run for run in methods[name]["runs"] if run["conditioning"] is not None]
        if runs:
            before, after = (
                statistics.fmean(run["conditioning"][place]["effective_rank"] for run in runs)
                for place in ("before", "after")
            )
            ranks.append(f"{name} {before:.0f} → {after:.0f}")
            noise.append(f"{name} {statistics.fmean(run['noise'] for run in runs):.0f}\u00a0%")
    if ranks:
        lines.append(
            "<strong>Conditioning</strong>: directions that carry the last hidden layer's variance (effective rank, of "
            f"100), before → after normalization: {', '.join(ranks)}."
        )
        lines.append(
            f"<strong>Noise</strong> of batches of {results['config']['noise_batch']} there, as a share of the output: "
            f"{', '.join(noise)}."
        )
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _steps_to(method: dict, loss: float) -> str:
    """After how many steps the mean loss is as low."""
    curves = [run["train_loss"] for run in method["runs"] if run["train_loss"][-1] is not None]
    means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    step = next((index for index, mean in enumerate(means) if mean <= loss), None)
    return "never" if step is None else str(step)


def _test_errors(methods: dict[str, dict], num_test: int) -> str:
    """The test errors, and what they decide by the rule that the paper's claims are decided by."""
    errors = {name: _finals(method, "test_error") for name, method in methods.items()}
    told = ", ".join(f"{name} {_spread(seeds, '.2f')}\u00a0%" for name, seeds in errors.items())
    text = f"<strong>Test error</strong>: {told}. One test digit is {100 / num_test:.2f}\u00a0%."
    if errors["BN"].values and errors["IterNorm"].values:
        found = rule.difference(errors["IterNorm"], errors["BN"], num_test)
        error = "" if found.error is None else f" ± {found.error:.2f} (standard error)"
        verdict = {
            Verdict.HOLDS: "IterNorm's is lower in this run",
            Verdict.FAILS: "BN's is lower in this run",
        }.get(rule.decide(found).verdict, "this run does not decide which is lower")
        text += f" BN minus IterNorm: {found.value:+.2f}{error}. By three seeds and two standard errors, {verdict}."
    return text


def _limits(results: dict) -> str:
    config = results["config"]
    return (
        f"<ul><li>The network has seen {config['num_train']} small pictures, and every normalization reads nearly all "
        "of them in the end. How well a network generalizes on such a task says little about larger ones: "
        "<code>iternorm report</code> collects the trainings on CIFAR-10 and Imagenette, some for whitening and some "
        "against it.</li>"
        "<li>Every step sees all the training data, so noise plays no part in the training shown here. The last figure "
        "measures what smaller batches would add.</li>"
        "<li>The learning rate was chosen by the training loss, with the first seed. Another rule would rank the test "
        "errors differently.</li>"
        "<li>The spread is over initial weights. The split of the digits is the same for all seeds.</li>"
        "<li>So small a network tells nothing of time: <code>iternorm bench</code> is for that.</li>"
        "</ul>"
    )


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
        "loss was trained again with the other seeds. Initial weights are the same for all normalizations.</p>"
        + methods
        + html_table(columns, losses, caption="Final training loss by learning rate, first seed")
        + f"<p>To repeat it: <code>iternorm demo --epochs {config['epochs']} --seed {config['seeds'][0]} "
        f"--seeds {len(config['seeds'])}</code>. All "
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
