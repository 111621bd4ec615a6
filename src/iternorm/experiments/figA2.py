"""Figure A2: condition number and SND of IterNorm by dimension and number of iterations, batch size 1024.

Reproduces: the second figure of the paper's appendix on iterations, Figure 4 for T = 1, 3, 5, 7, 9.
Claim: with more iterations IterNorm is better conditioned and has more SND, so T controls the extent of whitening.
Command: iternorm run figA2 && iternorm plot figA2
Cost: about five minutes on two cores.
The paper got: curves without numbers.
Departures: those of Figure 4.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import fig4, gaussian
from .registry import Context, Plan
from .results import Config, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATIONS = ("BN", *(f"IterNorm T={steps}" for steps in (1, 3, 5, 7, 9)), "DBN")


def jobs(plan: Plan) -> list[Config]:
    """One job for each dimension."""
    return [{**config, "operations": list(OPERATIONS)} for config in fig4.jobs(plan)]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each operation."""
    return gaussian.measure(config, context)


def plot(results: Sequence[Result]) -> "Figure":
    """Condition number, and SND, over the dimension."""
    return fig4.plot(results)
