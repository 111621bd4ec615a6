"""Imagenette: the comparison of Table 2, ResNet-18 by the places of IterNorm, on ten classes of ImageNet.

Reproduces: none of the paper's numbers. It is Table 2's comparison on images that a GPU trains on in minutes:
Imagenette, ten classes, cut to 128x128; batch 256, SGD with Nesterov momentum 0.9, weight decay 1e-4, learning rate
0.1 divided by 10 after 60, 120 and 180 of 200 epochs; T=5, groups of 64; three seeds.
Claim: what the paper concludes from Table 2, asked of these images.
Command: iternorm run imagenette --data FOLDER --device cuda && iternorm plot imagenette
Cost: estimated, not measured: 15 runs of about a minute on an H200.
The paper got: nothing on these images.
Departures: those of Table 2, and the images, their size and number, the epochs (twice the paper's, because one has so
few steps), three seeds. The images lie on the device, where they are cut and coloured. FOLDER/imagenette has train/ and
val/ with a folder for each class; a result's file says how many images they had.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from iternorm.experiments.evidence import outcomes
from iternorm.experiments.families import resnet_imagenet
from iternorm.experiments.families.resnet_imagenet import BN, DBN_L1, ITERNORM_DF, ITERNORM_FULL, ITERNORM_L1, NAMES
from iternorm.experiments.jobs.findings import Claim, Comparison
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
    """The errors of the variants, and their curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    found = {NAMES[norm]: row for norm, row in zip(NORMS, compare(results), strict=True)}
    outcomes.draw_numbers(axes, found)
    axes.set_title(f"{resnet_imagenet.title(MODEL)}, Imagenette")
    return figure


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The errors of the variants; ten classes have no top-5 error worth a row."""
    return [
        outcomes.compare(f"{resnet_imagenet.title(MODEL)}, {NAMES[norm]}", "", outcomes.select(results, MODEL, norm))
        for norm in NORMS
    ]


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper concludes from Table 2, on these images."""
    return resnet_imagenet.claims(results, MODEL)
