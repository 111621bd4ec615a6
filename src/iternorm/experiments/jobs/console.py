"""A sweep on the screen: how far every running job is, a line for every job that ended, and a summary."""

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iternorm.experiments.jobs.mistakes import StudyError
from iternorm.experiments.jobs.stopwatch import duration
from iternorm.experiments.jobs.sweep import Job, Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# How often a log gets a line for a running job.
LINE_SECONDS = 30.0
# What a user can do something about, without reading a stack.
_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)


class JobsFailedError(ValueError):
    """Some jobs raised; each is named with what it raised."""


class Bars:
    """Progress bars: one for the jobs together, one for each that runs, with the values it passes."""

    def __init__(self, progress: "Progress", jobs: Sequence[Job]) -> None:
        self._progress = progress
        self._tasks: dict[tuple[str, str], Any] = {}
        self._all = progress.add_task("jobs", total=len(jobs), values="")

    def step(self, experiment: str, job: str, done: int, total: int, values: dict[str, Any]) -> None:
        """Note how far a job is."""
        key = (experiment, job)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{experiment} {job}", total=total, values="")
        self._progress.update(self._tasks[key], completed=done, total=total, values=describe(values))

    def ended(self, outcome: Outcome) -> None:
        """Note that a job is over."""
        task = self._tasks.pop((outcome.experiment.id, outcome.config["job"]), None)
        if task is not None:
            self._progress.remove_task(task)
        self._progress.update(self._all, advance=1)


class Lines:
    """Progress in a log, where there is no terminal for bars: a line for each running job every half minute."""

    def __init__(self, output: "Console") -> None:
        self._output = output
        # Of each running job: when it was first seen, how far it was then, when it last had a line.
        self._seen: dict[tuple[str, str], tuple[float, int, float]] = {}

    def step(self, experiment: str, job: str, done: int, total: int, values: dict[str, Any]) -> None:
        """Note how far a job is."""
        now, key = time.monotonic(), (experiment, job)
        begun, first, last = self._seen.setdefault(key, (now, done, now))
        if now - last < LINE_SECONDS:
            return
        self._seen[key] = begun, first, now
        words = [f"{experiment} {job}: {done} of {total}"]
        if values:
            words.append(describe(values))
        # A resumed job does not begin at nought.
        if done > first:
            words.append(f"{duration(max(total - done, 0) * (now - begun) / (done - first))} left")
        self._output.print(", ".join(words), highlight=False, markup=False, soft_wrap=True)

    def ended(self, outcome: Outcome) -> None:
        """Note that a job is over."""
        self._seen.pop((outcome.experiment.id, outcome.config["job"]), None)


def describe(values: Mapping[str, Any]) -> str:
    """The values of a step, for reading.

    Example:
        >>> describe({"loss": 0.30103, "error": 8.5, "rate": 12345.6, "epoch": 3})
        'loss 0.301, error 8.50 %, 12,346 images/s, epoch 3'
    """
    written = {"error": "error {:.2f} %", "rate": "{:,.0f} images/s"}
    texts = []
    for name, value in values.items():
        plain = name + (" {:.3g}" if isinstance(value, float) else " {}")
        texts.append((written.get(name, plain) if value is not None else f"{name} –").format(value))
    return ", ".join(texts)


def show(
    outcomes: Iterator[Outcome],
    jobs: Sequence[Job],
    bars: Bars | Lines,
    output: "Console",
    errors: "Console",
    *,
    stop: bool,
) -> None:
    """Print each outcome as it comes, and how many of each kind there were.

    Args:
        outcomes: The sweep.
        jobs: All that were chosen.
        bars: How far each job is, on the screen or in a log.
        output: For results.
        errors: For warnings and failures.
        stop: Raise a job's error at once.

    Raises:
        JobsFailedError: Some jobs failed.
    """
    counts: Counter[str] = Counter()
    failed: list[str] = []
    last: Exception | None = None
    for outcome in outcomes:
        bars.ended(outcome)
        counts[outcome.what] += 1
        name = f"{outcome.experiment.id} {outcome.config['job']}"
        maker = outcome.experiment.other_maker(outcome.result) if outcome.skipped and outcome.result else None
        again = f"{name}: finished before, by another version of {maker}: remove {outcome.path} to run it again"
        for notice in filter(None, (outcome.set_aside, maker and again)):
            errors.print(f"warning: {notice}", style="yellow", highlight=False, markup=False, soft_wrap=True)
        if outcome.error is not None:
            # A package that is missing here is missing for every job.
            if stop or isinstance(_raised(outcome.error), ModuleNotFoundError):
                raise outcome.error
            failed.append(f"{name}: {outcome.error or type(outcome.error).__name__}")
            _print_failure(outcome.error, name, errors)
            last = outcome.error
            continue
        end = f"{outcome.result.seconds:.1f} s" if outcome.what == "ran" and outcome.result else outcome.what
        output.print(f"{outcome.path}  ({end})", highlight=False, soft_wrap=True, markup=False)
    counts["not tried"] = len(jobs) - counts.total()
    words = [f"{number} {what}" for what, number in counts.items() if number]
    output.print(f"{len(jobs)} jobs: {', '.join(words)}", highlight=False, soft_wrap=True)
    if failed:
        raise JobsFailedError(f"{len(failed)} of {len(jobs)} jobs failed: {'; '.join(dict.fromkeys(failed))}") from last


def _raised(error: BaseException) -> BaseException:
    """What a study raised, without the sentence about it."""
    return error.__cause__ or error if isinstance(error, StudyError) else error


def _print_failure(error: Exception, name: str, errors: "Console") -> None:
    raised, reason = _raised(error), f": {error}"
    if not isinstance(raised, _USER_ERRORS):
        errors.print("".join(traceback.format_exception(raised)), highlight=False, markup=False, soft_wrap=True)
        reason = ""
    # Now: the line at the end may be hours away, and one who stops the sweep never sees it.
    errors.print(f"{name} failed{reason}", style="red", highlight=False, markup=False, soft_wrap=True)
