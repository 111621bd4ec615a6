"""Figure A2: condition number and SND of IterNorm by dimension and number of iterations, batch size 1024.

Reproduces: the second figure of the paper's appendix on iterations, Figure 4 for T = 1, 3, 5, 7, 9.
Claim: with more iterations IterNorm is better conditioned and has more SND, so T controls the extent of whitening.
Command: iternorm run figA2 && iternorm plot figA2
Cost: about five minutes on two cores.
The paper got: curves without numbers.
Departures: those of Figure 4.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.families import gaussian
from iternorm.experiments.jobs.findings import Claim, Comparison, measured
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.jobs.results import Config, Result, Row
from iternorm.experiments.paper import fig4

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = tuple(f"IterNorm T={steps}" for steps in (1, 3, 5, 7, 9))
OPERATIONS = ("BN", *STEPS, "DBN")


def jobs(plan: Plan) -> list[Config]:
    """One job for each dimension."""
    return [{**config, "operations": list(OPERATIONS)} for config in fig4.jobs(plan)]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each operation."""
    return gaussian.measure(config, context)


def plot(results: Sequence[Result]) -> "Figure":
    """Condition number, and SND, over the dimension."""
    return fig4.plot(results)


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The middle of the curves; the paper prints no number."""
    found = gaussian.compare_at(results, OPERATIONS, "condition number", "condition_number", "d=128", dimension=128)
    return found + gaussian.compare_at(results, OPERATIONS, "SND", "snd", "d=128", dimension=128)


def claims(results: Sequence[Result]) -> list[Claim]:
    """What T does."""
    texts = (
        "IterNorm has better conditioning with increasing iteration number T.",
        "IterNorm has increasing SND with increasing iteration number T.",
    )
    if not set(fig4.DIMENSIONS) <= {result.config["dimension"] for result in results}:
        return [Claim(text, measured(None), "") for text in texts]
    found = []
    for text, key, sign in zip(texts, ("condition_number", "snd"), (-1, 1), strict=True):
        curves = gaussian.curves(results, "dimension", key)
        # Steps past convergence change nothing: equal within a thousandth is no step back.
        steps_back = [
            f"{later} in {d} dimensions"
            for earlier, later in itertools.pairwise(STEPS)
            for d in fig4.DIMENSIONS
            if sign * (curves[later][d] - curves[earlier][d]) < -1e-3 * curves[earlier][d]
        ]
        shown = ", ".join(f"{name.split()[1]} {curves[name][128]:#.3g}" for name in STEPS)
        evidence = f"in 128 dimensions: {shown}; steps back: {', '.join(steps_back) or 'none, in any dimension'}"
        found.append(Claim(text, measured(not steps_back), evidence))
    return found
