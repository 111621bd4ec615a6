"""Figure A1: an MLP on MNIST with IterNorm of 1 to 9 iterations, full batch.

Reproduces: the paper's Figure A1, with the setup of Figure 3 (a): T in 1, 3, 5, 7, 9, BN and DBN.
Claim: the fewest (T=1) and the most (T=9) iterations both learn less efficiently than those between; with T=9
IterNorm's test performance is significantly worse.
Command: iternorm run figA1 --device cuda && iternorm plot figA1
Cost: 35 runs for each seed, 15 of them Figure 3's, 5 minutes on a GPU.
The paper got: curves without numbers.
Departures: those of Figure 3. "Significantly" is read as by a tenth of the other errors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import curves, outcomes
from iternorm.experiments.families import mnist_mlp
from iternorm.experiments.families.mnist_mlp import HOME as HOME
from iternorm.experiments.jobs.findings import Claim, Comparison
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.training.train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITERATIONS = (1, 3, 5, 7, 9)
NORMS = ("BN", "DBN", *(f"IterNorm T={steps}" for steps in ITERATIONS))


def jobs(plan: Plan) -> list[Config]:
    """One job for each seed, method and learning rate."""
    return [
        mnist_mlp.configuration(norm, lr, seed, plan)
        for seed in mnist_mlp.seeds(plan)
        for norm in NORMS
        for lr in mnist_mlp.rates(plan)
    ]


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The final test error and training loss of each method's best learning rate."""
    return mnist_mlp.comparisons(results, NORMS, "full batch")


def claims(results: Sequence[Result]) -> list[Claim]:
    """The sentences of the appendix on this figure."""
    num_test = outcomes.num_test(results)
    return mnist_mlp.agreed(results, lambda best: _claims(best, num_test))


def _claims(best: mnist_mlp.Best, num_test: int | None) -> list[Claim]:
    trained, tested, losses = (
        {norm: outcomes.over_seeds(best.get(norm, ()), value) for norm in NORMS}
        for value in (mnist_mlp.mean_training_error, mnist_mlp.final_test_error, mnist_mlp.final_loss)
    )
    steps = [f"IterNorm T={count}" for count in ITERATIONS]
    return [
        Claim(
            "The smallest (T=1) and the largest (T=9) iteration number both have the worse training efficiency.",
            outcomes.extremes_are_worse([trained[norm] for norm in steps]),
            f"Training error (%), averaged over the iterations: {outcomes.told(trained)}; those of T=1 and of T=9 have "
            f"to be above each of T=3, 5, 7. "
            f"Final training loss: {outcomes.told(losses, '#.3g')}.",
        ),
        Claim(
            "With T=9 IterNorm has significantly worse test performance.",
            outcomes.last_is_much_worse([tested[norm] for norm in steps], num_test),
            f"Final test error (%): {outcomes.told(tested)}; that of T=9 has to be a tenth above those of T=3, 5, 7.",
        ),
    ]


def plot(results: Sequence[Result]) -> "Figure":
    """Training error, and test error, over iterations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    best = mnist_mlp.best_by_norm(results)
    runs = {norm: best[norm] for norm in NORMS if norm in best}
    curves.draw(left, runs, "iteration", "train_error", None)
    curves.draw(right, runs, "iteration", None, "test_error")
    curves.limit_errors(left, [run for found in runs.values() for run in found])
    left.set(ylabel="error (%)", title="(a) training error")
    right.set(title="(b) test error")
    left.legend(fontsize=8)
    return figure
