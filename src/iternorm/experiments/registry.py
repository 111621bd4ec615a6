"""The list of experiments, and how one is run and drawn.

An experiment is a module with a docstring (what it reproduces, the paper's claim, the command, the cost, what the paper
got, where we departed) and three functions:

    jobs(smoke, device) -> the configurations, one result file each
    run(config, device, step) -> rows; step(done, total) is called as work proceeds
    plot(results) -> a matplotlib figure drawn from the rows alone
"""

import difflib
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from iternorm.provenance import provenance

from . import results
from .results import Config, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERIMENTS = ("fig1", "fig2", "fig4", "fig5", "figA2", "tableA1")

Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper."""

    id: str
    module: ModuleType

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.module) or "").partition("\n")[0]

    @property
    def cost(self) -> str:
        """What the docstring says behind ``Cost:``."""
        found = re.search(r"^Cost: (.+?)\.?$", inspect.getdoc(self.module) or "", flags=re.MULTILINE)
        return found[1] if found else ""

    def jobs(self, smoke: bool = False, device: str = "cpu") -> list[Config]:
        """The configurations to run."""
        return list(self.module.jobs(smoke, device))

    def plot(self, finished: Sequence[Result]) -> "Figure":
        """The figure, from the rows of all jobs."""
        return self.module.plot(finished)


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Attributes:
        result: The result.
        path: Its file.
        skipped: It was finished before.
        set_aside: Why a file that was there could not be used, and its new path.
    """

    result: Result
    path: Path
    skipped: bool
    set_aside: str | None = None


def get(experiment: str) -> Experiment:
    """The experiment of this id.

    Raises:
        ValueError: There is none; the nearest ids are named.
    """
    if experiment not in EXPERIMENTS:
        lowered = {name.lower(): name for name in EXPERIMENTS}
        near = [lowered[name] for name in difflib.get_close_matches(experiment.lower(), lowered, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no experiment is called {experiment!r}: {hint}all are: {', '.join(EXPERIMENTS)}")
    return Experiment(experiment, importlib.import_module(f"{__package__}.{experiment}"))


def run(
    experiment: Experiment,
    root: Path,
    *,
    smoke: bool = False,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Outcome]:
    """Run every job that has no result yet, and yield each as it is done.

    A results file that is cut short or of another version is renamed, and the job is run again.

    Args:
        experiment: The experiment.
        root: Folder of results.
        smoke: The small size, of seconds.
        device: Where to compute.
        progress: Called as ``progress(job, done, total)`` while a job runs.
    """
    for config in experiment.jobs(smoke, device):
        path = results.result_path(root, experiment.id, config)
        notice = None
        try:
            result = results.load(root, experiment.id, config)
        except results.UnusableResultError as error:
            notice = f"{error}; renamed to {results.set_aside(path).name}"
            result = None
        if result is not None:
            yield Outcome(result, path, skipped=True)
            continue

        def step(done: int, total: int, job: str = config["job"]) -> None:
            if progress is not None:
                progress(job, done, total)

        start = time.perf_counter()
        rows = experiment.module.run(config, device, step)
        result = Result(experiment.id, config, rows, time.perf_counter() - start, provenance(device))
        yield Outcome(result, results.save(root, result), skipped=False, set_aside=notice)


def load(experiment: Experiment, root: Path, *, smoke: bool = False, device: str = "cpu") -> list[Result]:
    """The results of all jobs.

    Raises:
        ValueError: Some are missing, or cannot be used.
    """
    found, missing = [], []
    configs = experiment.jobs(smoke, device)
    for config in configs:
        result = results.load(root, experiment.id, config)
        if result is None:
            missing.append(config["job"])
        else:
            found.append(result)
    if missing:
        command = f"iternorm run {experiment.id}" + (" --smoke" if smoke else "")
        raise ValueError(
            f"{experiment.id}: {len(missing)} of {len(configs)} results are missing in {root} ({', '.join(missing)}): "
            f"make them with `{command}`"
        )
    return found


def count_finished(experiment: Experiment, root: Path, *, smoke: bool = False, device: str = "cpu") -> tuple[int, int]:
    """How many jobs have a file, of how many."""
    configs = experiment.jobs(smoke, device)
    return sum(results.result_path(root, experiment.id, config).exists() for config in configs), len(configs)
