"""Compile what the benchmark will run, in several processes at once, into the caches on disk.

One process would wait minutes for kernels that sixteen cores compile in half a minute. This only saves time: what was
not compiled here is compiled when it is first run.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from iternorm.timing.cpu.devices import Case
from iternorm.timing.gpu.cases import LAYOUTS, Shape, candidates_for
from iternorm.timing.gpu.clock import matmul_precision, reason
from iternorm.timing.gpu.training import SETTINGS, Setting, TrainingStep, norms

# Our kernels are the same for every batch size; those of torch.compile are specific to the shape.
SMALL_BATCH = 4
# After so many seconds the benchmark begins with what there is.
PATIENCE = 150


class Job(NamedTuple):
    """One candidate's first step in one layout, or for a name of None VGG's first step with IterNorm."""

    name: str | None
    shape: Shape
    dtype: torch.dtype
    layout: str


def jobs_for(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], quick: bool = False) -> list[Job]:
    """All that has to be compiled, the slowest first, and no kernel twice."""
    jobs: dict[tuple, Job] = {}
    for shape in shapes:
        for dtype in dtypes:
            for candidate in candidates_for(shape, dtype, quick):
                if not candidate.compiles:
                    continue
                # Our kernels depend on a shape only by whether groups are full and rows aligned.
                kind = shape if candidate.compiled else (shape[1] % 64 == 0, shape[2] * shape[3] % 16 == 0)
                for layout in LAYOUTS:
                    jobs.setdefault((candidate.name, kind, dtype, layout), Job(candidate.name, shape, dtype, layout))
    found = sorted(jobs.values(), key=lambda job: "compiled" not in (job.name or ""))
    image = (SMALL_BATCH, 3, 32, 32)
    return [*found, *(Job(None, image, setting.dtype, setting.layout) for setting in SETTINGS)]


def compile_all(jobs: Sequence[Job], device: str = "cuda", processes: int | None = None) -> dict:
    """Run the first step of every job in other processes.

    Returns:
        `processes`, `seconds`, `jobs` and `failed`, a list of reasons: the comparison meets the same errors itself.
    """
    start = time.perf_counter()
    if processes is None:
        processes = min(12, len(jobs), (os.cpu_count() or 1) - 2)
    summary = {"processes": max(processes, 0), "jobs": len(jobs), "failed": []}
    if processes >= 2:
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes, initializer=_be_modest) as pool:
            answers = [(job, pool.apply_async(_attempt, (job, device))) for job in jobs]
            for job, answer in answers:
                try:
                    error = answer.get(max(0.0, start + PATIENCE - time.perf_counter()))
                except multiprocessing.TimeoutError:
                    error = f"not ready after {PATIENCE} s"
                if error is not None:
                    where = f"{job.name or 'VGG'} {job.shape} {job.dtype} {job.layout}"
                    summary["failed"].append(f"{where}: {error}")
    return {**summary, "seconds": time.perf_counter() - start}


def _be_modest() -> None:
    """Many of these run in parallel, so their compilers must not start more processes."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)


def _attempt(job: Job, device: str) -> str | None:
    """Why the first step of a job failed, as text, because not every compiler's error can be pickled."""
    try:
        first_step(job, device)
    except Exception as error:
        return reason(error)
    return None


def first_step(job: Job, device: str) -> None:
    """The first step of a job, on a small batch where that gives the same kernels."""
    from iternorm.timing.gpu.comparison import Entry

    target = torch.device(device)
    if job.name is None:
        with matmul_precision("high"):
            (norm,) = (norm for norm in norms(quick=True) if norm.name == "IterNorm d=64")
            TrainingStep(norm.make, Setting(job.dtype, job.layout), target)()
    else:
        (candidate,) = (candidate for candidate in candidates_for(job.shape, job.dtype) if candidate.name == job.name)
        shape = job.shape if candidate.compiled else (SMALL_BATCH, *job.shape[1:])
        entry = Entry(candidate, job.layout, *Case(shape, job.dtype, LAYOUTS[job.layout]).make(target))
        with matmul_precision(entry.precision):
            entry.build()
            entry.step()
    if target.type == "cuda":
        torch.cuda.synchronize(target)
