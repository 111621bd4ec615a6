"""Table 3: validation error of ResNet-50 and ResNet-101 on ImageNet with BN, IterNorm-L1 and IterNorm-L1 + DF.

Reproduces: the paper's Table 3: single crop; the setting is that of Table 2.
Claim: IterNorm in place of the first BN lowers the error of both networks, and decorrelating the features lowers it
further.
Command: iternorm run table3 --device cuda && iternorm plot table3
Cost: estimated, not measured: 15 hours a run of ResNet-50 and 22 of ResNet-101, 110 hours in all, on one H200 with 16
cores.
The paper got: top-1 / top-5, in %: ResNet-50 baseline (BN) 23.95 / 7.02, IterNorm-L1 23.28 / 6.72, IterNorm-L1 + DF
22.91 / 6.47; ResNet-101 22.45 / 6.29, 21.95 / 5.99, 21.77 / 5.94; He et al. report 24.70 / 7.80 and 23.60 / 7.10 with
BN.
Departures: those of Table 2. A bottleneck has its stride in the 3x3 convolution, as in Torch's and torchvision's
networks; He et al. have it in the first 1x1. The paper trains on 4 GPUs, each of which normalizes its own 64 images; we
train on one, which normalizes all 256 together, unless started by torchrun on 4.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import outcomes
from iternorm.experiments.families import resnet_imagenet
from iternorm.experiments.families.resnet_imagenet import BN, ITERNORM_DF, ITERNORM_L1
from iternorm.experiments.families.resnet_imagenet import HOME as HOME
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.training.train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {
    "resnet-50": {BN: ("23.95", "7.02"), ITERNORM_L1: ("23.28", "6.72"), ITERNORM_DF: ("22.91", "6.47")},
    "resnet-101": {BN: ("22.45", "6.29"), ITERNORM_L1: ("21.95", "5.99"), ITERNORM_DF: ("21.77", "5.94")},
}


def jobs(plan: Plan) -> list[Config]:
    """One job for each network, variant and seed; the paper has one seed."""
    return resnet_imagenet.jobs(plan, {model: tuple(numbers) for model, numbers in PAPER.items()})


def plot(results: Sequence[Result]) -> "Figure":
    """The paper's numbers and ours: a line for each network, top-1 and top-5."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(2, 2)
    for line, (model, numbers) in zip(panels, PAPER.items(), strict=True):
        resnet_imagenet.draw(line, results, model, numbers)
    outcomes.label_numbers(figure)
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The table."""
    return [row for model, numbers in PAPER.items() for row in resnet_imagenet.compare(results, model, numbers)]


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper concludes from the table."""
    found = []
    for model in PAPER:
        text = "replacing the first BN by IterNorm lowers the error"
        found.append(resnet_imagenet.claim_lower(results, model, ITERNORM_L1, BN, text))
        text = "decorrelating the features as well lowers the error further"
        found.append(resnet_imagenet.claim_lower(results, model, ITERNORM_DF, ITERNORM_L1, text))
    return found


def contrasts(results: Sequence[Result]) -> list[Contrast]:
    """BN against IterNorm."""
    return [each for model, norms in PAPER.items() for each in resnet_imagenet.contrasts(results, model, norms)]
