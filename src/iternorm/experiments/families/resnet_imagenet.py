"""ResNets on ImageNet: what Tables 2 and 3 have in common, and on Imagenette."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from iternorm.experiments.data import datasets as data
from iternorm.experiments.evidence import outcomes, rule
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.recipe import Recipe
from iternorm.networks.norms import is_iterated

HOME = "imagenet"
# An improvement that the paper calls significant, in points: that of decorrelating the features.
_SIGNIFICANT = 0.48
BN, DBN_L1, ITERNORM_L1, ITERNORM_FULL, ITERNORM_DF = (
    *("BN", "DBN-16-L1", "IterNorm-L1", "IterNorm-Full"),
    "IterNorm-L1+DF",
)
# The paper's names.
NAMES = {
    BN: "Baseline (BN)",
    DBN_L1: "DBN-L1",
    ITERNORM_L1: "IterNorm-L1",
    ITERNORM_FULL: "IterNorm-Full",
    ITERNORM_DF: "IterNorm-L1 + DF",
}
COLUMNS = {"top-1": "test_error", "top-5": "test_error_top5"}

# Top-1 and top-5 errors of a network, by norm.
Numbers = Mapping[str, tuple[str, str]]


def recipe(model: str, norm: str, seed: int = 0) -> Recipe:
    """The paper's setting (Section 5.3)."""
    return Recipe(
        data="imagenet",
        model=model,
        norm=norm,
        batch_size=256,
        lr=0.1,
        epochs=100,
        seed=seed,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        milestones=(30, 60, 90),
        gamma=0.1,
        augment=True,
        precision="bf16",
        channels_last=True,
        image_size=224,
    )


def small(full: Recipe) -> Recipe:
    """The same networks at a sixteenth of the width, on few and small images."""
    size: dict[str, Any] = {"batch_size": 16, "lr": 0.01, "epochs": 2, "train_examples": 48, "test_examples": 32}
    name = full.data if data.available(full.data) else data.GENERATED + "imagenet"
    return replace(full, data=name, width=1 / 16, image_size=32, **size)


def jobs(
    plan: Plan,
    networks: Mapping[str, Sequence[str]],
    make: Callable[[str, str, int], Recipe] = recipe,
    seeds: int = 1,
) -> list[Config]:
    """One job for each seed, network and norm; the first seed of all of them comes first."""
    configs = []
    for seed in range(plan.seeds if plan.seeds is not None else 1 if plan.smoke else seeds):
        for model, norms in networks.items():
            for norm in norms:
                full = make(model, norm, seed)
                job = f"{model}-{norm.replace('+', '-')}-s{seed}"
                configs.append((small(full) if plan.smoke else full).to_config(job))
    return configs


def compare(results: Sequence[Result], model: str, paper: Numbers) -> list[Comparison]:
    """The rows of a network: top-1 and top-5 errors of each norm."""
    return [
        outcomes.compare(
            f"{title(model)}, {NAMES[norm]}, {place}", number, outcomes.select(results, model, norm), COLUMNS[place]
        )
        for norm, numbers in paper.items()
        for place, number in zip(COLUMNS, numbers, strict=True)
    ]


def draw(axes: Sequence[Any], results: Sequence[Result], model: str, paper: Numbers) -> None:
    """Two panels of a network, top-1 and top-5."""
    found = compare(results, model, paper)
    for index, (panel, place) in enumerate(zip(axes, COLUMNS, strict=True)):
        outcomes.draw_numbers(
            panel, dict(zip(map(NAMES.__getitem__, paper), found[index::2], strict=True)), list(paper)
        )
        panel.set_title(f"{title(model)}, ImageNet, {place}")


def claim_lower(results: Sequence[Result], model: str, norm: str, other: str, text: str) -> Claim:
    """The claim that one norm has a lower top-1 error than another."""
    low, high = (outcomes.finals(outcomes.select(results, model, each)) for each in (norm, other))
    text = f"{title(model)}: {text} (top-1, %)."
    return outcomes.claim_lower(text, (NAMES[norm], NAMES[other]), (low, high), outcomes.num_test(results))


def claims(results: Sequence[Result], model: str) -> list[Claim]:
    """What the paper concludes from Table 2."""

    def lower(norm: str, other: str, text: str) -> Claim:
        return claim_lower(results, model, norm, other, text)

    return [
        lower(DBN_L1, BN, "replacing the first BN by DBN lowers the error"),
        lower(ITERNORM_L1, BN, "replacing the first BN by IterNorm lowers the error"),
        lower(ITERNORM_L1, DBN_L1, "IterNorm in the first place is marginally better than DBN"),
        _claim_no_gain(results, model),
        lower(ITERNORM_DF, ITERNORM_L1, "decorrelating the features as well lowers the error significantly"),
    ]


def _claim_no_gain(results: Sequence[Result], model: str) -> Claim:
    text = f"{title(model)}: replacing every BN has no significant improvement over replacing the first (top-1, %)."
    full, first = (outcomes.finals(outcomes.select(results, model, norm)) for norm in (ITERNORM_FULL, ITERNORM_L1))
    num_test = outcomes.num_test(results)
    evidence = f"{NAMES[ITERNORM_FULL]} {full}, {NAMES[ITERNORM_L1]} {first}"
    evidence += outcomes.told_difference(full, first, num_test=num_test)
    evidence += f"; two errors have to be below {_SIGNIFICANT} points, which the paper calls significant"
    return Claim(text, rule.is_no_lower(full, first, visible=_SIGNIFICANT, num_test=num_test), evidence)


def contrasts(
    results: Sequence[Result], model: str, norms: Iterable[str], data_title: str = "ImageNet"
) -> list[Contrast]:
    """BN against those of the norms that are IterNorm's."""
    return [
        Contrast(
            f"{title(model)} on {data_title}",
            f"{title(model)}, {NAMES[norm]}",
            data_title,
            outcomes.select(results, model, BN),
            outcomes.select(results, model, norm),
        )
        for norm in norms
        if is_iterated(norm)
    ]


def title(model: str) -> str:
    """The network's usual name: ``ResNet-18``."""
    return model.replace("resnet", "ResNet")
