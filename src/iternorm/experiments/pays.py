"""Does whitening pay? BN against IterNorm in every network that was trained with both, in one short table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import outcomes, resnet_imagenet, rule, vgg_cifar
from .findings import Verdict
from .report_blocks import Cell, Verdicts
from .results import Result
from .rule import Seeds

_COLUMNS = ("network", "data", "BN", "IterNorm", "BN minus IterNorm", "n", "lower with IterNorm")


class Row(NamedTuple):
    """One network with both."""

    network: str
    data: str
    bn: Seeds
    iternorm: Seeds
    num_test: int | None


def rows(finished: Mapping[str, Sequence[Result]]) -> tuple[list[Row], list[str]]:
    """The networks that were trained with both, and the names of those that were not.

    Args:
        finished: Results by the id of an experiment.
    """
    found, missing, shown = [], [], set()
    for short, network, data, experiment, chosen in _comparisons():
        results = finished.get(experiment, ())
        bn, iternorm = (
            [result for result in results if all(_value(result, name) == value for name, value in each.items())]
            for each in chosen
        )
        if bn and iternorm:
            shown.add(short)
            num_test = outcomes.num_test(bn)
            found.append(Row(network, data, outcomes.finals(bn), outcomes.finals(iternorm), num_test))
        else:
            missing.append(short)
    return found, [name for name in dict.fromkeys(missing) if name not in shown]


def _value(result: Result, name: str) -> object:
    return vgg_cifar.setting_of(result) if name == "setting" else result.config.get(name)


def _comparisons() -> list[tuple[str, str, str, str, tuple[dict[str, str], dict[str, str]]]]:
    """A short name, the network's, the data's, the experiment, and what BN's and IterNorm's runs have in common."""
    found = []
    for setting, (title, _, _) in vgg_cifar.SETTINGS.items():
        wanted = {"setting": setting}
        for norm, groups in (("IterNorm T=5", "all channels"), ("IterNorm T=5 d=64", "d=64")):
            if norm == "IterNorm T=5" or setting == "basic":
                pair = {**wanted, "norm": "BN"}, {**wanted, "norm": norm}
                found.append((f"VGG, {title}", f"VGG, {title}, {groups}", "CIFAR-10", "fig6", pair))
    for model in ("wrn-28-10", "wrn-40-10"):
        pair = {"model": model, "norm": "BN"}, {"model": model, "norm": "IterNorm T=5 d=64"}
        found.append((model.upper(), f"{model.upper()}, d=64", "CIFAR-10", "fig8", pair))
    for experiment, data, models in (
        ("imagenette", "Imagenette", ("resnet-18",)),
        ("table2", "ImageNet", ("resnet-18",)),
        ("table3", "ImageNet", ("resnet-50", "resnet-101")),
    ):
        for model in models:
            for norm in (resnet_imagenet.ITERNORM_L1, resnet_imagenet.ITERNORM_DF):
                pair = {"model": model, "norm": "BN"}, {"model": model, "norm": norm}
                name = f"{resnet_imagenet.title(model)}, {resnet_imagenet.NAMES[norm]}"
                found.append((f"{resnet_imagenet.title(model)} on {data}", name, data, experiment, pair))
    return found


def cells(found: Sequence[Row]) -> tuple[tuple[str, ...], tuple[tuple[Cell, ...], ...]]:
    """The columns and rows of the table."""
    return _COLUMNS, tuple(_cells(row) for row in found)


def _cells(row: Row) -> tuple[Cell, ...]:
    finding = rule.is_lower(row.iternorm, row.bn, num_test=row.num_test)
    numbers = [f"{seeds.mean:.2f}" if seeds.values else "diverged" for seeds in (row.bn, row.iternorm)]
    change, count = "–", "–"
    if row.bn.values and row.iternorm.values:
        difference = rule.difference(row.iternorm, row.bn, row.num_test)
        change = f"{difference.value:+.2f}" + ("" if difference.error is None else f" ± {difference.error:.2f}")
        counts = [str(len(seeds.values)) for seeds in (row.bn, row.iternorm)]
        count = counts[0] if counts[0] == counts[1] else " and ".join(counts)
    words = {Verdict.HOLDS: "yes", Verdict.FAILS: "no, higher"}
    said = words.get(finding.verdict, str(finding).replace("points to it", "points to yes"))
    said = said.replace("points against it", "points to no")
    return row.network, row.data, *numbers, change, count, Verdicts(((finding.verdict, said),))


def markdown(found: Sequence[Row]) -> str:
    """The table for the README."""
    columns, table = cells(found)
    lines = [columns, ("---", "---", *["---:"] * 4, "---"), *table]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
