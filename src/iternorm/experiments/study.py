"""What an experiment of your own is made of. `examples/study.py` is one; docs/using.md says how it is run.

A study is a Python file with a function `jobs`, which gives configurations, and a function `run`, which trains one of
them. It may have `plot`, `compare` and `claims`: `iternorm.experiments.jobs.registry` says what each takes and returns.

A configuration is a mapping of plain values. ``job`` is its name, of letters, digits and ``_ . = -``; ``norm`` and
``seed`` are what the functions below tell runs apart by. ``plan.smoke`` asks for a size of seconds, with configurations
of its own, and ``plan.seeds`` for a number of seeds: options that `jobs` does not look at have no effect.

A row is a mapping of plain values too, one for each epoch or one for the whole run. ``epoch``, ``train_error`` and
``test_error`` (in percent) are what the default figure, `finals` and `compare_errors` read. None stands for what was
not measured or is not finite. A run that diverged has ``"diverged": True`` in its last row: without that, its last
finite value counts.

A `run` that has a loop of its own, in place of `train`, calls ``context.step(done, total, loss=...)`` as it proceeds,
and goes on from what it kept in ``context.folder``.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from iternorm.experiments.data.inputs import import_file
from iternorm.experiments.data.sources import Source, TensorSource, open_source
from iternorm.experiments.evidence import curves
from iternorm.experiments.evidence.outcomes import claim_lower, finals, over_seeds
from iternorm.experiments.evidence.outcomes import compare as compare_errors
from iternorm.experiments.evidence.rule import Seeds, all_of, is_above, is_below, is_lower, is_no_lower, over_parts
from iternorm.experiments.jobs import mistakes, registry
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast, Finding, Verdict, measured
from iternorm.experiments.jobs.registry import Context, Experiment, Plan
from iternorm.experiments.jobs.results import Config, Result, Row
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.train import train
from iternorm.networks.norms import make_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Claim",
    "Comparison",
    "Config",
    "Context",
    "Contrast",
    "Finding",
    "Plan",
    "Recipe",
    "Result",
    "Row",
    "Seeds",
    "Source",
    "TensorSource",
    "Verdict",
    "all_of",
    "by",
    "claim_lower",
    "compare_errors",
    "finals",
    "is_above",
    "is_below",
    "is_lower",
    "is_no_lower",
    "make_norm",
    "measured",
    "open_source",
    "over_parts",
    "over_seeds",
    "plot_errors",
    "train",
]

by = curves.by
# The fields of a row that `plot_errors` draws.
_ERRORS = ("train_error", "test_error")


def plot_errors(results: Sequence[Result]) -> "Figure":
    """Training (solid) and test (dashed) error over epochs, a curve for each norm: what a study without `plot` shows.

    Runs that differ in more than their seeds and norms are told apart by their jobs' names. Rows without ``epoch`` are
    numbered.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    rows = [row for result in results for row in result.rows]
    if not any(row.get(field) is not None for row in rows for field in _ERRORS):
        axes.text(0.5, 0.5, f"no row has {' or '.join(_ERRORS)}", ha="center", va="center", transform=axes.transAxes)
        return figure
    place = "epoch"
    if any(row.get("epoch") is None for row in rows):
        place = "row"
        results = [
            dataclasses.replace(result, rows=[{**row, "row": number} for number, row in enumerate(result.rows, 1)])
            for result in results
        ]
    # A configuration may describe its norm in a list or an object, which is no name either.
    named = all(isinstance(run.config.get("norm"), str | int) for run in results)
    runs = curves.by(results, "norm" if named else "job")
    if any(len({run.config.get("seed", 0) for run in found}) < len(found) for found in runs.values()):
        runs = curves.by(results, "job")
    curves.draw(axes, runs, place)
    curves.limit_errors(axes, results)
    axes.set_ylabel(curves.BOTH_ERRORS)
    axes.legend(fontsize=8)
    return figure


def load(path: Path) -> Experiment:
    """The study in a file.

    Raises:
        ValueError: There is no such file, its name is taken, it raises, or it lacks a function.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    why = "that of an experiment of the paper" if path.stem in registry.EXPERIMENTS else None
    if path.stem == "all":
        why = "the word for all experiments"
    elif not re.fullmatch(r"\w[\w.-]*", path.stem):
        why = "no such name"
    if why is not None:
        raise ValueError(
            f"{path}: a study's results lie in a folder of its file's name, and {path.stem!r} is {why}: rename the file"
        )
    source = path.read_bytes()
    with mistakes.located(path):
        module = import_file(path)
    # A module that was imported before is that of the file as it was then.
    source = vars(module).setdefault("__iternorm_source__", source)
    if missing := [name for name in ("jobs", "run") if not callable(getattr(module, name, None))]:
        raise ValueError(f"{path} is no study: it has no function {' and no function '.join(missing)}")
    return Experiment(path.stem, module, path, source)
