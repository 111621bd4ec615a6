"""The same jobs on a Ray cluster, or on a Ray of this machine's own.

The driver claims every job it hands out and is the only one that writes results, so workers may be on other machines:
they need the package and the data (`ITERNORM_DATA` is passed on), not the results folder. Where they see that folder
their checkpoints go there, and a sweep that was stopped resumes from them.
"""

import importlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iternorm.experiments.jobs import registry, results, sweep
from iternorm.experiments.jobs.registry import Experiment
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.jobs.sweep import Job, Options, Outcome, Progress, Taken

# A worker tells how far it is this often, and the driver looks as often.
_PERIOD_SECONDS = 0.5
# For a connection to a cluster.
_PATIENCE_SECONDS = 10.0


class _Board:
    """The latest step of each job: an actor that workers write to and the driver reads."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple] = {}

    def put(self, name: str, job: str, done: int, total: int, values: dict[str, Any]) -> None:
        self._steps[f"{name} {job}"] = (name, job, done, total, values)

    def take(self) -> list[tuple]:
        steps, self._steps = list(self._steps.values()), {}
        return steps


def run(
    jobs: Sequence[Job],
    root: Path,
    options: Options | None = None,
    *,
    address: str | None = None,
    gpus_per_job: float = 1.0,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """`sweep.run` on Ray: outcomes come in the order in which jobs end.

    Args:
        jobs: The jobs.
        root: Folder of results.
        options: The device, and so on.
        address: Of a cluster, as `ray.init` reads it; None starts a Ray on this machine, unless one is running in this
            process, and ends it afterwards.
        gpus_per_job: On CUDA, the share of a GPU that a job is given: 0.25 puts four on one card.
        progress: Called as jobs proceed.

    Raises:
        ValueError: The share is not positive, or `torchrun` started this process.
        ConnectionError: There is no cluster at the address.
    """
    import ray

    options = options if options is not None else Options()
    if gpus_per_job <= 0:
        raise ValueError(f"gpus_per_job={gpus_per_job} gives a job no GPU: use a positive share, such as 0.25")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Ray and torchrun each start the processes: use one of them")
    if address is not None:
        _check_address(address)
    started = not ray.is_initialized()
    if started:
        ray.init(
            address=address if address is not None else "local",
            include_dashboard=None if address is not None else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield from _run(ray, jobs, root, options, gpus_per_job, progress)
    finally:
        if started:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Fail in seconds where nothing listens: Ray itself tries for minutes, in lines of its own log."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # The others are found by Ray: ``auto`` and names of its own.
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"there is no Ray at {address} ({error}): name the address that `ray start --head` gave, or none for a Ray "
            "of this machine"
        ) from error


def _run(
    ray: Any, jobs: Sequence[Job], root: Path, options: Options, gpus_per_job: float, progress: Progress | None
) -> Iterator[Outcome]:
    board = ray.remote(num_cpus=0)(_Board).remote()
    work = ray.remote(num_cpus=1, num_gpus=gpus_per_job if options.device == "cuda" else 0)(_work)
    data = os.environ.get("ITERNORM_DATA")
    pending: dict[Any, tuple[Experiment, Config, Taken]] = {}
    try:
        for experiment, config in jobs:
            taken = sweep.take(experiment, config, root)
            if isinstance(taken, Outcome):
                yield taken
                continue
            module = (experiment.id, experiment.module.__name__, _source(experiment))
            reference = work.remote(module, dict(config), str(root.absolute()), options, data, board)
            pending[reference] = (experiment, config, taken)
        while pending:
            ended, _ = ray.wait(list(pending), timeout=_PERIOD_SECONDS)
            for step in ray.get(board.take.remote()):
                if progress is not None:
                    progress(*step)
            for reference in ended:
                experiment, config, taken = pending.pop(reference)
                try:
                    yield _collect(ray, reference, experiment, config, root, taken)
                finally:
                    taken.claim.release()
    finally:
        for reference, (_, _, taken) in pending.items():
            ray.cancel(reference, force=True)
            taken.claim.release()


def _collect(ray: Any, reference: Any, experiment: Experiment, config: Config, root: Path, taken: Taken) -> Outcome:
    path = results.result_path(root, experiment.home, config)
    try:
        rows, seconds, provenance = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # The worker's own exception, without the stack of Ray around it.
        return Outcome(experiment, config, path, "failed", set_aside=taken.set_aside, error=error.cause)
    except ray.exceptions.RayError as error:
        return Outcome(experiment, config, path, "failed", set_aside=taken.set_aside, error=error)
    return sweep.conclude(experiment, Result(experiment.home, config, rows, seconds, provenance), root, taken)


def _source(experiment: Experiment) -> tuple[str, bytes] | None:
    """The path and the content of a study, which a worker may not have."""
    if experiment.path is None or experiment.source is None:
        return None
    return str(experiment.path.absolute()), experiment.source


@contextmanager
def _experiment(name: str, module: str, source: tuple[str, bytes] | None) -> Iterator[Experiment]:
    """The experiment of a job, whose file is there for as long as the job runs."""
    if source is None:
        yield Experiment(name, importlib.import_module(module))
        return
    path, content = Path(source[0]), source[1]
    if path.is_file() and path.read_bytes() == content:
        yield registry.get(str(path))
        return
    with tempfile.TemporaryDirectory(prefix="iternorm-study-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(content)
        yield registry.get(str(copy))


def _work(
    module: tuple[str, str, tuple[str, bytes] | None],
    config: Config,
    root: str,
    options: Options,
    data: str | None,
    board: Any,
) -> tuple[list, float, Any]:
    """One job, on a worker."""
    if data is not None:
        os.environ["ITERNORM_DATA"] = data
    with _experiment(*module) as experiment:
        return _execute(experiment, config, Path(root), options, board)


def _execute(
    experiment: Experiment, config: Config, folder: Path, options: Options, board: Any
) -> tuple[list, float, Any]:
    own = not folder.is_dir()
    if own:
        folder = Path(tempfile.gettempdir()) / "iternorm-work"
        sweep.set_other_aside(experiment, config, folder)
    last = 0.0

    def progress(name: str, job: str, done: int, total: int, values: dict[str, Any]) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > _PERIOD_SECONDS:
            last = time.monotonic()
            board.put.remote(name, job, done, total, values)

    context = sweep.context_for(experiment, config, folder, options, progress)
    result = sweep.execute(experiment, config, context, options.threads)
    if own:
        shutil.rmtree(registry.work_folder(folder, experiment.home, config), ignore_errors=True)
    return list(result.rows), result.seconds, result.provenance
