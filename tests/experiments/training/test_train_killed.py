"""A run that is killed at any moment goes on to the same rows and the same weights, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")
# Some hundred processes, half a minute.
pytestmark = pytest.mark.rare


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    script = Path(__file__).parents[2] / "helpers" / "killed_runs.py"
    command = [sys.executable, "-W", "error", str(script), str(tmp_path_factory.mktemp("killed"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", ["epochs", "inside"])
def test_killed_at_every_step_of_writing_a_checkpoint(results, name):
    expected = results[name]["expected"]
    assert expected["left"] == [f"checkpoint-{len(expected['rows']):06d}"]
    # At each checkpoint: two files of tensors and one of text, five synchronizations, a renaming, and removals.
    assert len(results[name]["writing"]) >= 9 * len(expected["rows"])
    for trial in results[name]["writing"]:
        assert trial["outcome"] == expected
    # A checkpoint that was whole is not lost while the next one is written.
    kept = [trial["kept"] for trial in results[name]["writing"]]
    assert kept == sorted(kept)
    assert set(kept) == set(range(len(expected["rows"]) + 1))


@pytest.mark.parametrize("name", ["epochs", "inside"])
def test_killed_at_random_moments(results, name):
    for trial in results[name]["random"]:
        assert trial["kills"] >= 2
        assert trial["outcome"] == results[name]["expected"]
