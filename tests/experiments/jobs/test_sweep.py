"""Sweeps: what is skipped, run again, passed over or failed, and many processes on one folder of results."""

import errno
import json
import os
import signal
from types import ModuleType
from typing import Any

import pytest
import tiny_experiment
from checks import ended_well
from tiny_experiment import finish, start

from iternorm.experiments.jobs import locks, registry, results, stopwatch, sweep
from iternorm.experiments.jobs.registry import Experiment, Plan, State

TINY = Experiment("tiny", tiny_experiment)


@pytest.fixture
def counting():
    """An experiment of two jobs that notes each run."""
    module: Any = ModuleType("counting", "Counts.\n\nCost: nothing.")
    module.ran = []

    def run(config, context):
        module.ran.append(config["job"])
        context.step(1, 1)
        return [{"value": 2 * config["number"]}, {"value": None}]

    module.jobs = lambda plan: [{"job": f"n{n}", "number": n, "pair": (n, n)} for n in (1, 2)]
    module.run = run
    return Experiment("counting", module)


def swept(experiment, root, plan=None, **options) -> Any:
    return sweep.run(registry.select([experiment], plan or Plan()), root, **options)


def counted(experiment, root):
    state = registry.survey(experiment, root)
    return len(state.finished), state.total


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
    state = registry.survey(counting, tmp_path)
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


def test_an_interrupt_leaves_the_checkpoint_and_no_claim(counting, tmp_path):
    def interrupted(config, context):
        (context.folder / "checkpoint").touch()
        raise KeyboardInterrupt

    counting.module.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(swept(counting, tmp_path))
    config = counting.jobs()[0]
    assert (registry.work_folder(tmp_path, "counting", config) / "checkpoint").exists()
    assert registry.survey(counting, tmp_path).running == 0


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
        for _ in range(4):
            clock[0] += 10
            context.step(1, 2)
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


def test_a_time_that_cannot_be_kept_costs_no_job(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(stopwatch, "PERIOD_SECONDS", 0)
    (first, *_) = swept(counting, tmp_path)
    assert first.what == "ran"

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stopwatch, "write_text_atomically", full)
    assert [outcome.what for outcome in swept(counting, tmp_path / "other")] == ["ran", "ran"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is not complete JSON"),
        (lambda text: "", "is not complete JSON"),
        (lambda text: "[]", "has format None"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "has format 0, this version of iternorm writes 1"),
        (lambda text: text.replace('"number": 1', '"number": 7'), "result of another configuration"),
        (lambda text: text.replace('"seconds"', '"second"'), "has no 'seconds'"),
    ],
)
def test_unusable_files_are_named_set_aside_and_run_again(counting, tmp_path, damage, reason):
    path = next(swept(counting, tmp_path)).path
    good, bad = path.read_text(), damage(path.read_text())
    path.write_text(bad)
    state = registry.survey(counting, tmp_path)
    assert len(state.missing) == 2
    assert reason in state.unusable[0]
    outcome = next(swept(counting, tmp_path))
    assert reason in str(outcome.set_aside)
    assert str(path) in str(outcome.set_aside)
    aside = path.with_name(path.name + ".unusable")
    assert aside.name in str(outcome.set_aside)
    assert aside.read_text() == bad
    assert json.loads(path.read_text())["rows"] == json.loads(good)["rows"]
    # A second one does not overwrite the first.
    path.write_text("{")
    next(swept(counting, tmp_path))
    assert aside.read_text() == bad
    assert aside.with_name(aside.name + ".1").read_text() == "{"


def test_a_file_that_is_not_text_is_named_set_aside_and_run_again(counting, tmp_path):
    path = next(swept(counting, tmp_path)).path
    # What PowerShell makes of a text that is redirected into a file.
    bad = path.read_text().encode("utf-16")
    path.write_bytes(bad)
    assert f"{path} is not UTF-8 text" in registry.survey(counting, tmp_path).unusable[0]
    outcome = next(swept(counting, tmp_path))
    assert outcome.what == "ran"
    assert f"{path} is not UTF-8 text" in str(outcome.set_aside)
    assert path.with_name(path.name + ".unusable").read_bytes() == bad
    assert results.load(tmp_path, "counting", counting.jobs()[0]).rows


def test_what_was_set_aside_is_told_where_the_job_fails_too(counting, tmp_path):
    path = next(swept(counting, tmp_path)).path
    path.write_text("{")

    def broken(config, context):
        raise ZeroDivisionError("no")

    counting.module.run = broken
    outcome = next(swept(counting, tmp_path))
    assert outcome.what == "failed"
    assert "is not complete JSON" in str(outcome.set_aside)


