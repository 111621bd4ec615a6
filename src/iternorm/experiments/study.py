"""All that an experiment of your own is made of. `examples/study.py` is one; docs/using.md says how it is run.

A study is a Python file with a function `jobs`, which gives configurations, and a function `run`, which trains one of
them. It may have `plot`, `compare` and `claims`; see `iternorm.experiments.registry` for what each takes and returns.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import curves, registry
from .findings import Claim, Comparison, Finding, Verdict, measured
from .norms import make_norm
from .outcomes import claim_lower, finals, over_seeds
from .outcomes import compare as compare_errors
from .recipe import Recipe
from .registry import Context, Experiment, Plan
from .results import Config, Result, Row
from .rule import Seeds, all_of, is_above, is_below, is_lower, is_no_lower, over_parts
from .sources import Source, TensorSource, open_source
from .train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Claim",
    "Comparison",
    "Config",
    "Context",
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


def plot_errors(results: Sequence[Result]) -> "Figure":
    """Training (solid) and test (dashed) error over epochs, a curve for each norm: what a study without `plot` shows.

    Runs that differ in more than their seeds and norms are told apart by their jobs' names.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    runs = curves.by(results, "norm")
    if None in runs or any(len({run.config.get("seed", 0) for run in found}) < len(found) for found in runs.values()):
        runs = curves.by(results, "job")
    curves.draw(axes, runs, "epoch")
    curves.limit_errors(axes, results)
    axes.set_ylabel("error (%)")
    axes.legend(fontsize=8)
    return figure


def load(path: Path) -> Experiment:
    """The study in a file.

    Raises:
        ValueError: There is no such file, its name is taken, or it lacks a function.
    """
    from .inputs import import_file

    taken = path.stem in registry.EXPERIMENTS
    if taken or not re.fullmatch(r"\w[\w.-]*", path.stem):
        why = "that of an experiment of the paper" if taken else "no such name"
        raise ValueError(
            f"{path}: a study's results lie in a folder of its file's name, and {path.stem!r} is {why}: rename the file"
        )
    module = import_file(path, "ID")
    if missing := [name for name in ("jobs", "run") if not callable(getattr(module, name, None))]:
        raise ValueError(f"{path} is no study: it has no function {' and no function '.join(missing)}")
    return Experiment(path.stem, module, path)


def check_config(path: Path, config: object) -> None:
    """Refuse what is no configuration.

    Raises:
        ValueError: It is none.
    """
    problem = None
    if not isinstance(config, Mapping) or not isinstance(config.get("job"), str):
        problem = "a mapping with a name as its 'job' is needed"
    else:
        try:
            json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"plain values are needed ({error})"
    if problem is not None:
        raise ValueError(f"jobs() of {path} gives {config!r}: {problem}")
