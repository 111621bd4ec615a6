"""Sweeps: what is skipped, run again, passed over or failed."""

import json
import threading
from types import ModuleType
from typing import Any

import pytest
from sweeps import counted, swept
from tiny_experiment import wait_until

from iternorm.experiments.jobs import locks, overview, registry, results, stopwatch, sweep
from iternorm.experiments.jobs.overview import State
from iternorm.experiments.jobs.registry import Experiment, Plan


def test_results_hold_what_made_them(counting, tmp_path):
    outcomes = list(swept(counting, tmp_path))
    assert [outcome.what for outcome in outcomes] == ["ran", "ran"]
    content = json.loads(outcomes[0].path.read_text())
    assert content["format"] == 1
    assert content["experiment"] == "counting"
    assert content["config"] == {"job": "n1", "number": 1, "pair": [1, 1]}
    assert content["rows"] == [{"value": 2}, {"value": None}]
    assert content["seconds"] >= 0
    assert {"commit", "torch", "machine", "time", "device"} <= set(content["provenance"])
    assert (content["provenance"]["processes"], content["provenance"]["compile"]) == (1, False)
    state = overview.survey(counting, tmp_path)
    assert [result.rows[0]["value"] for result in state.finished] == [2, 4]
    assert (state.total, state.missing, state.running, state.unusable) == (2, (), 0, ())


def test_finished_jobs_are_skipped_and_an_interrupted_run_resumes(counting, tmp_path):
    run = swept(counting, tmp_path)
    next(run)
    run.close()
    assert counting.module.ran == ["n1"]
    assert counted(counting, tmp_path) == (1, 2)
    assert [outcome.skipped for outcome in swept(counting, tmp_path)] == [True, False]
    assert counting.module.ran == ["n1", "n2"]


def test_a_job_that_fails_loses_no_other(counting, tmp_path):
    works = counting.module.run

    def broken(config, context):
        (context.folder / "checkpoint").touch()
        if config["job"] == "n1":
            raise ZeroDivisionError("no")
        return works(config, context)

    counting.module.run = broken
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, failed.result, type(failed.error)) == ("failed", None, ZeroDivisionError)
    assert failed.config["job"] == "n1"
    assert not failed.path.exists()
    assert ran.what == "ran"
    # What failed keeps its checkpoint and no claim; what is saved keeps no folder.
    config, other = counting.jobs()
    assert (registry.work_folder(tmp_path, "counting", config) / "checkpoint").exists()
    assert not locks.is_held(registry.lock_path(tmp_path, "counting", config))
    assert not registry.work_folder(tmp_path, "counting", other).exists()
    assert counted(counting, tmp_path) == (1, 2)


def test_the_same_failure_twice_ends_a_sweep(tmp_path):
    module: Any = ModuleType("broken")
    module.jobs = lambda plan: [{"job": f"n{n}"} for n in range(5)]

    def run(config, context):
        raise OSError("no data" if config["job"] != "n0" else "another thing")

    module.run = run
    outcomes = list(swept(Experiment("broken", module), tmp_path))
    assert [str(outcome.error) for outcome in outcomes] == ["another thing", "no data", "no data"]
    # No empty folders stay behind.
    assert not any(path.is_dir() for path in (tmp_path / ".work" / "broken").iterdir())


def test_failures_of_one_cause_end_a_sweep_whatever_their_paths(counting, tmp_path):
    jobs = [{"job": f"n{n}"} for n in range(5)]
    for config in jobs:
        # A file where the job's folder should be: one text for each job, one error number.
        folder = registry.work_folder(tmp_path, "counting", config)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.touch()
    counting.module.jobs = lambda plan: jobs
    first, second = swept(counting, tmp_path)
    for outcome in (first, second):
        folder = registry.work_folder(tmp_path, "counting", outcome.config)
        assert str(outcome.error).startswith(f"{folder} cannot be written: File exists: ")
        assert "move away what is there" in str(outcome.error)


def test_an_interrupt_leaves_the_checkpoint_and_no_claim(counting, tmp_path):
    def interrupted(config, context):
        (context.folder / "checkpoint").touch()
        raise KeyboardInterrupt

    counting.module.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(swept(counting, tmp_path))
    config = counting.jobs()[0]
    assert (registry.work_folder(tmp_path, "counting", config) / "checkpoint").exists()
    assert overview.survey(counting, tmp_path).running == 0


def test_a_run_that_changes_its_configuration_loses_no_result(counting, tmp_path):
    def run(config, context):
        del config["job"]
        config["number"] += 1
        return [{"value": config["number"]}]

    counting.module.run = run
    assert [outcome.what for outcome in swept(counting, tmp_path)] == ["ran", "ran"]
    assert [outcome.result.rows for outcome in swept(counting, tmp_path)] == [[{"value": 2}], [{"value": 3}]]
    assert [outcome.what for outcome in swept(counting, tmp_path)] == ["finished before"] * 2


