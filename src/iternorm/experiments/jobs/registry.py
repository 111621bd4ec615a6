"""The list of experiments, what each is made of, and how much of it is done.

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
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from iternorm.experiments.jobs import locks, results
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast
from iternorm.experiments.jobs.results import Config, Result
from iternorm.report.files import writing

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

# The parts of an experiment's docstring, each from its name to the next one's.
FIELDS = ("Reproduces", "Claim", "Command", "Cost", "The paper got", "Departures")

# Seeds beyond the default are looked for as long as each next one has results, and no further than this.
_MOST_SEEDS = 100


class NothingFinishedError(ValueError):
    """An experiment has no results to draw."""


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
    """

    id: str
    module: ModuleType
    path: Path | None = None

    @property
    def home(self) -> str:
        """The folder of its results, below the root."""
        return getattr(self.module, "HOME", self.id)

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
            ValueError: One of a study's is no configuration.
        """
        found = list(self.module.jobs(plan if plan is not None else Plan()))
        if self.path is not None:
            for config in found:
                results.check_config(config, f"jobs() of {self.path}")
        return found

    def plot(self, finished: Sequence[Result]) -> "Figure":
        """The figure, from the rows of some or all jobs."""
        if hasattr(self.module, "plot"):
            return self.module.plot(finished)
        return importlib.import_module(_STUDY).plot_errors(finished)

    def compare(self, finished: Sequence[Result]) -> list[Comparison]:
        """The paper's numbers beside ours."""
        return list(self.module.compare(finished)) if hasattr(self.module, "compare") else []

    def claims(self, finished: Sequence[Result]) -> list[Claim]:
        """The paper's claims, checked."""
        return list(self.module.claims(finished)) if hasattr(self.module, "claims") else []

    def contrasts(self, finished: Sequence[Result]) -> list[Contrast]:
        """Networks trained with BN and with IterNorm."""
        return list(self.module.contrasts(finished)) if hasattr(self.module, "contrasts") else []


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
        near = [lowered[name] for name in difflib.get_close_matches(experiment.lower(), lowered, n=3, cutoff=0.5)]
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


@dataclass(frozen=True)
class State:
    """How much of an experiment is done.

    Attributes:
        finished: The results, in the order of the jobs.
        missing: The configurations without a result.
        running: How many of the missing ones somebody works on.
        unusable: Why files that are there could not be used.
    """

    finished: tuple[Result, ...]
    missing: tuple[Config, ...]
    running: int
    unusable: tuple[str, ...]

    @property
    def total(self) -> int:
        """How many jobs there are."""
        return len(self.finished) + len(self.missing)

    def __str__(self) -> str:
        text = f"{len(self.finished)} of {self.total}"
        return f"{text}, {self.running} running" if self.running else text


def survey(experiment: Experiment, root: Path, *, smoke: bool = False) -> State:
    """Look what is there: the jobs of the plan without options, and those of other devices and seeds that were begun.

    A file that cannot be used counts as missing, and is named.
    """
    finished: list[Result] = []
    missing: list[Config] = []
    unusable: list[str] = []
    running = 0
    seen: set[Path] = set()

    def look(plan: Plan, *, wanted: bool) -> bool:
        """Note the plan's jobs; returns False where it has new ones and nobody began any."""
        nonlocal running
        new = begun = 0
        for config in experiment.jobs(plan):
            path = results.result_path(root, experiment.home, config)
            if path in seen:
                continue
            new += 1
            try:
                result = results.load(root, experiment.home, config)
            # One file that cannot be read keeps no other from being listed.
            except (results.UnusableResultError, OSError) as error:
                unusable.append(str(error))
                result = None
            is_running = result is None and locks.is_held(lock_path(root, experiment.home, config))
            begun += is_running or result is not None
            if not (wanted or is_running or result is not None):
                continue
            seen.add(path)
            running += is_running
            if result is not None:
                finished.append(result)
            else:
                missing.append(config)
        return begun > 0 or new == 0

    base = Plan(smoke=smoke)
    look(base, wanted=True)
    look(replace(base, device="cuda"), wanted=False)
    for seeds in range(1, _MOST_SEEDS):
        plan = replace(base, seeds=seeds)
        if experiment.jobs(plan) == experiment.jobs(replace(base, seeds=seeds + 1)) or not look(plan, wanted=False):
            break
    return State(tuple(finished), tuple(missing), running, tuple(unusable))


def contrasts(root: Path) -> list[Contrast]:
    """Networks trained with BN and with IterNorm, of all experiments, from the results that are there."""
    found = map(get, EXPERIMENTS)
    return [each for experiment in found for each in experiment.contrasts(survey(experiment, root).finished)]


def draw(experiment: Experiment, root: Path, *, smoke: bool = False, out: Path | None = None) -> tuple[Path, State]:
    """Draw the figure of all finished jobs, ``ROOT/ID/ID.png`` unless `out` is given.

    Raises:
        NothingFinishedError: There is nothing to draw.
    """
    state = survey(experiment, root, smoke=smoke)
    if not state.finished:
        command = experiment.command + (" --smoke" if smoke else "")
        if root != Path("results"):
            command += f" --results {shlex.quote(str(root))}"
        broken = f" ({'; '.join(state.unusable)})" if state.unusable else ""
        raise NothingFinishedError(
            f"{experiment.id}: none of {state.total} results is in {root}{broken}: make them with `{command}`"
        )
    name = experiment.id + ("-smoke" if smoke else "")
    path = out if out is not None else root / experiment.id / f"{name}.png"
    figure = experiment.plot(state.finished)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    return path, state
