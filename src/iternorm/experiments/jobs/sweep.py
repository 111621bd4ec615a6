"""Running the jobs of experiments: finished jobs are skipped, and so are those that another process works on.

Any number of processes may run at once on one results folder. Under `torchrun` all processes work on the same job at a
time: the first one claims it, decides, saves and reports, and tells the others what it decided.
"""

import copy
import functools
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from iternorm.experiments.jobs import locks, mistakes, registry, results
from iternorm.experiments.jobs.registry import Context, Experiment
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.jobs.stopwatch import NAME as stopwatch_file
from iternorm.experiments.jobs.stopwatch import Stopwatch
from iternorm.report.files import check_writable, write_text_atomically, writing
from iternorm.report.provenance import provenance
from iternorm.timing.threads import num_threads

Job = tuple[Experiment, Config]
# progress(experiment, job, done, total, values)
Progress = Callable[[str, str, int, int, dict[str, Any]], None]
# The file of a job's folder that holds the digest of the study that works there.
_STUDY_FILE = "study.sha256"
What = Literal["ran", "finished before", "running elsewhere", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Attributes:
        experiment: Its experiment.
        config: Its configuration.
        path: The file of its result.
        what: One of four words.
        result: The result, where there is one.
        set_aside: Why a file that was there could not be used, and its new path.
        error: What was raised, where it failed.
    """

    experiment: Experiment
    config: Config
    path: Path
    what: What
    result: Result | None = None
    set_aside: str | None = None
    error: Exception | None = None

    @property
    def skipped(self) -> bool:
        """It was finished before."""
        return self.what == "finished before"


@dataclass(frozen=True)
class Options:
    """How jobs are run; no option here changes what a result is named.

    Attributes:
        device: ``cpu`` or ``cuda``.
        tensorboard: Write event files below ``ROOT/.tensorboard``.
        compile: Compile the models.
        threads: CPU threads; None leaves their number as it is.
    """

    device: str = "cpu"
    tensorboard: bool = False
    compile: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class Taken:
    """A job that is ours to run."""

    claim: locks.Claim
    set_aside: str | None


def run(
    jobs: Sequence[Job], root: Path, options: Options | None = None, *, progress: Progress | None = None
) -> Iterator[Outcome]:
    """Run every job that has no result and that nobody works on, and yield each as it is done.

    A results file that is truncated or of another version is renamed, and its job is run again. A job that raises, or
    whose result cannot be saved, is an outcome like others and leaves its checkpoint. If two in a row fail with the
    same error, the rest is not tried.

    Raises:
        ValueError: The device is not there.
        RuntimeError: A job raised under `torchrun`, where the processes cannot go on without each other.
    """
    options = options if options is not None else Options()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a CUDA device and torch sees none: use device='cpu'")
    ranks = _Ranks(options.device)
    previous = None
    for experiment, config in jobs:
        outcome = _run_one(experiment, config, root, options, ranks, progress)
        yield outcome
        failure = _kind(outcome.error) if outcome.error is not None else None
        if failure is not None and failure == previous:
            break
        previous = failure
    ranks.end()


def _kind(error: Exception) -> tuple[type, object]:
    """What failures of one cause have in common: the text of an OSError has the path of its job."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return type(error), getattr(cause, "errno", None) or str(error)


def check_folders(jobs: Sequence[Job], root: Path) -> None:
    """Fail before the work where a job could not be claimed, or its result not be kept. Nothing is left behind.

    Raises:
        OSError: One could not.
    """
    looked_at: set[Path] = set()
    for experiment, config in jobs:
        path = results.result_path(root, experiment.home, config)
        if path.exists() or path.parent in looked_at:
            continue
        looked_at.add(path.parent)
        check_writable(path)
        check_writable(registry.lock_path(root, experiment.home, config))


def _run_one(
    experiment: Experiment, config: Config, root: Path, options: Options, ranks: "_Ranks", progress: Progress | None
) -> Outcome:
    path = results.result_path(root, experiment.home, config)
    taken: Taken | Outcome | None = take(experiment, config, root) if ranks.is_first else None
    try:
        decided: What = ranks.tell(taken.what if isinstance(taken, Outcome) else "ran")
        if decided != "ran":
            return taken if isinstance(taken, Outcome) else Outcome(experiment, config, path, decided)
        try:
            context = context_for(experiment, config, root, options, progress)
            result = execute(experiment, config, context, options.threads)
        except Exception as error:
            if ranks.size > 1:
                raise RuntimeError(f"{experiment.id} {config['job']} failed: {error}") from error
            notice = taken.set_aside if isinstance(taken, Taken) else None
            return Outcome(experiment, config, path, "failed", set_aside=notice, error=error)
        # The first process removes the job's folder, which others may still use.
        ranks.wait()
        if isinstance(taken, Taken):
            return conclude(experiment, result, root, taken)
        return Outcome(experiment, config, path, "ran", result)
    finally:
        if isinstance(taken, Taken):
            taken.claim.release()


def take(experiment: Experiment, config: Config, root: Path) -> Taken | Outcome:
    """Claim a job, or say why there is nothing to do: a file that cannot be read or claimed fails its job alone."""
    path = results.result_path(root, experiment.home, config)
    claim = None
    try:
        try:
            found = results.load(root, experiment.home, config)
        except results.UnusableResultError:
            # It is renamed below, by whoever has the claim.
            found = None
        if found is not None:
            return Outcome(experiment, config, path, "finished before", found)
        claim = locks.claim(registry.lock_path(root, experiment.home, config))
        if claim is None:
            return Outcome(experiment, config, path, "running elsewhere")
        try:
            # Again: it may have been finished between the look and the claim.
            found, notice = results.load(root, experiment.home, config), None
        except results.UnusableResultError as error:
            found, notice = None, f"{error}; renamed to {results.set_aside(path).name}"
        if found is None:
            set_other_aside(experiment, config, root)
    except BaseException as error:
        if claim is not None:
            claim.release()
        if not isinstance(error, OSError):
            raise
        return Outcome(experiment, config, path, "failed", error=error)
    if found is not None:
        claim.release()
        return Outcome(experiment, config, path, "finished before", found)
    return Taken(claim, notice)


def set_other_aside(experiment: Experiment, config: Config, root: Path) -> None:
    """Rename a job's folder if another version of the study's file began it, and warn: the job starts anew.

    It is a warning and no part of the outcome, which comes when the job has ended, hours later or never.
    """
    folder = registry.work_folder(root, experiment.home, config)
    try:
        # Bytes: a damaged file is not that of this version, and need not be text.
        begun = (folder / _STUDY_FILE).read_bytes()
    # A file in the folder's place is told where the folder is made.
    except (FileNotFoundError, NotADirectoryError):
        return
    if experiment.study_file is None or begun == experiment.study_file["sha256"].encode():
        return
    name = results.set_aside(folder).name
    warnings.warn(
        f"{folder} was begun by another version of {experiment.path}; renamed to {name}, and the job starts anew",
        stacklevel=2,
    )


def context_for(
    experiment: Experiment, config: Config, root: Path, options: Options, progress: Progress | None
) -> Context:
    """What the job is given; its folder exists afterwards."""
    folder = registry.work_folder(root, experiment.home, config)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if experiment.study_file is not None and is_first_process():
        write_text_atomically(folder / _STUDY_FILE, experiment.study_file["sha256"])

    def step(done: int, total: int, **values: Any) -> None:
        if progress is not None:
            progress(experiment.id, config["job"], done, total, values)

    events = root / ".tensorboard" / experiment.home / folder.name if options.tensorboard else None
    return Context(options.device, step, folder, events, options.compile)


def execute(experiment: Experiment, config: Config, context: Context, threads: int | None = None) -> Result:
    """Run a job here and now. A folder without a checkpoint is not left behind where it fails."""
    # Before the run: the commit may have moved on when it ends.
    commit = _commit()
    with num_threads(threads):
        try:
            with Stopwatch(context.folder, keeps=is_first_process()) as stopwatch:
                # A copy: a run that changes its configuration must not change the name of its result.
                with mistakes.located(experiment.path, "run"):
                    made = experiment.module.run(copy.deepcopy(config), context)
                    # A generator runs here, too.
                    made = list(made) if isinstance(made, Iterator) else made
                where = f"run() of {experiment.path or experiment.id}"
                rows = results.check_rows(made, where)
                results.check_record(context.record, where)
        except BaseException:
            ours = (stopwatch_file, _STUDY_FILE)
            if context.folder.exists() and all(path.name in ours for path in context.folder.iterdir()):
                shutil.rmtree(context.folder)
            raise
        how = {"commit": commit, "processes": num_processes(), "compile": context.compile}
        study = {} if experiment.study_file is None else {"study_file": experiment.study_file}
        origin = {**provenance(context.device), **how, **context.record, **study}
        return Result(experiment.home, config, rows, stopwatch.seconds, origin)


def conclude(experiment: Experiment, result: Result, root: Path, taken: Taken) -> Outcome:
    """Save a result and remove the job's folder, which stays where the result cannot be saved."""
    path = results.result_path(root, experiment.home, result.config)
    try:
        results.save(root, result)
    except (OSError, TypeError, ValueError) as error:
        return Outcome(experiment, result.config, path, "failed", set_aside=taken.set_aside, error=error)
    shutil.rmtree(registry.work_folder(root, experiment.home, result.config), ignore_errors=True)
    return Outcome(experiment, result.config, path, "ran", result, taken.set_aside)


@functools.cache
def _commit() -> str | None:
    """The commit of the code that this process runs."""
    return provenance()["commit"]


def num_processes() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process speaks for all that `torchrun` started; true without it."""
    return int(os.environ.get("RANK", "0")) == 0


class _Ranks:
    """The processes that `torchrun` started, or this one alone."""

    def __init__(self, device: str) -> None:
        self.size = num_processes()
        self.is_first = is_first_process()
        self._state = None
        if self.size > 1:
            from accelerate import PartialState

            self._state = PartialState(cpu=device == "cpu")

    def tell(self, value: Any) -> Any:
        """The first process's value, on every process."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value], from_process=0)[0]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def end(self) -> None:
        """Leave the process group. Not for a process that has failed, since the others may be waiting elsewhere."""
        if self._state is not None:
            # Processes that still communicate with one that has left would fail.
            self.wait()
            self._state.destroy_process_group()
            # torch keeps a group that DDP has used. If one of its threads released a tensor during interpreter
            # shutdown, that would abort the process, so it gets the time to do it now.
            time.sleep(0.2)
