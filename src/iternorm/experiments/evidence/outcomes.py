"""What tables of final errors are made of: the paper's number beside ours, over seeds, and whether one is lower."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iternorm.experiments.evidence import curves, rule
from iternorm.experiments.evidence.rule import Seeds
from iternorm.experiments.jobs.findings import Claim, Comparison, Finding
from iternorm.experiments.jobs.results import Result
from iternorm.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Test examples of the data sets, where a result does not say.
_TEST_SETS = {"mnist": 10_000, "cifar10": 10_000, "imagenet": 50_000}


def select(results: Sequence[Result], model: str, norm: str) -> list[Result]:
    """The results of a network with a norm."""
    return curves.by(results, "model", "norm").get((model, norm), [])


def over_seeds(results: Sequence[Result], value: Callable[[Result], float]) -> Seeds:
    """A number of each of the results, which differ in their seeds.

    Raises:
        ValueError: Two have the same seed, so they differ in something else, and are not repeats of one training.
    """
    first: dict[Any, Result] = {}
    for result in results:
        other = first.setdefault(result.config.get("seed", 0), result)
        if other is not result:
            jobs = f"{other.config['job']} and {result.config['job']}"
            raise ValueError(f"results holds two runs of one seed, {jobs}: give the runs of one setting")
    return Seeds(curves.seeds(results, value), sum(map(curves.diverged, results)))


def finals(results: Sequence[Result], column: str = "test_error") -> Seeds:
    """A column of the last rows."""
    return over_seeds(results, partial(curves.final, name=column))


def compare(what: str, paper: str, results: Sequence[Result], column: str = "test_error") -> Comparison:
    """The paper's number beside a column of our last rows, in percent."""
    found = finals(results, column)
    return Comparison(what, paper, found.values, note=curves.divergence_note(results), num_diverged=found.num_diverged)


def num_test(results: Sequence[Result]) -> int | None:
    """The number of test examples behind the errors of some results; None if it is not known."""
    for result in results:
        config = result.config
        known = (config.get("test_examples"), result.data_count("test_images"))
        return next(filter(None, known), None) or _TEST_SETS.get(config.get("data", ""))
    return None


def claim_lower(text: str, names: tuple[str, str], seeds: tuple[Seeds, Seeds], num_test: int | None = None) -> Claim:
    """The claim that the first is lower than the second, decided by `rule.is_lower`.

    Args:
        text: The claim.
        names: Of the two.
        seeds: Their numbers.
        num_test: Where they are test errors, the number of test examples.
    """
    evidence = ", ".join(f"{name} {each}" for name, each in zip(names, seeds, strict=True))
    return Claim(text, rule.is_lower(*seeds, num_test=num_test), evidence + told_difference(*seeds, num_test=num_test))


def told_difference(low: Seeds, high: Seeds, *, num_test: int | None = None) -> str:
    """How far the first is below the second, in words; empty where one has no numbers.

    Example:
        >>> told_difference(Seeds((3.0, 3.2)), Seeds((3.5, 3.7)))
        ': lower by 0.50 ± 0.14 (standard error)'
    """
    if not low.values or not high.values:
        return ""
    found = rule.difference(low, high, num_test)
    text = f": {'lower' if found.value >= 0 else 'higher'} by {abs(found.value):.2f}"
    if found.error is not None:
        of = "of the test set" if found.num_seeds == 1 else "standard error"
        text += f" ± {found.error:.2f} ({of})"
    return text


def extremes_are_worse(values: Sequence[Seeds], num_test: int | None = None) -> Finding:
    """Whether the first and the last of some errors are above all between them."""
    first, *middle, last = values
    return rule.all_of(rule.is_lower(each, end, num_test=num_test) for end in (first, last) for each in middle)


def last_is_much_worse(values: Sequence[Seeds], num_test: int | None = None) -> Finding:
    """Whether the last of some errors is above all but the first, by a tenth of theirs and more than the errors."""
    _, *middle, last = values
    return rule.all_of(
        rule.is_lower(each, last, margin=0.1 * each.mean if each.values else 0.0, num_test=num_test) for each in middle
    )


def told(values: Mapping[str, Seeds], form: str = ".2f") -> str:
    """Names and numbers of what was run; the number of seeds is given once if it is the same for all.

    Example:
        >>> told({"BN": Seeds((7.3,)), "DBN": Seeds((7.2,)), "IterNorm": Seeds(())})
        'BN 7.30, DBN 7.20 (one seed each)'
    """
    found = {name: seeds for name, seeds in values.items() if seeds != Seeds(())}
    alike = len(found) > 1 and len({(len(seeds.values), seeds.num_diverged) for seeds in found.values()}) == 1
    texts = {name: format(seeds, form) for name, seeds in found.items()}
    ends = {text[text.rfind(" (") :] for text in texts.values()}
    if alike and len(ends) == 1 and (end := ends.pop()).endswith(")"):
        return ", ".join(f"{name} {text.removesuffix(end)}" for name, text in texts.items()) + f"{end[:-1]} each)"
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "not run"


def draw_numbers(axes: "Axes", rows: Mapping[str, Comparison], norms: Sequence[str]) -> None:
    """The paper's numbers and ours, a line for each name: marks on a scale, and the figures in words.

    Args:
        axes: Where to draw.
        rows: The numbers by what they are of.
        norms: The norm of each row, whose colour ours has.
    """
    colors = palette.colors_of(norms, named=True)
    heights = range(len(rows))
    style: dict[str, Any] = {"markersize": 5, "capsize": 3}
    for height, row, norm in zip(heights, rows.values(), norms, strict=True):
        if found := re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?", row.paper):
            error = float(found[2]) if found[2] else None
            axes.errorbar(
                float(found[1]),
                height - 0.15,
                xerr=error,
                fmt="D",
                color=palette.PAPER,
                markerfacecolor="white",
                **style,
            )
        if row.ours:
            error = statistics.stdev(row.ours) if len(row.ours) > 1 else None
            axes.errorbar(statistics.fmean(row.ours), height + 0.15, xerr=error, fmt="o", color=colors[norm], **style)
        # The note of a run that diverged says more than that there is no number.
        ours = str(Seeds(row.ours)) if not row.note else f"{Seeds(row.ours)}, {row.note}" if row.ours else row.note
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
        paper = f" paper {row.paper}\n" if row.paper else ""
        axes.text(1.0, height, f"{paper} ours {ours}", **place)
    axes.set_yticks(heights, list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel("test error (%)")


def label_numbers(figure: "Figure") -> None:
    """A legend for `draw_numbers`, below the panels: numbers and their errors may lie anywhere inside."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": "", "markersize": 5}
    paper = Line2D([], [], marker="D", color=palette.PAPER, markerfacecolor="white", label="the paper", **style)
    ours = Line2D([], [], marker="o", color=palette.OURS, label="ours, in the norm's colour", **style)
    figure.legend(handles=[paper, ours], fontsize=8, loc="outside lower center", ncols=2)
