"""Figure 4: condition number and SND of BN, DBN and IterNorm by dimension, batch size 1024.

Reproduces: the paper's Figure 4: 60,000 Gaussian examples, dimensions 2 to 512, mean of 10 repeats.
Claim: DBN has a condition number of exactly 1 and an SND that grows fast with the dimension; IterNorm (T=5) is better
conditioned than BN at every dimension, and its SND falls in high dimensions, below BN's.
Command: iternorm run fig4 && iternorm plot fig4
Cost: about two minutes on two cores.
The paper got: curves without numbers.
Departures: the paper gives neither the number of batches (ours: 100) nor that of samples (ours: 1000).
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
    """One job for each dimension."""
    dimensions = [2**power for power in ((1, 3, 5) if plan.smoke else range(1, 10))]
    batch_size = 128 if plan.smoke else 1024
    return [gaussian.configuration(f"d{d}", OPERATIONS, d, batch_size, plan.smoke) for d in dimensions]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each operation."""
    return gaussian.measure(config, context)


def plot(results: Sequence[Result]) -> "Figure":
    """Condition number, and SND, over the dimension."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    gaussian.draw(left, results, "dimension", "condition_number")
    gaussian.draw(right, results, "dimension", "snd")
    left.set(xlabel="dimension", ylabel="condition number", title="(a) condition number of the output")
    right.set(xlabel="dimension", ylabel="SND", title=f"(b) SND, batch size {results[0].config['batch_size']}")
    left.legend(fontsize=8)
    return figure
