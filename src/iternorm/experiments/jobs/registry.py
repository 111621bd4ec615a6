"""The list of experiments, and what each is made of; `overview` has how much of it is done.

An experiment is a module with a docstring (what it reproduces, the paper's claim, the command, the cost, what the paper
got, where we departed) and these functions:

    jobs(plan) -> the configurations, one result file each
    run(config, context) -> rows, plain values; context.step is called as work proceeds
    plot(results) -> a matplotlib figure, drawn from any part of the results that is not empty
    compare(results) -> the paper's numbers beside ours (optional; results may be empty)
    claims(results) -> the paper's claims, checked (optional; results may be empty)
    contrasts(results) -> networks trained with BN and with IterNorm (optional; results may be empty)

Experiments that share runs name one folder of results in HOME: equal configurations are then one file.

A Python file with such functions is an experiment too, a study of the user's; `jobs` and `run` are all it needs, and
its id is the file's name. `iternorm.experiments.study` has what it is made of.
"""

import difflib
import fnmatch
import hashlib
import importlib
import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from iternorm.experiments.jobs import mistakes, results
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.results import Config, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERIMENTS = (
    *("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig8"),
    *("table1", "table2", "table3", "figA1", "figA2", "tableA1"),
    "imagenette",
)
# Found by name, as the paper's are: both rooms lie above this one.
_STUDY = "iternorm.experiments.study"
# What the paper did not run.
_NOT_THE_PAPERS = ("imagenette",)

Kind = TypeVar("Kind")

# The parts of an experiment's docstring, each from its name to the next one's.
FIELDS = ("Reproduces", "Claim", "Command", "Cost", "The paper got", "Departures")


@dataclass(frozen=True)
class Plan:
    """What the user asked for.

    Attributes:
        smoke: The small size, of seconds.
        device: ``cpu`` or ``cuda``.
        seeds: How many seeds; None is the experiment's own number.
    """

    smoke: bool = False
    device: str = "cpu"
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is not known here: use 'cpu' or 'cuda'")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} runs nothing: use 1 or more")


@dataclass(frozen=True)
class Context:
    """What a running job is given.

    Attributes:
        device: Where to compute.
        step: Called as ``step(done, total, **values)``; the values are shown beside the progress bar: ``loss``,
            ``error`` in percent, ``rate`` in images per second.
        folder: The job's own folder, for checkpoints. It survives a kill and is removed once the result is saved.
        tensorboard: Where to write event files; None: write none.
        compile: Whether to compile the model.
        record: What the job notes here, plain values, is kept in the provenance of its result.
    """

    device: str
    step: Callable[..., None]
    folder: Path
    tensorboard: Path | None = None
    compile: bool = False
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper, or a study of somebody's own.

    Attributes:
        id: Its name.
        module: What it is made of.
        path: The file of a study; None for those of the package.
        source: What was in that file when it was imported.
    """

    id: str
    module: ModuleType
    path: Path | None = None
    source: bytes | None = field(default=None, repr=False)

    @property
    def home(self) -> str:
        """The folder of its results, below the root."""
        return getattr(self.module, "HOME", self.id)

    @property
    def study_file(self) -> dict[str, str] | None:
        """The name and the digest of a study's file, for the provenance of its results."""
        if self.path is None or self.source is None:
            return None
        return {"name": self.path.name, "sha256": hashlib.sha256(self.source).hexdigest()}

    def other_maker(self, result: Result) -> str | None:
        """The file that made a result, if it is another version of the study's; older results do not tell."""
        here, made = self.study_file, result.provenance.get("study_file")
        return str(made.get("name")) if here and made and made.get("sha256") != here["sha256"] else None

    @property
    def is_papers(self) -> bool:
        """Whether it is a figure or a table of the paper."""
        return self.path is None and self.id not in _NOT_THE_PAPERS

    @property
    def trains(self) -> bool:
        """Whether its jobs train networks, and not only draw data or take times."""
        return any("model" in config for config in self.jobs())

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.module) or "").partition("\n")[0] or self.id

    @property
    def cost(self) -> str:
        """What the docstring says of the cost."""
        return self.field("Cost").rstrip(".")

    @property
    def command(self) -> str:
        """What runs it, to be pasted into a shell."""
        return f"iternorm run {shlex.quote(str(self.path or self.id))}"

    def field(self, name: str) -> str:
        """What the docstring says behind ``NAME:``, on one line; empty where it says nothing."""
        ends = "|".join(map(re.escape, FIELDS))
        pattern = rf"^{re.escape(name)}:(.*?)(?=^(?:{ends}):|^\s*$|\Z)"
        found = re.search(pattern, inspect.getdoc(self.module) or "", flags=re.MULTILINE | re.DOTALL)
        if found is None and name == "Command":
            return self.command
        return " ".join(found[1].split()) if found else ""

    def jobs(self, plan: Plan | None = None) -> list[Config]:
        """The configurations of a plan.

        Raises:
            ValueError: One of a study's is no configuration, or its `jobs` raised.
        """
        found: list[Any] = self._made("jobs", object, plan if plan is not None else Plan())
        if self.path is not None:
            for config in found:
                results.check_config(config, f"jobs() of {self.path}")
        return found

    def plot(self, finished: Sequence[Result]) -> "Figure":
        """The figure, from the rows of some or all jobs."""
        with mistakes.located(self.path, "plot"):
            drawn = getattr(self.module, "plot", None) or importlib.import_module(_STUDY).plot_errors
            figure = drawn(finished)
            if not hasattr(figure, "savefig"):
                raise TypeError(f"plot() returns {figure!r}: a matplotlib figure is needed")
            return figure

    def compare(self, finished: Sequence[Result]) -> list[Comparison]:
        """The paper's numbers beside ours."""
        return self._made("compare", Comparison, finished)

    def claims(self, finished: Sequence[Result]) -> list[Claim]:
        """The paper's claims, checked."""
        return self._made("claims", Claim, finished)

    def contrasts(self, finished: Sequence[Result]) -> list[Contrast]:
        """Networks trained with BN and with IterNorm."""
        return self._made("contrasts", Contrast, finished)

    def _made(self, name: str, kind: type[Kind], given: Any) -> list[Kind]:
        """What a function of the module returns, as a list; empty if the module has no such function."""
        with mistakes.located(self.path, name):
            made = getattr(self.module, name, lambda given: [])(given)
            if not isinstance(made, Iterable):
                raise TypeError(f"{name}() returns {made!r}: a list is needed")
            found = list(made)
            for each in found:
                if not isinstance(each, kind):
                    raise TypeError(f"{name}() gives {each!r}: a {kind.__name__} is needed")
            return found


