"""A study of my own: does whitening pay in a small network on handwritten digits?

Claim: IterNorm has a lower test error than BatchNorm and than GroupNorm.
Command: iternorm run examples/study.py && iternorm report examples/study.py --out .
Cost: 12 runs of a second or two on two CPU cores.

Runs that are finished are skipped, killed ones go on from their checkpoints, `--seeds 5` adds seeds, `--only IterNorm`
takes a part; `--device cuda`, `--ray` and torchrun work as for the paper's figures. It needs `iternorm[experiments]`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from iternorm import IterNorm2d
from iternorm.experiments.data import datasets
from iternorm.experiments.study import (
    Claim,
    Comparison,
    Config,
    Context,
    Plan,
    Recipe,
    Result,
    Row,
    Source,
    TensorSource,
    by,
    claim_lower,
    compare_errors,
    finals,
    train,
)

# A name of a recipe, and what it stands for: anything that makes a layer from its number of channels.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(),
    "BatchNorm": nn.BatchNorm2d,
    "GroupNorm": partial(nn.GroupNorm, 4),
    "IterNorm": partial(IterNorm2d, group_size=16),
}


def network(recipe: Recipe, source: Source) -> nn.Module:
    """My network."""
    norm = NORMS[recipe.norm]
    channels, _, _ = source.in_shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), norm(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), norm(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), norm(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, source.num_classes)),
    )


def source(recipe: Recipe, device: str, *, rank: int, world_size: int) -> Source:
    """My data: any tensors of images and labels. Batches, order and augmentation are the recipe's."""
    train, test = datasets.load("digits", "train"), datasets.load("digits", "test")
    return TensorSource(recipe, device, train, test, rank=rank, world_size=world_size)


def jobs(plan: Plan) -> list[Config]:
    """A training for each seed and norm."""
    epochs = 2 if plan.smoke else 12
    return [
        Recipe("digits", "small", norm, batch_size=64, lr=0.1, epochs=epochs, seed=seed, momentum=0.9).to_config(
            f"{norm}-s{seed}" + ("-smoke" if plan.smoke else "")
        )
        for seed in range(plan.seeds or 3)
        for norm in NORMS
    ]


def run(config: Config, context: Context) -> list[Row]:
    """One of them."""
    return train(Recipe.from_config(config), context, network=network, source=source)


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The errors at the end."""
    runs = by(results, "norm")
    return [compare_errors(f"{norm}, test error", "", runs.get(norm, [])) for norm in NORMS]


def claims(results: Sequence[Result]) -> list[Claim]:
    """Three seeds and two standard errors decide; see `iternorm.experiments.evidence.rule`."""
    runs = by(results, "norm")
    num_test = len(datasets.load("digits", "test").labels)
    return [
        claim_lower(
            f"IterNorm has a lower test error than {other} (%)",
            ("IterNorm", other),
            (finals(runs.get("IterNorm", [])), finals(runs.get(other, []))),
            num_test,
        )
        for other in ("BatchNorm", "GroupNorm")
    ]
