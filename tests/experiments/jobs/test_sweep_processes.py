"""Sweeps by many processes on one folder of results."""

import os
import signal

import pytest
import tiny_experiment
from checks import ended_well
from sweeps import swept
from tiny_experiment import finish, start

from iternorm.experiments.jobs import locks, overview, registry, sweep
from iternorm.experiments.jobs.registry import Experiment, Plan

TINY = Experiment("tiny", tiny_experiment)


def test_processes_share_a_folder_and_no_job_runs_twice(tmp_path):
    # Every process begins a job before any job ends.
    arguments = ("run", "tiny", "--seeds", 3, "--results", tmp_path / "r")
    processes = [start(tmp_path, *arguments, TINY_MEET=3) for _ in range(3)]
    ends = [finish(process) for process in processes]
    assert [end[0] for end in ends] == [0, 0, 0], ends
    entries = tiny_experiment.log_entries(tmp_path / "log")
    assert sorted(entry["job"] for entry in entries) == sorted(config["job"] for config in TINY.jobs(Plan(seeds=3)))
    assert len({entry["pid"] for entry in entries}) == 3
    state = overview.survey(TINY, tmp_path / "r")
    # Seeds beyond the default are found too.
    assert (len(state.finished), state.missing, state.running) == (12, (), 0)
    assert any("running elsewhere" in output for _, output, _ in ends)
    for _, output, _ in ends:
        assert "12 jobs: " in output


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_loses_its_claim_and_not_its_checkpoint(tmp_path):
    root, log = tmp_path / "r", tmp_path / "log"
    variables = {"TINY_WAIT": tmp_path / "never", "TINY_FORK": tmp_path / "child"}
    process = start(tmp_path, "run", "tiny", "--results", root, **variables)
    try:
        tiny_experiment.wait_until((tmp_path / "child").exists)
        state = overview.survey(TINY, root)
        assert str(state) == "0 of 4, 1 running"
        passed, *others = swept(TINY, root)
        assert passed.what == "running elsewhere"
        assert [outcome.what for outcome in others] == ["ran"] * 3
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Its child lives on, and holds nothing.
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
        assert str(overview.survey(TINY, root)) == "3 of 4"
        os.environ["TINY_LOG"] = str(log)
        try:
            assert [outcome.what for outcome in swept(TINY, root)] == ["ran"] + ["finished before"] * 3
        finally:
            del os.environ["TINY_LOG"]
        assert [entry["resumed"] for entry in tiny_experiment.log_entries(log)] == [False, True]
        assert list((root / ".work" / "tiny").iterdir()) == []
    finally:
        process.kill()
        if (tmp_path / "child").exists():
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        process.communicate()


def test_under_torchrun_all_ranks_run_what_the_first_decides(tmp_path):
    pytest.importorskip("accelerate")
    root = tmp_path / "r"
    finished, claimed, *_ = registry.select([TINY], Plan())
    list(sweep.run([finished], root))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with locks.claim(registry.lock_path(root, "tiny", claimed[1])):
        # The first process ends a job long before the second begins it.
        process = start(tmp_path, "run", "tiny", "--results", root, launcher=launcher, TINY_LATE=1)
        code, output, errors = finish(process)
    assert ended_well(code, errors), errors
    ran = [(entry["job"], entry["rank"]) for entry in tiny_experiment.log_entries(tmp_path / "log")]
    assert sorted(ran) == [(job, rank) for job in ("iter-norm-s0", "plain-s0") for rank in "01"]
    # One of them speaks.
    assert output.count("plain-s0") == 1
    assert "4 jobs: 1 finished before, 1 running elsewhere, 2 ran" in output
    assert str(overview.survey(TINY, root)) == "3 of 4"
    assert list((root / ".work" / "tiny").glob("*/")) == []
