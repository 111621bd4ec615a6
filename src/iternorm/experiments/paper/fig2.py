"""Figure 2: the outputs of one sample, normalized by BN over many batches of 16 and of 64.

Reproduces: the paper's Figure 2.
Claim: with a large batch the outputs of a sample are close together and its SND is small.
Command: iternorm run fig2 && iternorm plot fig2
Cost: less than a second.
The paper got: a drawing without numbers: 3000 Gaussian examples, one sample, batch sizes 16 and 64.
Departures: the paper gives neither the covariance of its Gaussian (ours: the identity) nor the number of batches (ours:
100). The sample is the example nearest to (1.5, 1).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from iternorm.analysis import batch_norm, snd
from iternorm.experiments.jobs.findings import Claim, Comparison, measured
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.jobs.results import Config, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def jobs(plan: Plan) -> list[Config]:
    """One job for each batch size."""
    size = {"examples": 200, "draws": 10} if plan.smoke else {"examples": 3000, "draws": 100}
    return [{"job": f"B{batch_size}", "batch_size": batch_size, **size, "seed": 0} for batch_size in (16, 64)]


def run(config: Config, context: Context) -> list[Row]:
    """One row: the examples, the sample, its outputs, and their SND."""
    generator = torch.Generator().manual_seed(config["seed"])
    data = torch.randn(config["examples"], 2, generator=generator)
    sample = data[(data - torch.tensor([1.5, 1.0])).norm(dim=1).argmin()][None]
    outputs = []

    def observed(batch: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        (maps,) = batch_norm().fit(batch[None])
        output = samples * maps.linear.flatten() + maps.shift.flatten()
        outputs.append(output[0])
        context.step(len(outputs), config["draws"])
        return output

    estimate = snd(observed, data, config["batch_size"], samples=sample, draws=config["draws"], seed=config["seed"])
    return [
        {
            "batch_size": config["batch_size"],
            "snd": estimate.value,
            "snd_standard_error": estimate.standard_error,
            "sample": sample[0].tolist(),
            "outputs": torch.round(torch.stack(outputs), decimals=4).tolist(),
            "examples": torch.round(data, decimals=2).tolist(),
        }
    ]


def plot(results: Sequence[Result]) -> "Figure":
    """A panel for each batch size: examples, the sample and its outputs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    rows = [row for result in results for row in result.rows]
    for axes, row in zip(figure.subplots(1, len(rows), sharex=True, sharey=True, squeeze=False)[0], rows, strict=True):
        # As pixels: thousands of points would be most of a page of vector graphics.
        black = {"s": 1.5, "color": "black", "linewidths": 0, "label": "examples", "rasterized": True}
        axes.scatter(*zip(*row["examples"], strict=True), **black)
        axes.scatter(
            *zip(*row["outputs"], strict=True), s=28, marker="+", color="#0072b2", linewidths=1, label="outputs"
        )
        axes.scatter(*row["sample"], s=70, marker="x", color="#d01c1c", linewidths=2, label="sample")
        axes.set_title(f"batch size {row['batch_size']}: SND {row['snd']:.2f}", fontsize=10)
        axes.set_aspect("equal")
        axes.set_xlim(-3.6, 3.6)
        axes.set_ylim(-3.6, 3.6)
    figure.axes[0].legend(loc="lower left", fontsize=8)
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The SND of both panels; the paper prints none."""
    found = {row["batch_size"]: row for result in results for row in result.rows}
    return [
        Comparison(f"SND of the sample, batch size {size}", "", (found[size]["snd"],) if size in found else (), unit="")
        for size in (16, 64)
    ]


def claims(results: Sequence[Result]) -> list[Claim]:
    """The larger batch has less SND."""
    text = "With a large batch the outputs of a sample are close together and its SND is small."
    found = {row["batch_size"]: row for result in results for row in result.rows}
    if len(found) < 2:
        return [Claim(text, measured(None), "")]
    shown = [f"{found[size]['snd']:.3f} ± {found[size]['snd_standard_error']:.3f} for {size}" for size in (16, 64)]
    less = measured(found[64]["snd"] < found[16]["snd"])
    return [Claim(text, less, f"SND by batch size: {', '.join(shown)} (standard error)")]
