"""Does whitening pay? BN against IterNorm in every network that was trained with both, in one short table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from iternorm.experiments.evidence import outcomes, rule
from iternorm.experiments.evidence.blocks import Cell, Verdicts
from iternorm.experiments.evidence.rule import Seeds
from iternorm.experiments.jobs.findings import Contrast, Verdict

_COLUMNS = ("network", "data", "BN", "IterNorm", "BN minus IterNorm", "n", "lower with IterNorm")


class Row(NamedTuple):
    """One network with both."""

    network: str
    data: str
    bn: Seeds
    iternorm: Seeds
    num_test: int | None


def rows(contrasts: Iterable[Contrast]) -> tuple[list[Row], list[str]]:
    """The networks that were trained with both, and the names of those that were not."""
    found, missing, shown = [], [], set()
    for contrast in contrasts:
        if contrast.bn and contrast.iternorm:
            shown.add(contrast.name)
            errors = outcomes.finals(contrast.bn), outcomes.finals(contrast.iternorm)
            found.append(Row(contrast.network, contrast.data, *errors, outcomes.num_test(contrast.bn)))
        else:
            missing.append(contrast.name)
    return found, [name for name in dict.fromkeys(missing) if name not in shown]


def cells(found: Sequence[Row]) -> tuple[tuple[str, ...], tuple[tuple[Cell, ...], ...]]:
    """The columns and rows of the table."""
    return _COLUMNS, tuple(_cells(row) for row in found)


def _cells(row: Row) -> tuple[Cell, ...]:
    finding = rule.is_lower(row.iternorm, row.bn, num_test=row.num_test)
    numbers = [_mean(seeds) for seeds in (row.bn, row.iternorm)]
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


def _mean(seeds: Seeds) -> str:
    if not seeds.values:
        return "diverged"
    return f"{seeds.mean:.2f}" + (f" ({seeds.num_diverged} diverged)" if seeds.num_diverged else "")


def markdown(found: Sequence[Row]) -> str:
    """The table for the README."""
    columns, table = cells(found)
    lines = [columns, ("---", "---", *["---:"] * 4, "---"), *table]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
