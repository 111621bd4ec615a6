"""A sweep on a local Ray of two workers, in a process of its own; Ray takes seconds to start."""

import socket
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import tiny_experiment
from tiny_experiment import finish, start

from iternorm.experiments.jobs import locks, overview, ray_sweep, registry, sweep
from iternorm.experiments.jobs.registry import Experiment, Plan

TINY = Experiment("tiny", tiny_experiment)

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'iternorm[ray]'")


@with_ray
@pytest.mark.slow
def test_jobs_run_on_two_workers_and_the_driver_writes_their_results(tmp_path):
    root = tmp_path / "r"
    (tmp_path / "d").mkdir()
    jobs = registry.select([TINY], Plan(seeds=2))
    list(sweep.run(jobs[:1], root))
    # Two jobs are under way before one may end; one fails, one is claimed by this process.
    variables = {"TINY_MEET": 2, "TINY_FAIL": "plain-s1", "TINY_RAY_CPUS": 2}
    with locks.claim(registry.lock_path(root, "tiny", jobs[1][1])):
        arguments = ("run", "tiny", "--seeds", 2, "--results", root, "--data", tmp_path / "d", "--ray")
        code, output, errors = finish(start(tmp_path, *arguments, **variables))
    assert code == 2, errors
    assert "8 jobs: 1 finished before, 1 running elsewhere" in output
    assert "5 ran" in output
    assert "tiny plain-s1: no plain-s1" in " ".join(errors.split())
    entries = tiny_experiment.log_entries(tmp_path / "log")
    assert sorted(entry["job"] for entry in entries) == sorted(config["job"] for _, config in jobs[2:])
    assert len({entry["pid"] for entry in entries}) >= 2
    assert {entry["data"] for entry in entries} == {str(tmp_path / "d")}
    state = overview.survey(TINY, root)
    assert (len(state.finished), state.running) == (6, 0)
    assert all(result.provenance["device"] == "cpu" for result in state.finished)
    # The folder of the job that failed stays, the others are gone.
    assert [path.name.split("-")[0] for path in (root / ".work" / "tiny").iterdir()] == ["plain"]


@with_ray
def test_a_share_of_no_gpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gpus_per_job=0 gives a job no GPU"):
        next(ray_sweep.run([], tmp_path, gpus_per_job=0))


@with_ray
def test_ray_under_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="use one of them"):
        next(ray_sweep.run([], tmp_path))


@with_ray
@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_listens_is_named_at_once(tmp_path, prefix):
    with socket.socket() as taken:
        # Bound and not listening: nobody else can be there.
        taken.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"^there is no Ray at {address} \(.*refused\): name the address"):
            next(ray_sweep.run([], tmp_path, address=address))


def test_a_result_that_the_driver_cannot_save_loses_no_other(tmp_path):
    """What `_collect` does with a worker's rows; no Ray is needed for that."""
    ray = SimpleNamespace(get=lambda reference: reference, exceptions=SimpleNamespace(RayTaskError=(), RayError=()))
    experiment, config = registry.select([TINY], Plan())[0]
    taken = sweep.take(experiment, config, tmp_path)
    assert isinstance(taken, sweep.Taken)
    rows = [{"value": float("nan")}]
    outcome = ray_sweep._collect(ray, (rows, 1.0, {}), experiment, config, tmp_path, taken)
    taken.claim.release()
    assert (outcome.what, type(outcome.error)) == ("failed", ValueError)
    assert not outcome.path.exists()
