"""A study's file that changes: what another version began or finished is never taken for this one's."""

import hashlib
import subprocess
import sys

import pytest
from sweeps import swept

from iternorm.experiments.evidence import reproduction
from iternorm.experiments.jobs import overview, registry

STUDY = """
def jobs(plan):
    return [{"job": name} for name in "ab"]

def run(config, context):
    kept = context.folder / "checkpoint"
    begun = kept.read_text() if kept.exists() else None
    kept.write_text("ReLU")
    if (context.folder.parents[2] / "stop").exists():
        raise KeyboardInterrupt
    return [{"epoch": 1, "test_error": 10, "begun": begun}]
"""
EDITED = STUDY.replace("ReLU", "Tanh") + "\n# Edited.\n"


def study(folder, text=STUDY):
    folder.mkdir(exist_ok=True)
    path = folder / "mine.py"
    path.write_text(text)
    # As another process would: without the module of the version before.
    sys.modules.pop("mine", None)
    return registry.get(str(path))


@pytest.fixture
def killed(tmp_path):
    """A folder of results in which a job was killed behind its first checkpoint."""
    root = tmp_path / "r"
    root.mkdir()
    (root / "stop").touch()
    with pytest.raises(KeyboardInterrupt):
        list(swept(study(tmp_path), root))
    (root / "stop").unlink()
    return root


def test_the_provenance_has_the_file_as_it_was_imported(tmp_path):
    experiment = study(tmp_path)
    # An edit during the run is no part of it.
    (tmp_path / "mine.py").write_text(EDITED)
    outcome = next(swept(experiment, tmp_path / "r"))
    expected = {"name": "mine.py", "sha256": hashlib.sha256(STUDY.encode()).hexdigest()}
    assert outcome.result.provenance["study_file"] == expected
    # Nor is it in a process that has imported the file before.
    assert registry.get(str(tmp_path / "mine.py")).study_file == expected


def test_the_same_version_goes_on_from_its_checkpoint(tmp_path, killed):
    outcome = next(swept(study(tmp_path), killed))
    assert (outcome.set_aside, outcome.result.rows[0]["begun"]) == (None, "ReLU")


def test_another_version_starts_anew_and_says_so(tmp_path, killed):
    experiment = study(tmp_path, EDITED)
    folder = registry.work_folder(killed, "mine", experiment.jobs()[0])
    (killed / "stop").touch()
    # It is said when the job begins: here it does not end.
    with pytest.warns(UserWarning, match="was begun by") as said, pytest.raises(KeyboardInterrupt):
        next(swept(experiment, killed))
    (warning,) = said
    assert str(warning.message) == (
        f"{folder} was begun by another version of {tmp_path / 'mine.py'}; renamed to {folder.name}.unusable, and the "
        "job starts anew"
    )
    # What was begun is not lost.
    assert (folder.with_name(folder.name + ".unusable") / "checkpoint").read_text() == "ReLU"


def test_a_damaged_digest_is_that_of_another_version(tmp_path, killed):
    experiment = study(tmp_path)
    folder = registry.work_folder(killed, "mine", experiment.jobs()[0])
    (folder / "study.sha256").write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match=f"renamed to {folder.name}.unusable"):
        outcomes = list(swept(experiment, killed))
    assert [outcome.what for outcome in outcomes] == ["ran", "ran"]


def test_results_of_another_version_are_counted_and_told_apart(tmp_path):
    pytest.importorskip("matplotlib")
    first, root = study(tmp_path), tmp_path / "r"
    list(swept(first, root))
    assert overview.survey(first, root).notes == ()
    assert first.study_file["sha256"][:10] in _report(first, root, tmp_path)
    edited = study(tmp_path, EDITED)
    (root / "mine" / next(swept(first, root)).path.name).unlink()
    assert [outcome.what for outcome in swept(edited, root)] == ["ran", "finished before"]
    note = f"1 of 2 results of mine are by another version of mine.py: `{edited.command}` names them"
    assert overview.survey(edited, root).notes == (note,)
    assert overview.draw(edited, root)[1].notes == (note,)
    text = _report(edited, root, tmp_path)
    assert f"**Warning:** {note}." in text
    for experiment in (first, edited):
        assert f"; mine.py {experiment.study_file['sha256'][:10]} |" in text


def test_a_study_of_the_same_name_in_another_folder_is_another_version(tmp_path):
    root = tmp_path / "r"
    list(swept(study(tmp_path / "a"), root))
    assert overview.survey(study(tmp_path / "b"), root).notes == ()
    assert len(overview.survey(study(tmp_path / "b", EDITED), root).notes) == 1


def test_results_that_do_not_tell_are_taken(tmp_path):
    experiment, root = study(tmp_path), tmp_path / "r"
    for outcome in swept(experiment, root):
        outcome.path.write_text(outcome.path.read_text().replace("study_file", "before"))
    assert overview.survey(study(tmp_path, EDITED), root).notes == ()


def test_the_command_line_warns(tmp_path):
    pytest.importorskip("matplotlib")

    def call(*words):
        command = [sys.executable, "-m", "iternorm", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done

    (tmp_path / "mine.py").write_text(STUDY)
    assert "warning" not in call("run", "mine.py").stderr
    (tmp_path / "mine.py").write_text(EDITED)
    (path, _) = sorted((tmp_path / "results" / "mine").glob("*.json"))
    again = f"finished before, by another version of mine.py: remove results/mine/{path.name} to run it again\n"
    assert f"warning: mine a: {again}" in call("run", "mine.py").stderr
    note = "warning: 2 of 2 results of mine are by another version of mine.py: `iternorm run mine.py` names them\n"
    for words in (("ls", "mine.py"), ("plot", "mine.py"), ("report", "mine.py", "--out", ".")):
        assert call(*words).stderr == note


def _report(experiment, root, folder):
    return reproduction.write(root, folder, [experiment])[0].read_text()