def test_a_result_that_cannot_be_saved_names_its_path_and_loses_no_other(counting, tmp_path, monkeypatch):
    real = results.write_text_atomically

    def full(path, text):
        if path.name.startswith("n1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, text)

    def run(config, context):
        (context.folder / "checkpoint").touch()
        return [{}]

    counting.module.run = run
    monkeypatch.setattr(results, "write_text_atomically", full)
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    assert str(failed.error).startswith(f"{failed.path} could not be saved: No space left on device")
    # What the job had kept is still there for the next run, and nobody holds it.
    config = counting.jobs()[0]
    assert (registry.work_folder(tmp_path, "counting", config) / "checkpoint").exists()
    assert not locks.is_held(registry.lock_path(tmp_path, "counting", config))


def test_rows_that_are_not_json_fail_their_job_alone(counting, tmp_path):
    counting.module.run = lambda config, context: [{"value": float("nan") if config["job"] == "n1" else 1.0}]
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    assert not failed.path.exists()


def test_a_job_that_cannot_be_claimed_or_read_loses_no_other(counting, tmp_path, monkeypatch):
    config, other = counting.jobs()
    # A folder where a file should be: it is neither a result nor to be set aside.
    results.result_path(tmp_path, "counting", config).mkdir(parents=True)
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    assert str(failed.path) in str(failed.error)
    ran.path.unlink()
    lock = registry.lock_path(tmp_path, "counting", other)
    lock.mkdir(parents=True)
    outcomes = list(swept(counting, tmp_path))
    assert [outcome.what for outcome in outcomes] == ["failed", "failed"]
    assert str(lock) in str(outcomes[1].error)


def test_a_file_that_cannot_be_set_aside_keeps_no_claim(counting, tmp_path, monkeypatch):
    path = next(swept(counting, tmp_path)).path
    path.write_text("{")

    def locked(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(results, "set_aside", locked)
    outcome = next(swept(counting, tmp_path))
    assert outcome.what == "failed"
    assert str(path) in str(outcome.error)
    assert not locks.is_held(registry.lock_path(tmp_path, "counting", counting.jobs()[0]))
    assert path.read_text() == "{"


def test_a_file_that_somebody_makes_again_is_not_set_aside(counting, tmp_path):
    path = next(swept(counting, tmp_path)).path
    path.write_text("{")
    with locks.claim(registry.lock_path(tmp_path, "counting", counting.jobs()[0])):
        assert next(swept(counting, tmp_path)).what == "running elsewhere"
    assert path.read_text() == "{"


def test_a_result_that_arrives_before_the_claim_is_taken(counting, tmp_path, monkeypatch):
    config = counting.jobs()[0]
    real = locks.claim

    def late(path):
        results.save(tmp_path, results.Result("counting", config, [{"value": 9}], 1.0, {}))
        return real(path)

    monkeypatch.setattr(locks, "claim", late)
    assert next(swept(counting, tmp_path)).result.rows == [{"value": 9}]
    assert counting.module.ran == []
    assert not locks.is_held(registry.lock_path(tmp_path, "counting", config))


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


def test_processes_share_a_folder_and_no_job_runs_twice(tmp_path):
    # Every process begins a job before any job ends.
    arguments = ("run", "tiny", "--seeds", 3, "--results", tmp_path / "r")
    processes = [start(tmp_path, *arguments, TINY_MEET=3) for _ in range(3)]
    ends = [finish(process) for process in processes]
    assert [end[0] for end in ends] == [0, 0, 0], ends
    entries = tiny_experiment.log_entries(tmp_path / "log")
    assert sorted(entry["job"] for entry in entries) == sorted(config["job"] for config in TINY.jobs(Plan(seeds=3)))
    assert len({entry["pid"] for entry in entries}) == 3
    state = registry.survey(TINY, tmp_path / "r")
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
        state = registry.survey(TINY, root)
        assert str(state) == "0 of 4, 1 running"
        passed, *others = swept(TINY, root)
        assert passed.what == "running elsewhere"
        assert [outcome.what for outcome in others] == ["ran"] * 3
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Its child lives on, and holds nothing.
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
        assert str(registry.survey(TINY, root)) == "3 of 4"
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
        process = start(tmp_path, "run", "tiny", "--results", root, launcher=launcher)
        code, output, errors = finish(process)
    assert ended_well(code, errors), errors
    ran = [(entry["job"], entry["rank"]) for entry in tiny_experiment.log_entries(tmp_path / "log")]
    assert sorted(ran) == [(job, rank) for job in ("iter-norm-s0", "plain-s0") for rank in "01"]
    # One of them speaks.
    assert output.count("plain-s0") == 1
    assert "4 jobs: 1 finished before, 1 running elsewhere, 2 ran" in output
    assert str(registry.survey(TINY, root)) == "3 of 4"
    assert list((root / ".work" / "tiny").glob("*/")) == []


def test_survey_counts_in_words():
    assert str(State((), ({"job": "a"},), 0, ())) == "0 of 1"
    assert str(State((), ({"job": "a"},) * 3, 2, ())) == "0 of 3, 2 running"
