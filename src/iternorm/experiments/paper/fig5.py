"""Figure 5: SND of micro-batches, by batch size in 128 dimensions and by dimension with batches of 2.

Reproduces: the paper's Figure 5, with the data of Figure 4.
Claim: BN's SND is very large for small batches and falls with the batch size; with batches of 2 it grows with the
dimension. IterNorm's SND is much less sensitive to small batches, and stable as the dimension grows.
Command: iternorm run fig5 && iternorm plot fig5
Cost: about two minutes on two cores.
The paper got: curves without numbers.
Departures: the paper gives neither the covariance of its Gaussian (ours: the identity) nor the number of batches (ours:
100), nor that of samples (ours: 1000), nor eps (ours: 1e-5), nor the ranges of batch sizes and of dimensions (ours: 2
to 512). Each number is the mean of 10 repeats, as in Figure 4; here the paper names none. "Much less sensitive" and
"more stable" are read as by a factor of ten, chosen after the numbers had been seen. DBN is shown too: a batch smaller
than the dimension leaves directions without variance, in which it divides by √eps. With batches of 2 the mean over so
few draws has a heavy tail: see the standard errors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.families import gaussian
from iternorm.experiments.jobs.findings import Claim, Comparison, measured
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.jobs.results import Config, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATIONS = ("BN", "DBN", "IterNorm T=5")
# What "much less sensitive" and "more stable" take.
_MUCH = 10
# Batch sizes of panel (a), dimensions of panel (b).
POWERS = tuple(2**power for power in range(1, 10))


def jobs(plan: Plan) -> list[Config]:
    """One job for each batch size of panel (a), then one for each dimension of panel (b)."""
    dimension = 16 if plan.smoke else 128
    sizes = (2, 8, 32) if plan.smoke else POWERS
    dimensions = (2, 8) if plan.smoke else POWERS
    panel_a = [gaussian.configuration(f"a-B{b}", OPERATIONS, dimension, b, plan.smoke, panel="a") for b in sizes]
    return panel_a + [gaussian.configuration(f"b-d{d}", OPERATIONS, d, 2, plan.smoke, panel="b") for d in dimensions]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each operation."""
    return gaussian.measure(config, context)


def plot(results: Sequence[Result]) -> "Figure":
    """SND over the batch size, and over the dimension."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    by_batch, by_dimension = _panels(results)
    gaussian.draw(left, by_batch, "batch_size", "snd")
    gaussian.draw(right, by_dimension, "dimension", "snd")
    dimension = f" dimension {by_batch[0].config['dimension']}" if by_batch else ""
    left.set(xlabel="batch size", ylabel="SND", title=f"(a){dimension}")
    right.set(xlabel="dimension", title="(b) batch size 2")
    (left if by_batch else right).legend(fontsize=8)
    return figure


def _panels(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    first = [result for result in results if result.config["panel"] == "a"]
    return first, [result for result in results if result.config["panel"] == "b"]


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The ends of the curves; the paper prints no number."""
    by_batch, by_dimension = _panels(results)
    found = []
    for size in (2, 512):
        found += gaussian.compare_at(by_batch, OPERATIONS, "SND", "snd", f"d=128, batch size {size}", batch_size=size)
    return found + gaussian.compare_at(by_dimension, OPERATIONS, "SND", "snd", "d=512, batch size 2", dimension=512)


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper says of micro-batches."""
    texts = (
        "BN has a significantly increased SND for small batches; it is gradually reduced with increasing batch sizes.",
        "With batches of 2 the SND of BN is small in a low dimension and increased in a high-dimensional space.",
        "IterNorm is much less sensitive to a small batch size in producing SND.",
        "The SND of IterNorm is more stable, even with a significantly increased dimension.",
    )
    by_batch, by_dimension = _panels(results)
    sizes = {result.config["batch_size"] for result in by_batch}
    if not set(POWERS) <= sizes or not set(POWERS) <= {result.config["dimension"] for result in by_dimension}:
        return [Claim(text, measured(None), "") for text in texts]
    noise = gaussian.curves(by_batch, "batch_size", "snd")
    over_dimensions = gaussian.curves(by_dimension, "dimension", "snd")
    growth = {name: noise[name][2] / noise[name][512] for name in OPERATIONS}
    spread = {name: max(curve.values()) / min(curve.values()) for name, curve in over_dimensions.items()}
    factor = f"BN's has to be {_MUCH} times IterNorm's"
    sensitivity, stability = (
        f"{what}: BN {ratios['BN']:.3g}, IterNorm {ratios['IterNorm T=5']:.3g}; {factor}"
        for what, ratios in (
            ("SND at batch size 2 / at 512", growth),
            ("largest SND / smallest of any dimension", spread),
        )
    )
    return [
        Claim(
            texts[0],
            measured(all(noise["BN"][small] > noise["BN"][2 * small] for small in POWERS[:-1])),
            f"SND of BN by batch size: {gaussian.listed(noise['BN'])}",
        ),
        Claim(
            texts[1],
            measured(all(over_dimensions["BN"][low] < over_dimensions["BN"][2 * low] for low in POWERS[:-1])),
            f"SND of BN by dimension: {gaussian.listed(over_dimensions['BN'])}",
        ),
        Claim(texts[2], measured(growth["BN"] > _MUCH * growth["IterNorm T=5"]), sensitivity),
        Claim(texts[3], measured(spread["BN"] > _MUCH * spread["IterNorm T=5"]), stability),
    ]
