"""Figure 8: training and test error of Wide ResNets on CIFAR-10 over the epochs, BN against IterNorm.

Reproduces: the paper's Figure 8: WRN-28-10 (a) and WRN-40-10 (b); batch 128, SGD with Nesterov momentum 0.9, weight
decay 5e-4, learning rate 0.1 divided by 5 after 60, 120 and 160 of 200 epochs, dropout 0.3; IterNorm with T=5, groups
of 64.
Claim: Wide ResNets with IterNorm train faster and generalize better than those with BN.
Command: iternorm run fig8 --device cuda && iternorm plot fig8
Cost: 7 hours on one H200 for 5 seeds: a run of WRN-28-10 takes 18 minutes with IterNorm and 16 with BN and --compile;
one of WRN-40-10 takes an estimated 25.
The paper got: curves; their last test errors are those of Table 1.
Departures: bf16 autocast and channels_last (the paper: fp32). Convolutions are initialized by He's rule, as in the code
of Zagoruyko and Komodakis, whose setup the paper names; the authors' published script leaves Torch's own
initialization. Scales of all norms start at 1, where Torch starts those of BN at random in [0, 1]. The momentum is kept
when the learning rate drops, after 60, 120 and 160 epochs as the paper says; the authors' script clears it, and drops
one epoch earlier. The networks with IterNorm have one norm more than those with BN, right after the first convolution:
so in that script, while the paper speaks of replacing all BN modules. Crops and flips are drawn for each image; that
script has one crop for a whole mini-batch, of which it flips half. From that script, where the paper is silent:
reflection-padded crops, the last mini-batch dropped. Of 160 channels groups of 64 leave a smaller last one, 64, 64 and
32, as in that script; the authors' later PyTorch code takes five groups of 32. The running averages for the test have a
momentum of 0.1. The training error is that of the batches as they were trained on, dropout and augmentation included;
the paper does not say.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import curves, outcomes
from iternorm.experiments.families import wrn_cifar
from iternorm.experiments.families.wrn_cifar import BN, ITERNORM, MODELS, NAMES, title
from iternorm.experiments.families.wrn_cifar import HOME as HOME
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.training.train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMS = (BN, ITERNORM)


def jobs(plan: Plan) -> list[Config]:
    """One job for each network, norm and seed."""
    return wrn_cifar.jobs(plan, NORMS)


def plot(results: Sequence[Result]) -> "Figure":
    """Training (solid) and test (dashed) error over the epochs, a panel for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for letter, axes, model in zip("ab", figure.subplots(1, 2), MODELS, strict=True):
        axes.set_title(f"({letter}) {title(model)}")
        runs = {norm: found for norm in NORMS if (found := outcomes.select(results, model, norm))}
        if runs:
            curves.draw(axes, runs, "epoch")
            curves.limit_errors(axes, [run for found in runs.values() for run in found])
            axes.set_ylabel(curves.BOTH_ERRORS)
            axes.legend(fontsize=8)
        curves.note_missing(axes, [norm for norm in NORMS if norm not in runs])
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The errors at the end of the curves, which the paper does not print here."""
    return [
        outcomes.compare(
            f"{title(model)}, {NAMES[norm]}, {column.removesuffix('_error')} error at the end",
            "",
            outcomes.select(results, model, norm),
            column,
        )
        for model in MODELS
        for norm in NORMS
        for column in ("train_error", "test_error")
    ]


def claims(results: Sequence[Result]) -> list[Claim]:
    """Faster training: a lower training error, averaged over the epochs. Better generalization: a lower test error."""
    average, final = partial(curves.mean_over_run, name="train_error"), partial(curves.final, name="test_error")
    names = (NAMES[ITERNORM], NAMES[BN])
    found = []
    for model in MODELS:
        runs = [outcomes.select(results, model, norm) for norm in (ITERNORM, BN)]
        for text, value in (
            ("trains faster with IterNorm than with BN (training error, mean over all epochs, %).", average),
            ("generalizes better with IterNorm than with BN (test error, %).", final),
        ):
            low, high = (outcomes.over_seeds(each, value) for each in runs)
            tested = outcomes.num_test(runs[0]) if value is final else None
            found.append(outcomes.claim_lower(f"{title(model)} {text}", names, (low, high), tested))
    return found


def contrasts(results: Sequence[Result]) -> list[Contrast]:
    """BN against IterNorm in both networks."""
    return [
        Contrast(
            title(model),
            f"{title(model)}, d=64",
            "CIFAR-10",
            outcomes.select(results, model, BN),
            outcomes.select(results, model, ITERNORM),
        )
        for model in MODELS
    ]
