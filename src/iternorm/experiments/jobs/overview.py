"""What results there are of an experiment, and its figure drawn from them."""

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from iternorm.experiments.jobs import locks, registry, results
from iternorm.experiments.jobs.findings import Contrast
from iternorm.experiments.jobs.mistakes import StudyError
from iternorm.experiments.jobs.registry import Experiment, Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.report.files import write_figure_atomically

# Seeds beyond the default are looked for as long as each next one has results, and no further than this.
_MOST_SEEDS = 100


class NothingFinishedError(ValueError):
    """An experiment has no results to draw."""


@dataclass(frozen=True)
class State:
    """How much of an experiment is done.

    Attributes:
        finished: The results, in the order of the jobs.
        missing: The configurations without a result.
        running: How many of the missing ones somebody works on.
        unusable: Why files that are there could not be used.
        notes: What else a reader must know: that another version of a study made some of them.
    """

    finished: tuple[Result, ...]
    missing: tuple[Config, ...]
    running: int
    unusable: tuple[str, ...]
    notes: tuple[str, ...] = ()

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
    base = Plan(smoke=smoke)

    def jobs(plan: Plan) -> list[Config]:
        """The plan's jobs; none where a study raises on a device or a number of seeds that nobody asked for."""
        try:
            return experiment.jobs(plan)
        except StudyError:
            if plan == base:
                raise
            return []

    def look(plan: Plan, *, wanted: bool) -> bool:
        """Note the plan's jobs; returns False where it has new ones and nobody began any."""
        nonlocal running
        new = begun = 0
        for config in jobs(plan):
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
            is_running = result is None and locks.is_held(registry.lock_path(root, experiment.home, config))
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

    look(base, wanted=True)
    for device in ("cpu", "cuda"):
        look(replace(base, device=device), wanted=False)
        for seeds in range(1, _MOST_SEEDS):
            plan = replace(base, device=device, seeds=seeds)
            if jobs(plan) == jobs(replace(plan, seeds=seeds + 1)) or not look(plan, wanted=False):
                break
    others = [name for result in finished if (name := experiment.other_maker(result))]
    notes = [
        f"{count} of {len(finished)} results of {experiment.id} are by another version of {name}: "
        f"`{experiment.command}` names them"
        for name, count in Counter(others).items()
    ]
    return State(tuple(finished), tuple(missing), running, tuple(unusable), tuple(notes))


def contrasts(root: Path) -> list[Contrast]:
    """Networks trained with BN and with IterNorm, of all experiments, from the results that are there."""
    found = map(registry.get, registry.EXPERIMENTS)
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
    return write_figure_atomically(path, experiment.plot(state.finished)), state
