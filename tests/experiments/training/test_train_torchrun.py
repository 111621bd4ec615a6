"""Several processes, started by torchrun, train as one process does on the whole batch."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from checks import ended_well
from safetensors.torch import load_file
from small_runs import context, timeless

from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.train import train

SYNCHRONIZED = Recipe(
    "generated-mnist", "mlp", "SyncIterNorm T=5 d=64", 64, 0.1, 3, momentum=0.9, train_examples=512, test_examples=101
)
RECIPES = {
    "sync": SYNCHRONIZED,
    # Its statistics are those of each process, so it is another training, and the test set is that of both.
    "bn": replace(SYNCHRONIZED, norm="BN", epochs=2),
    "diverged": replace(SYNCHRONIZED, norm="plain", lr=1e6),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "recipes.json").write_text(json.dumps([recipe.to_config(job) for job, recipe in RECIPES.items()]))
    script = Path(__file__).parents[2] / "helpers" / "torchrun_training.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [*launch, str(script), str(folder / "recipes.json"), str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    # What went wrong comes first, torchrun's own account of it last.
    assert ended_well(finished.returncode, finished.stderr), finished.stderr[:6000]
    results = [json.loads((folder / f"rows-{rank}.json").read_text()) for rank in range(2)]
    assert [result["size"] for result in results] == [2, 2]
    return folder, results


def test_two_processes_with_sync_iter_norm_are_one_with_the_double_batch(runs, tmp_path):
    folder, results = runs
    expected = train(SYNCHRONIZED, context(tmp_path))
    rows = results[0]["rows"][0]
    assert len(rows) == len(expected) == 3
    for row, one in zip(rows, expected, strict=True):
        assert row["train_loss"] == pytest.approx(one["train_loss"], abs=1e-4)
        assert row["test_loss"] == pytest.approx(one["test_loss"], abs=1e-4)
        assert row["test_error"] == pytest.approx(one["test_error"], abs=100 / 101 + 1e-9)
    ours, theirs = (load_file(path / "checkpoint-000003/weights.safetensors") for path in (folder / "sync", tmp_path))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def test_all_processes_return_the_same_rows(runs):
    _, (first, second) = runs
    for rows, others in zip(first["rows"], second["rows"], strict=True):
        assert timeless(rows) == timeless(others)


def test_the_first_process_reports_and_writes(runs):
    folder, (first, second) = runs
    assert first["told"] > 0
    assert second["told"] == 0
    assert [path.name for path in (folder / "bn").iterdir()] == ["checkpoint-000002"]


def test_processes_end_together_where_a_run_diverges(runs):
    _, results = runs
    rows = results[0]["rows"][2]
    assert rows[-1]["diverged"] is True
    assert rows[-1]["train_loss"] is None
