"""Figure 8: training and test error of Wide ResNets on CIFAR-10 over the epochs, BN against IterNorm.

Reproduces: the paper's Figure 8: WRN-28-10 (a) and WRN-40-10 (b); batch 128, SGD with Nesterov momentum 0.9, weight
decay 5e-4, learning rate 0.1 divided by 5 after 60, 120 and 160 of 200 epochs, dropout 0.3; IterNorm with T=5, groups
of 64.
Claim: Wide ResNets with IterNorm train faster and generalize better than those with BN.
Command: iternorm run fig8 --device cuda && iternorm plot fig8
Cost: estimated, not measured: 9 hours on one H200 for 5 seeds (a run of WRN-28-10 about 20 minutes with BN and 25 with
IterNorm, of WRN-40-10 about 30 and 38).
The paper got: curves; their last test errors are those of Table 1.
Departures: bf16 autocast and channels_last (the paper: fp32). Convolutions are initialized by He's rule, as in the code
of Zagoruyko and Komodakis, whose setup the paper names; the authors' published script leaves Torch's own
initialization. Scales of all norms start at 1, where Torch starts those of BN at random in [0, 1]. The momentum is kept
when the learning rate drops; the authors' script clears it. From that script, where the paper is silent: one more
IterNorm right after the first convolution, reflection-padded crops, the last mini-batch dropped. The training error is
that of the batches as they were trained on, dropout and augmentation included; the paper does not say.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import outcomes, wrn_cifar
from .findings import Claim, Comparison
from .registry import Context, Plan
from .results import Config, Result, Row
from .wrn_cifar import BN, HOME, ITERNORM, MODELS, NAMES, STYLES, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HOME", "claims", "compare", "jobs", "plot", "run"]

NORMS = (BN, ITERNORM)


def jobs(plan: Plan) -> list[Config]:
    """One job for each network, norm and seed."""
    return wrn_cifar.jobs(plan, NORMS)


def run(config: Config, context: Context) -> list[Row]:
    """One row for each epoch."""
    return wrn_cifar.run(config, context)


def plot(results: Sequence[Result]) -> "Figure":
    """A panel for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for letter, axes, model in zip("ab", figure.subplots(1, 2), MODELS, strict=True):
        groups = {NAMES[norm]: outcomes.select(results, model=model, norm=norm) for norm in NORMS}
        axes.set_title(f"({letter}) {title(model)}")
        outcomes.draw_errors(axes, groups, STYLES)
        if any(groups.values()):
            axes.legend(fontsize=8)
        else:
            axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center")
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The errors at the end of the curves, which the paper does not print here."""
    return [
        outcomes.comparison(
            f"{title(model)}, {NAMES[norm]}, {column.removesuffix('_error')} error at the end",
            "",
            outcomes.finals(results, column, model=model, norm=norm),
        )
        for model in MODELS
        for norm in NORMS
        for column in ("train_error", "test_error")
    ]


def claims(results: Sequence[Result]) -> list[Claim]:
    """Faster training: a lower training error, averaged over the epochs. Better generalization: a lower test error."""
    found = []
    names = (NAMES[ITERNORM], NAMES[BN])
    for model in MODELS:
        both = [{"model": model, "norm": norm} for norm in (ITERNORM, BN)]
        first, second = (outcomes.averages(results, "train_error", **each) for each in both)
        text = f"{title(model)} trains faster with IterNorm than with BN (training error, mean over all epochs, %)"
        found.append(outcomes.claim_lower(text, names, (first, second)))
        first, second = (outcomes.finals(results, **each) for each in both)
        text = f"{title(model)} generalizes better with IterNorm than with BN (test error, %)"
        found.append(outcomes.claim_lower(text, names, (first, second)))
    return found
