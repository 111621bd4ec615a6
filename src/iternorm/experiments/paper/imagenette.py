"""Imagenette: the comparison of Table 2, ResNet-18 by the places of IterNorm, on ten classes of ImageNet.

Reproduces: none of the paper's numbers. It is Table 2's comparison on images that a GPU trains on in minutes:
Imagenette, ten classes, cut to 128x128; batch 256, SGD with Nesterov momentum 0.9, weight decay 1e-4, learning rate
0.1 divided by 10 after 60, 120 and 180 of 200 epochs; T=5, groups of 64; three seeds.
Claim: what the paper concludes from Table 2, asked of these images.
Command: iternorm run imagenette --device cuda && iternorm plot imagenette
Cost: 15 runs, nine minutes in all on an H200 that four of them share.
The paper got: nothing on these images.
Departures: those of Table 2, and the images, their size and number, the epochs (twice the paper's, because one has so
few steps, which leave the networks short of convergence: see the training errors), three seeds. The images lie on the
device, where they are cut and coloured: random crops are taken from the middle square of a picture, kept at 224x224,
not from all of it. They are in imagenette/ in the folder of data sets, as train/CLASS/ and val/CLASS/. A result's file
says how many there were: of the 9,469 that are published for training, the results shown have the first 500 of each
class by name, 5,000 in all; of those for validation all 3,925.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import outcomes
from iternorm.experiments.families import resnet_imagenet
from iternorm.experiments.families.resnet_imagenet import BN, DBN_L1, ITERNORM_DF, ITERNORM_FULL, ITERNORM_L1, NAMES
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.train import run as run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "resnet-18"
NORMS = (BN, DBN_L1, ITERNORM_L1, ITERNORM_FULL, ITERNORM_DF)
SEEDS = 3


def recipe(model: str, norm: str, seed: int = 0) -> Recipe:
    """Table 2's setting on smaller images, for twice the epochs."""
    return replace(
        resnet_imagenet.recipe(model, norm, seed),
        data="imagenette",
        epochs=200,
        milestones=(60, 120, 180),
        image_size=128,
        eval_every=5,
        kept_on_device=True,
    )


def jobs(plan: Plan) -> list[Config]:
    """One job for each variant and seed."""
    return resnet_imagenet.jobs(plan, {MODEL: NORMS}, recipe, SEEDS)


def plot(results: Sequence[Result]) -> "Figure":
    """The errors of the variants, mean and deviation over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    found = {NAMES[norm]: _compare(results, norm, "test") for norm in NORMS}
    outcomes.draw_numbers(axes, found, NORMS)
    axes.set_title(f"{resnet_imagenet.title(MODEL)}, Imagenette")
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The errors of the variants; ten classes have no top-5 error worth a row."""
    return [_compare(results, norm, split) for split in ("test", "train") for norm in NORMS]


def _compare(results: Sequence[Result], norm: str, split: str) -> Comparison:
    what = f"{resnet_imagenet.title(MODEL)}, {NAMES[norm]}, {split} error"
    return outcomes.compare(what, "", outcomes.select(results, MODEL, norm), f"{split}_error")


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper concludes from Table 2, on these images."""
    return resnet_imagenet.claims(results, MODEL)


def contrasts(results: Sequence[Result]) -> list[Contrast]:
    """BN against IterNorm. Most folders have a part of the training images, so their number is told."""
    counts = {result.data_count("train_images") for result in results}
    (count,) = counts if len(counts) == 1 else (None,)
    data = f"Imagenette, {count:,} images" if count else "Imagenette"
    return resnet_imagenet.contrasts(results, MODEL, NORMS, data)
