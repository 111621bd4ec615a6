"""Sweeps over damaged files, a full disk and folders that cannot be written: what is named, and that no job is lost."""

import errno
import json
import math
import os
import re
import shutil
import tempfile

import pytest
import torch
from sweeps import swept

from iternorm.experiments.jobs import locks, overview, registry, results


def changed(field, value):
    """What puts a value into a results file."""
    return lambda text: json.dumps({**json.loads(text), field: value})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is not complete JSON"),
        (lambda text: "", "is not complete JSON"),
        (lambda text: "[]", "has format None"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "has format 0, this version of iternorm writes 1"),
        (lambda text: text.replace('"number": 1', '"number": 7'), "result of another configuration"),
        (lambda text: text.replace('"seconds"', '"second"'), "has no 'seconds'"),
        (lambda text: "[" * 100_000, "is not complete JSON"),
        *((changed("rows", value), "one or more objects is needed") for value in ([], None, [1, 2], {}, "abc")),
        *((changed("seconds", value), "a finite number of 0") for value in ("x", None, -1, math.nan, math.inf, [])),
        *((changed("provenance", value), "an object is needed") for value in (None, "x", [])),
        *(
            (changed("provenance", {name: value}), f"'{name}' of its provenance is {value!r}")
            for name, value in (("machine", "x"), ("torch", None), ("data", []), ("processes", "2"), ("commit", 5))
        ),
    ],
)
def test_unusable_files_are_named_set_aside_and_run_again(counting, tmp_path, damage, reason):
    path = next(swept(counting, tmp_path)).path
    good, bad = path.read_text(), damage(path.read_text())
    path.write_text(bad)
    state = overview.survey(counting, tmp_path)
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


def test_what_cannot_be_read_keeps_nothing_else_from_being_listed(counting, tmp_path, monkeypatch):
    first, second = swept(counting, tmp_path)
    first.path.unlink()
    first.path.mkdir()
    # A file where the folder of claims was.
    shutil.rmtree(tmp_path / ".work")
    (tmp_path / ".work").touch()
    state = overview.survey(counting, tmp_path)
    assert [result.rows for result in state.finished] == [second.result.rows]
    (reason,) = state.unusable
    assert str(first.path) in reason
    assert (len(state.missing), state.running) == (1, 0)


def test_a_note_that_the_report_could_not_read_is_not_saved(counting, tmp_path):
    def run(config, context):
        context.record["data"] = "pictures" if config["job"] == "n1" else {"name": "pictures"}
        return [{"value": 1.0}]

    counting.module.run = run
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    assert "'data' of its provenance is 'pictures', and an object is needed" in str(failed.error)
    assert not failed.path.exists()


def test_a_file_that_is_not_text_is_named_set_aside_and_run_again(counting, tmp_path):
    path = next(swept(counting, tmp_path)).path
    # What PowerShell makes of a text that is redirected into a file.
    bad = path.read_text().encode("utf-16")
    path.write_bytes(bad)
    assert f"{path} is not UTF-8 text" in overview.survey(counting, tmp_path).unusable[0]
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


def test_a_result_that_cannot_be_saved_is_kept_among_temporary_files(counting, tmp_path, monkeypatch):
    root, elsewhere = tmp_path / "results", tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def run(config, context):
        if config["job"] == "n1":
            results.result_path(root, "counting", config).mkdir(parents=True)
        return [{"value": 5.0}]

    counting.module.run = run
    failed, ran = swept(counting, root)
    assert (failed.what, ran.what) == ("failed", "ran")
    (kept,) = elsewhere.glob("*/*.json")
    assert str(failed.error) == (
        f"{failed.path} could not be saved: Is a directory: make room or change permissions there, and move {kept} "
        "there, which is the result"
    )
    # Moved there it is a result like others.
    failed.path.rmdir()
    kept.rename(failed.path)
    assert [outcome.what for outcome in swept(counting, root)] == ["finished before"] * 2


def test_a_disk_that_fills_up_is_told_once_and_ends_the_sweep(counting, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    counting.module.jobs = lambda plan: [{"job": f"n{number}", "number": number} for number in range(5)]
    monkeypatch.setattr(os, "replace", full)
    outcomes = list(swept(counting, tmp_path))
    # The errors name different files and have one cause. Temporary files have no room here either.
    assert [outcome.what for outcome in outcomes] == ["failed", "failed"]
    for outcome in outcomes:
        assert str(outcome.error).startswith(f"{outcome.path} could not be saved: No space left on device: make room")
        assert str(outcome.error).endswith("run the job again; its checkpoint, where it writes any, is kept")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"value": float("nan")}],
            "the row {'value': nan}: plain values, and None for what is not finite, are needed; "
            'a run that diverged has "diverged": True in its last row',
        ),
        ([{"value": torch.ones(1)}], r"the row {'value': tensor\(\[1.\]\)}: plain values.*are needed \("),
        ([{"value": 1.0, 2: 3.0}], "the row {'value': 1.0, 2: 3.0}: names that are strings are needed"),
        ([1.0], "the row 1.0: a mapping of plain values is needed"),
        ({"value": 1.0}, "{'value': 1.0}: a list of rows"),
        (None, "None: a list of rows"),
        ([], "no rows: one or more are needed"),
    ],
)
def test_rows_that_are_none_fail_their_job_alone(counting, tmp_path, rows, message):
    counting.module.run = lambda config, context: rows if config["job"] == "n1" else [{"value": 1.0}]
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    assert re.match(rf"run\(\) of counting returns {message}", str(failed.error))
    assert not failed.path.exists()
    assert not registry.work_folder(tmp_path, "counting", failed.config).exists()


def test_a_note_that_is_not_json_fails_its_job_alone(counting, tmp_path):
    def run(config, context):
        context.record["note"] = torch.ones(1) if config["job"] == "n1" else 1.0
        return [{"value": 1.0}]

    counting.module.run = run
    failed, ran = swept(counting, tmp_path)
    assert (failed.what, ran.what) == ("failed", "ran")
    told = "run() of counting notes {'note': tensor([1.])} in context.record: plain values are needed"
    assert str(failed.error).startswith(told)
    assert not failed.path.exists()


def test_rows_may_come_one_by_one(counting, tmp_path):
    counting.module.run = lambda config, context: ({"value": value} for value in range(3))
    ran, _ = swept(counting, tmp_path)
    assert results.load(tmp_path, "counting", ran.config).rows == [{"value": 0}, {"value": 1}, {"value": 2}]


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
    assert f"{lock} cannot be written: Is a directory: make room, change permissions or" in str(outcomes[1].error)


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