def get(experiment: str) -> Experiment:
    """The experiment of this id.

    Args:
        experiment: An id, or the path of a study, which ends in ``.py``.

    Raises:
        ValueError: There is none; the nearest ids are named.
    """
    if experiment.endswith(".py"):
        return importlib.import_module(_STUDY).load(Path(experiment))
    if experiment not in EXPERIMENTS:
        lowered = {name.lower(): name for name in EXPERIMENTS}
        file = os.path.join(".", f"{experiment}.py")
        near = [file] if os.path.isfile(file) else []
        near += [lowered[name] for name in difflib.get_close_matches(experiment.lower(), lowered, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"no experiment is called {experiment!r}: {hint}all are: {', '.join(EXPERIMENTS)}; a study of your own is "
            "given as its file, ./study.py"
        )
    return Experiment(experiment, importlib.import_module(f"iternorm.experiments.paper.{experiment}"))


def get_all(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these ids, each once; ``all`` stands for every one.

    Raises:
        ValueError: One of them is unknown.
    """
    ids = [name for given in names for name in (EXPERIMENTS if given == "all" else (given,))]
    return [get(name) for name in dict.fromkeys(ids)]


def select(experiments: Sequence[Experiment], plan: Plan, only: Sequence[str] = ()) -> list[tuple[Experiment, Config]]:
    """The jobs of a plan whose names contain one of the texts, or match one as a pattern; all where there is no text.

    Raises:
        ValueError: There are no jobs, or a text selects none; the names are listed.
    """
    jobs = [(experiment, config) for experiment in experiments for config in experiment.jobs(plan)]
    if not jobs:
        raise ValueError(f"{', '.join(experiment.id for experiment in experiments)}: jobs() gives no configurations")
    for text in only:
        if not any(_matches(config["job"], text) for _, config in jobs):
            names = ", ".join(dict.fromkeys(config["job"] for _, config in jobs))
            raise ValueError(f"--only {text!r} selects no job: the names are {names}")
    return [job for job in jobs if not only or any(_matches(job[1]["job"], text) for text in only)]


def _matches(job: str, text: str) -> bool:
    return text in job or fnmatch.fnmatchcase(job, text)


def work_folder(root: Path, home: str, config: Config) -> Path:
    """``ROOT/.work/HOME/JOB-DIGEST``: the folder of a job that is not finished."""
    return root / ".work" / home / results.result_path(root, home, config).stem


def lock_path(root: Path, home: str, config: Config) -> Path:
    """The file that a job is claimed with, beside its folder."""
    folder = work_folder(root, home, config)
    return folder.with_name(folder.name + ".lock")
