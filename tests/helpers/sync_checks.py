"""The ranks of the synchronization tests, and what one process makes of their batches."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import sync_ranks
import torch

import iternorm

SIZE = 3


@contextlib.contextmanager
def running(scenario, folder):
    """The ranks of a scenario; what still runs at the end is killed."""
    source = Path(iternorm.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONFAULTHANDLER"] = "1"
    arguments = [sys.executable, "-W", "ignore", sync_ranks.__file__, scenario]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(SIZE), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def loaded(folder, rank):
    return torch.load(folder / f"{rank}.pt", weights_only=False)


def results_of(scenario, folder, seconds=300):
    """What each rank of a scenario has saved."""
    with running(scenario, folder) as processes:
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            assert process.returncode == 0, f"exit status {process.returncode}: {output}"
    return [loaded(folder, rank) for rank in range(SIZE)]


def shared_results_of(scenario, temporary, seconds=300):
    """`results_of` for all workers of a test run: the first that asks runs the ranks, the others wait for it."""
    base = temporary.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks of {scenario}"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + seconds
        while not (folder / "ended").exists():
            assert time.monotonic() < end, f"the worker that runs {folder} did not end"
            time.sleep(0.2)
        return [loaded(folder, rank) for rank in range(SIZE)]
    try:
        return results_of(scenario, folder, seconds)
    finally:
        (folder / "ended").touch()


def tolerance(case):
    # A mean of 1000 deviations leaves fp32 three digits fewer.
    return 1e-10 if case.dtype == torch.float64 else 1e-3 if case.mean > 1 else 1e-5


def one_process(case, members: Sequence[int] = range(SIZE)):
    """The outcome of one process on the concatenated batches of `members`, computed in fp64."""
    layer = getattr(iternorm, f"{case.layer}{max(len(case.shape) - 1, 1)}d")
    layer = sync_ranks.prepared(layer(case.shape[0], dtype=torch.float64, **case.words))
    inputs = [
        tuple(torch.cat([t.split(case.counts)[rank] for rank in members]).double() for t in batch)
        for batch in sync_ranks.batches(case)
    ]
    return sync_ranks.run_steps(layer, inputs)


def assert_equal_to_one_process(outcomes, case, members: Sequence[int] = range(SIZE), factor=1):
    (steps, buffers), bound = one_process(case, members), factor * tolerance(case)
    counts = [case.counts[rank] for rank in members]
    for i, expected in enumerate(steps):
        parts = [outcome[0][i] for outcome in outcomes]
        for name, value in expected.items():
            for rank, (part, whole) in enumerate(zip(parts, value.split(counts), strict=True)) if name in "xy" else ():
                assert part[name].shape == whole.shape
                torch.testing.assert_close(
                    part[name].double().cpu(), whole, rtol=bound, atol=bound, msg=f"{name}, {rank}"
                )
            if name not in "xy":
                # Each rank has its part of the gradient of a parameter: their sum is the whole.
                total = sum(part[name].double().cpu() for part in parts)
                torch.testing.assert_close(total, value, rtol=bound, atol=bound * len(counts) * 10, msg=name)
    for _, own in outcomes:
        for name, value in buffers.items():
            torch.testing.assert_close(own[name].cpu().to(value.dtype), value, rtol=bound, atol=bound, msg=name)