def test_what_a_job_notes_is_kept_with_its_result(counting, tmp_path):
    works = counting.module.run

    def noting(config, context):
        context.record["data"] = {"name": "pictures", "classes": config["number"]}
        return works(config, context)

    counting.module.run = noting
    first, second = swept(counting, tmp_path, options=sweep.Options(compile=True))
    made = json.loads(first.path.read_text())["provenance"]
    assert (made["data"], made["compile"]) == ({"name": "pictures", "classes": 1}, True)
    assert second.result.provenance["data"]["classes"] == 2


def test_the_commit_is_that_of_the_code_that_ran(counting, tmp_path, monkeypatch):
    commits = iter(["first", "second", "third", "fourth", "fifth"])
    monkeypatch.setattr(sweep, "provenance", lambda device="cpu": {"commit": next(commits), "device": device})
    sweep._commit.cache_clear()
    try:
        found = [outcome.result.provenance["commit"] for outcome in swept(counting, tmp_path)]
    finally:
        sweep._commit.cache_clear()
    # A checkout that moves on while jobs run changes nothing of the code in memory.
    assert found == ["first", "first"]


def test_a_resumed_jobs_time_is_that_of_all_its_processes(counting, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])

    def killed(config, context):
        (context.folder / "checkpoint").touch()
        clock[0] += 40
        raise KeyboardInterrupt

    def ends(config, context):
        clock[0] += 3
        return [{}]

    config = counting.jobs()[0]
    folder = registry.work_folder(tmp_path, "counting", config)
    for expected in ("40.000\n", "80.000\n"):
        counting.module.run = killed
        with pytest.raises(KeyboardInterrupt):
            next(swept(counting, tmp_path))
        assert (folder / "seconds").read_text() == expected
    counting.module.run = ends
    first, second = swept(counting, tmp_path)
    assert first.result.seconds == 83
    assert second.result.seconds == 3
    assert not folder.exists()


def test_a_time_is_kept_while_a_job_takes_no_step(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(stopwatch, "PERIOD_SECONDS", 0.01)
    running = threading.active_count()

    def run(config, context):
        kept = context.folder / "seconds"
        wait_until(lambda: kept.exists() and float(kept.read_text()) > 0.02)
        return [{}]

    counting.module.run = run
    assert [outcome.what for outcome in swept(counting, tmp_path)] == ["ran", "ran"]
    assert threading.active_count() == running


@pytest.mark.parametrize("kept", ["nan", "inf", "-5", "", "an hour"])
def test_a_kept_time_that_is_none_is_not_counted(counting, tmp_path, kept):
    folder = registry.work_folder(tmp_path, "counting", counting.jobs()[0])
    folder.mkdir(parents=True)
    (folder / "seconds").write_text(kept)
    outcome = next(swept(counting, tmp_path))
    assert outcome.what == "ran"
    assert 0 <= outcome.result.seconds < 60


def test_a_time_that_cannot_be_kept_costs_no_job(counting, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stopwatch, "write_text_atomically", full)
    assert [outcome.what for outcome in swept(counting, tmp_path / "other")] == ["ran", "ran"]


def test_the_context_is_what_was_asked_for(counting, tmp_path):
    seen, steps = [], []

    def run(config, context):
        seen.append(context)
        assert context.folder.is_dir()
        context.step(1, 2, loss=0.5)
        return []

    counting.module.run = run
    options = sweep.Options(tensorboard=True, compile=True)
    next(sweep.run(registry.select([counting], Plan()), tmp_path, options, progress=lambda *step: steps.append(step)))
    (context,) = seen
    name = results.result_path(tmp_path, "counting", counting.jobs()[0]).stem
    assert context.folder == tmp_path / ".work" / "counting" / name
    assert context.tensorboard == tmp_path / ".tensorboard" / "counting" / name
    assert (context.device, context.compile) == ("cpu", True)
    assert steps == [("counting", "n1", 1, 2, {"loss": 0.5})]


def test_experiments_of_one_home_share_their_runs(counting, tmp_path):
    counting.module.HOME = "house"
    list(swept(counting, tmp_path))
    other = Experiment("other", counting.module)
    assert [outcome.what for outcome in swept(other, tmp_path)] == ["finished before"] * 2
    assert {path.parent.name for path in tmp_path.glob("*/*.json")} == {"house"}


def test_survey_counts_in_words():
    assert str(State((), ({"job": "a"},), 0, ())) == "0 of 1"
    assert str(State((), ({"job": "a"},) * 3, 2, ())) == "0 of 3, 2 running"
