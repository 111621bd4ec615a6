"""Wide ResNets on CIFAR-10: what Figure 8 and Table 1 have in common. They share their runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from iternorm.experiments.data import datasets as data
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config
from iternorm.experiments.recipe import Recipe

HOME = "wrn"
MODELS = ("wrn-28-10", "wrn-40-10")
BN, DBN, ITERNORM = "BN", "DBN-16", "IterNorm T=5 d=64"
# The paper's names.
NAMES = {BN: "BN", DBN: "DBN", ITERNORM: "IterNorm"}
# The authors' scripts have 1e-5 for all of them; for DBN 1e-3 is known to work.
EPS = {DBN: 1e-3}
SEEDS = 5


def recipe(model: str, norm: str, seed: int = 0) -> Recipe:
    """The paper's setting, which is that of Zagoruyko and Komodakis."""
    return Recipe(
        data="cifar10",
        model=model,
        norm=norm,
        batch_size=128,
        lr=0.1,
        epochs=200,
        seed=seed,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
        milestones=(60, 120, 160),
        gamma=0.2,
        norm_eps=EPS.get(norm, 1e-5),
        dropout=0.3,
        augment=True,
        precision="bf16",
        channels_last=True,
    )


def small(full: Recipe) -> Recipe:
    """The same networks at a tenth of the width, on few examples, in fp32.

    On a CPU that does not compute in bf16 its convolutions take ten times as long; ImageNet's small size has bf16.
    """
    size: dict[str, Any] = {
        "batch_size": 16,
        "lr": 0.01,
        "epochs": 2,
        "train_examples": 48,
        "test_examples": 32,
        "width": 0.1,
        "precision": "fp32",
    }
    return replace(full, data=data.real_or_generated(full.data), **size)


def jobs(plan: Plan, norms: Sequence[str]) -> list[Config]:
    """One job for each seed, network and norm; the first seed of all of them comes first."""
    seeds = plan.seeds if plan.seeds is not None else (1 if plan.smoke else SEEDS)
    configs = []
    for seed in range(seeds):
        for model in MODELS:
            for norm in norms:
                full = recipe(model, norm, seed)
                job = f"{model}-{norm.replace(' ', '-')}-s{seed}"
                configs.append((small(full) if plan.smoke else full).to_config(job))
    return configs


def title(model: str) -> str:
    """The paper's name of a network: ``WRN-28-10``."""
    return model.upper()
