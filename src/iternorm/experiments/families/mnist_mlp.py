"""What Figure 3 and Figure A1 share: the MLP on MNIST, with the full batch and with batches of 2."""

import math
from collections.abc import Sequence

from iternorm.experiments.data import datasets as data
from iternorm.experiments.evidence import curves
from iternorm.experiments.jobs.findings import Comparison
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.recipe import Recipe

HOME = "mnist"

# The paper does not say how many runs it shows.
SEEDS = 3

# The paper's learning rates.
FULL_BATCH_RATES = (0.2, 0.5, 1.0, 2.0, 5.0)
SMALL_BATCH_RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
# Rows of batches of 2 whose mean is the loss at the end: a row is 500 iterations, 1000 examples.
_LAST_ROWS = 5


def configuration(norm: str, lr: float, seed: int, plan: Plan, *, batch_size: int | None = None) -> Config:
    """One run. `batch_size` is 2 or None, which is all examples: then an iteration is an epoch."""
    size = "full" if batch_size is None else f"B{batch_size}"
    job = f"{size}-{norm.replace(' ', '-')}-lr{lr:g}-s{seed}"
    examples = 512 if plan.smoke else 60000
    options: dict = {"eval_every": 2}
    epochs = 6 if plan.smoke else 200
    if batch_size is not None:
        epochs = 1
        options = {"record_every": 10 if plan.smoke else 500, "eval_every": 2 if plan.smoke else 10}
        options["max_iterations"] = 40 if plan.smoke else None
    name = "mnist"
    if plan.smoke:
        options |= {"train_examples": examples, "test_examples": 256, "width": 0.2}
        name = data.real_or_generated(name)
    recipe = Recipe(name, "mlp", norm, batch_size or examples, lr, epochs, seed=seed, **options)
    return recipe.to_config(job)


def rates(plan: Plan, *, batch_size: int | None = None) -> tuple[float, ...]:
    """The learning rates to try."""
    found = FULL_BATCH_RATES if batch_size is None else SMALL_BATCH_RATES
    return found[1:4:2] if plan.smoke else found


def is_full_batch(result: Result) -> bool:
    """Whether a run's batch is the whole training set."""
    return result.config["batch_size"] > 2


def final_loss(result: Result) -> float:
    """The training loss that learning rates are chosen by."""
    return curves.final(result, "train_loss", 1 if is_full_batch(result) else _LAST_ROWS)


def best_by_norm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """For each normalization all seeds of the learning rate with the least final training loss."""
    best: dict[str, list[Result]] = {}
    for (norm, _), runs in curves.by(results, "norm", "lr").items():
        if norm not in best or _mean_loss(runs) < _mean_loss(best[norm]):
            best[norm] = runs
    return best


def _mean_loss(runs: Sequence[Result]) -> float:
    loss = curves.mean(runs, final_loss)
    return math.inf if loss is None else loss


def comparisons(best: dict[str, list[Result]], norms: Sequence[str], where: str) -> list[Comparison]:
    """Our errors, which the paper shows as curves without numbers."""
    found = []
    for norm in norms:
        runs = best.get(norm)
        note = f"learning rate {runs[0].config['lr']:g}" if runs else ""
        note = "; ".join(filter(None, (note, curves.divergence_note(runs))))
        said = {"note": note, "num_diverged": curves.num_diverged(runs)}
        test_error, loss = curves.seeds(runs, final_test_error), curves.seeds(runs, final_loss)
        found.append(Comparison(f"{norm}, {where}, test error", "", test_error, **said))
        found.append(Comparison(f"{norm}, {where}, training loss", "", loss, unit="", **said))
    return found


def mean_training_error(result: Result) -> float:
    """Training error averaged over a run: the less, the more efficient the training."""
    return curves.mean_over_run(result, "train_error")


def final_test_error(result: Result) -> float:
    """Test error at the end of a run."""
    return curves.final(result, "test_error")


def seeds(plan: Plan) -> range:
    """Three seeds, which a verdict needs; one in the small size."""
    return range(plan.seeds or (1 if plan.smoke else SEEDS))
