"""What Figure 3 and Figure A1 share: the MLP on MNIST, with the full batch and with batches of 2."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from iternorm.experiments.data import datasets as data
from iternorm.experiments.evidence import curves
from iternorm.experiments.jobs.findings import Claim, Comparison, Finding, Verdict
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.recipe import Recipe

HOME = "mnist"

# The paper does not say how many runs it shows. A verdict needs three seeds; those of batches of 2 take hours.
FULL_BATCH_SEEDS, SMALL_BATCH_SEEDS = 5, 3

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


# For each normalization, all seeds of one learning rate.
Best = dict[str, list[Result]]


def best_by_norm(results: Sequence[Result]) -> Best:
    """For each normalization all seeds of the learning rate with the least final training loss."""
    return {norm: min(rates.values(), key=_mean_loss) for norm, rates in _complete(results).items()}


def open_rates(results: Sequence[Result]) -> dict[str, list[float]]:
    """The learning rate of each normalization, and those that would be chosen if one of the seeds were left out.

    Rates at which a seed diverged are no choice, unless there is no other.
    """
    best, found = best_by_norm(results), {}
    for norm, rates in _complete(results).items():
        # By rate, the loss of each seed.
        losses = {lr: curves.seeds(runs, final_loss) for lr, runs in rates.items()}
        losses = {lr: values for lr, values in losses.items() if len(values) == len(rates[lr]) > 1}
        chosen = {best[norm][0].config["lr"]}
        for left_out in range(min(map(len, losses.values()), default=0)):
            chosen.add(min(losses, key=lambda lr: sum(losses[lr]) - losses[lr][left_out]))
        found[norm] = sorted(chosen)
    return found


def agreed(results: Sequence[Result], claims_of: Callable[[Best], list[Claim]]) -> list[Claim]:
    """Claims about the best learning rates; undecided where leaving out one seed changes a rate and the verdict."""
    claims = claims_of(best_by_norm(results))
    others = [claims_of(best) for best in _choices(results)]
    choices = "; ".join(f"{norm} {_listed(rates)}" for norm, rates in open_rates(results).items() if len(rates) > 1)
    found = []
    for index, claim in enumerate(claims):
        if any(other[index].finding != claim.finding for other in others):
            evidence = f"{claim.evidence} Leaving out one seed changes a learning rate and the verdict: {choices}."
            claim = replace(claim, finding=Finding(Verdict.UNDECIDED), evidence=evidence)
        found.append(claim)
    return found


def _choices(results: Sequence[Result]) -> Iterator[Best]:
    """Every combination of the open rates."""
    runs, rates = _complete(results), open_rates(results)
    for chosen in itertools.product(*rates.values()):
        yield {norm: runs[norm][rate] for norm, rate in zip(rates, chosen, strict=True)}


def _complete(results: Sequence[Result]) -> Mapping[str, dict[float, list[Result]]]:
    """Runs by normalization and learning rate, without the rates that have fewer seeds than others."""
    found: dict[str, dict[float, list[Result]]] = {}
    for (norm, lr), runs in curves.by(results, "norm", "lr").items():
        found.setdefault(norm, {})[lr] = runs
    for norm, rates in found.items():
        most = max(map(len, rates.values()))
        found[norm] = {lr: runs for lr, runs in rates.items() if len(runs) == most}
    return found


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _mean_loss(runs: Sequence[Result]) -> float:
    loss = curves.mean(runs, final_loss)
    return math.inf if loss is None else loss


def comparisons(results: Sequence[Result], norms: Sequence[str], where: str) -> list[Comparison]:
    """Our errors, which the paper shows as curves without numbers."""
    found = []
    best, rates = best_by_norm(results), open_rates(results)
    for norm in norms:
        runs = best.get(norm)
        note = ""
        if runs:
            lr = runs[0].config["lr"]
            note = f"learning rate {lr:g}"
            if others := [rate for rate in rates[norm] if rate != lr]:
                note += f" ({_listed(others)} if one seed is left out)"
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


def seeds(plan: Plan, *, batch_size: int | None = None) -> range:
    """The seeds to run; one in the small size."""
    usual = FULL_BATCH_SEEDS if batch_size is None else SMALL_BATCH_SEEDS
    return range(plan.seeds or (1 if plan.smoke else usual))
