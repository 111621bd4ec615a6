"""Table 2: validation error of ResNet-18 on ImageNet, by the places where IterNorm replaces BN.

Reproduces: the paper's Table 2: single crop; batch 256, SGD with Nesterov momentum 0.9, weight decay 1e-4, learning
rate 0.1 divided by 10 after 30, 60 and 90 of 100 epochs; T=5, groups of 64. L1 is the first norm only, Full every norm,
DF one more norm before the last linear layer.
Claim: replacing the first BN by DBN or IterNorm lowers the error, IterNorm marginally more than DBN; replacing all has
no significant improvement over that; decorrelating the features as well lowers the error significantly.
Command: iternorm run table2 --device cuda && iternorm plot table2
Cost: estimated, not measured: 15 hours a run, 75 hours for one seed of each, on one H200 with 16 cores, which decoding
JPEG files bounds. One seed cannot show differences as small as the paper's: a verdict takes --seeds 3.
The paper got: top-1 / top-5, in %: baseline (BN) 29.76 / 10.39, DBN-L1 29.50 / 10.26, IterNorm-L1 29.34 / 10.22,
IterNorm-Full 29.30 / 10.21, IterNorm-L1 + DF 28.86 / 10.08; quoted with 90 epochs: BN 30.43 / 10.76, DBN-L1 29.87 /
10.36.
Departures: bf16 autocast and channels_last (the paper: fp32). IterNorm-Full replaces the norms of the shortcuts too;
its script was not published. Images are scaled by Pillow's bicubic filter, which smooths; the authors' does not. The
last mini-batch of an epoch, which is smaller, is dropped; the authors' scripts keep it. From these scripts, where the
paper is silent: random sized crops, flips, colour jitter of 0.4 and lighting noise, Nesterov momentum, He's
initialization by fan-out, scale and shift in the norm before the linear layer. The running averages for the validation
have a momentum of 0.1. DBN has groups of 16 and eps 1e-5; on a GPU its matrices come from Newton's iteration run to
convergence, not from an eigendecomposition. The error is that of the last epoch; the paper does not say which epoch's
it prints, and the authors' script ends by printing the best. "Significantly" is read as by more than two standard
errors. DBN before the linear layer, with which the paper's eigendecompositions did not converge, is not run. That DF
introduces negligible cost, as the paper says, is not timed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import outcomes
from iternorm.experiments.families import resnet_imagenet
from iternorm.experiments.families.resnet_imagenet import BN, DBN_L1, ITERNORM_DF, ITERNORM_FULL, ITERNORM_L1
from iternorm.experiments.families.resnet_imagenet import HOME as HOME
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.training.train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "resnet-18"
PAPER = {
    BN: ("29.76", "10.39"),
    DBN_L1: ("29.50", "10.26"),
    ITERNORM_L1: ("29.34", "10.22"),
    ITERNORM_FULL: ("29.30", "10.21"),
    ITERNORM_DF: ("28.86", "10.08"),
}


def jobs(plan: Plan) -> list[Config]:
    """One job for each variant and seed; the paper has one seed."""
    return resnet_imagenet.jobs(plan, {MODEL: tuple(PAPER)})


def plot(results: Sequence[Result]) -> "Figure":
    """The paper's numbers and ours: top-1 and top-5."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    resnet_imagenet.draw(panels, results, MODEL, PAPER)
    outcomes.label_numbers(figure)
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The table."""
    return resnet_imagenet.compare(results, MODEL, PAPER)


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper concludes from the table."""
    return resnet_imagenet.claims(results, MODEL)


def contrasts(results: Sequence[Result]) -> list[Contrast]:
    """BN against IterNorm."""
    return resnet_imagenet.contrasts(results, MODEL, PAPER)
