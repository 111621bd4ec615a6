"""Figure 3: an MLP on MNIST with and without normalization, full batch and batch size 2.

Reproduces: the paper's Figure 3: four layers, 100 units in a hidden one, SGD; (a) full batch (60,000), (b) batch size
2; for each method the learning rate with the least training loss, of the paper's five.
Claim: with the full batch all normalization methods improve the network significantly, full whitening (DBN) learns less
efficiently than IterNorm and has a diminished test performance; with batches of 2 BN can hardly learn, and the network
without normalization learns well.
Command: iternorm run fig3 [--device cuda] && iternorm plot fig3
Cost: 40 runs. Full batches take 3 minutes on a GPU, batches of 2 54 minutes on one core (--only B2 --device cpu).
The paper got: curves without numbers.
Departures: the paper gives no number of iterations (ours: 200 with the full batch, 30,000, one epoch, with batches of
2), no momentum (ours: none), no eps (ours: 1e-5) and no number of runs (ours: one seed). DBN and IterNorm (T=5) whiten
all 100 units together. Loss and error of training are those of the batches as they were trained on; a learning rate's
loss is that of the last iteration, or the mean of the last 2,500 with batches of 2.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import curves, mnist_mlp
from .curves import evidence
from .findings import Claim, Comparison
from .mnist_mlp import HOME as HOME
from .registry import Plan
from .results import Config, Result
from .train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMS = ("plain", "BN", "DBN", "IterNorm T=5")

# The loss of a network that knows nothing about ten classes.
_CHANCE = math.log(10)


def jobs(plan: Plan) -> list[Config]:
    """One job for each seed, batch size, method and learning rate."""
    return [
        mnist_mlp.configuration(norm, lr, seed, plan, batch_size=batch_size)
        for seed in mnist_mlp.seeds(plan)
        for batch_size in (None, 2)
        for norm in NORMS
        for lr in mnist_mlp.rates(plan, batch_size=batch_size)
    ]


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The final test error and training loss of each method's best learning rate."""
    full, small = _best(results)
    full_batch = mnist_mlp.comparisons(full, NORMS, "full batch")
    return full_batch + mnist_mlp.comparisons(small, NORMS, "batch size 2")


def claims(results: Sequence[Result]) -> list[Claim]:
    """The sentences of Sections 4.2 and 4.3 on this figure."""
    full, small = _best(results)
    return [_improvement(full), _efficiency(full), _generalization(full), _small_batches(small)]


def _best(results: Sequence[Result]) -> tuple[dict[str, list[Result]], dict[str, list[Result]]]:
    full = [result for result in results if mnist_mlp.is_full_batch(result)]
    small = [result for result in results if not mnist_mlp.is_full_batch(result)]
    return mnist_mlp.best_by_norm(full), mnist_mlp.best_by_norm(small)


def _improvement(best: dict[str, list[Result]]) -> Claim:
    losses = {norm: curves.mean(best.get(norm), mnist_mlp.final_loss) for norm in NORMS}
    plain, *others = losses.values()
    holds = None
    if plain is not None and all(loss is not None for loss in others):
        # "Significantly": at most half of the loss.
        holds = all(loss <= plain / 2 for loss in others if loss is not None)
    return Claim(
        "Full batch: all normalization methods significantly improve the performance.",
        holds,
        f"Final training loss, at most half of plain's wanted: {evidence(losses, '')}. "
        f"Final test error: {evidence({norm: mnist_mlp.test_error(best.get(norm)) for norm in NORMS})}.",
    )


def _efficiency(best: dict[str, list[Result]]) -> Claim:
    errors = {norm: mnist_mlp.efficiency(best.get(norm)) for norm in NORMS}
    losses = {norm: curves.mean(best.get(norm), mnist_mlp.final_loss) for norm in NORMS}
    dbn, iter_norm = errors["DBN"], errors["IterNorm T=5"]
    return Claim(
        "Full batch: full whitening (DBN) underperforms IterNorm in training efficiency.",
        None if dbn is None or iter_norm is None else dbn > iter_norm,
        f"Training error averaged over iterations: {evidence(errors)}. Final training loss: {evidence(losses, '')}.",
    )


def _generalization(best: dict[str, list[Result]]) -> Claim:
    errors = {norm: mnist_mlp.test_error(best.get(norm)) for norm in NORMS}
    dbn, bn, iter_norm = errors["DBN"], errors["BN"], errors["IterNorm T=5"]
    return Claim(
        "Full batch: DBN has diminished test performance.",
        None if dbn is None or bn is None or iter_norm is None else dbn > max(bn, iter_norm),
        f"Final test error: {evidence(errors)}; that of DBN has to be above those of BN and IterNorm.",
    )


def _small_batches(best: dict[str, list[Result]]) -> Claim:
    losses = {norm: curves.mean(best.get(norm), mnist_mlp.final_loss) for norm in NORMS}
    errors = {norm: mnist_mlp.test_error(best.get(norm)) for norm in NORMS}
    bn, plain = losses["BN"], losses["plain"]
    return Claim(
        "Batch size 2: BN can hardly learn and produces random results, the network without normalization learns well.",
        None if bn is None or plain is None else bn > _CHANCE / 2 and plain < _CHANCE / 4,
        f"Final training loss: {evidence(losses, '')}; BN's has to be above half of the {_CHANCE:.2f} of chance, "
        f"plain's below a quarter. Final test error: {evidence(errors)}.",
    )


def plot(results: Sequence[Result]) -> "Figure":
    """Errors of the full batch over iterations, and the training loss of batches of 2."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    full, small = _best(results)
    curves.draw(left, _named(full), "iteration")
    curves.limit_errors(left, [run for runs in full.values() for run in runs])
    left.set(ylabel="error (%)", title="(a) full batch: training (solid), test (dashed)")
    curves.draw(right, _named(small), "iteration", "train_loss", None)
    right.set(ylabel="training loss", title="(b) batch size 2")
    for axes, best in ((left, full), (right, small)):
        if best:
            axes.legend(fontsize=8)
        else:
            axes.text(0.5, 0.5, "not run", ha="center", transform=axes.transAxes)
    return figure


def _named(best: dict[str, list[Result]]) -> dict[str, list[Result]]:
    return {norm: best[norm] for norm in NORMS if norm in best}
