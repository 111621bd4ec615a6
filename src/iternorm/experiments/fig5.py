"""Figure 5: SND of micro-batches, by batch size in 128 dimensions and by dimension with batches of 2.

Reproduces: the paper's Figure 5, with the data of Figure 4.
Claim: BN's SND is very large for small batches and falls with the batch size; with batches of 2 it grows with the
dimension. IterNorm's SND is much less sensitive to small batches, and stable as the dimension grows.
Command: iternorm run fig5 && iternorm plot fig5
Cost: about two minutes on two cores.
The paper got: curves without numbers.
Departures: the paper gives neither the number of batches (ours: 100) nor that of samples (ours: 1000), nor the range of
batch sizes (ours: 2 to 512). DBN is shown too: a batch smaller than the dimension leaves directions without variance,
in which it divides by √eps. With batches of 2 the mean over so few draws has a heavy tail: see the standard errors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import gaussian
from .registry import Context, Plan
from .results import Config, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATIONS = ("BN", "DBN", "IterNorm T=5")


def jobs(plan: Plan) -> list[Config]:
    """One job for each batch size of panel (a), then one for each dimension of panel (b)."""
    dimension = 16 if plan.smoke else 128
    sizes = (2, 8, 32) if plan.smoke else [2**power for power in range(1, 10)]
    dimensions = (2, 8) if plan.smoke else [2**power for power in range(1, 10)]
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
    by_batch = [result for result in results if result.config["panel"] == "a"]
    gaussian.draw(left, by_batch, "batch_size", "snd")
    gaussian.draw(right, [result for result in results if result.config["panel"] == "b"], "dimension", "snd")
    left.set(xlabel="batch size", ylabel="SND", title=f"(a) dimension {by_batch[0].config['dimension']}")
    right.set(xlabel="dimension", title="(b) batch size 2")
    left.legend(fontsize=8)
    return figure
