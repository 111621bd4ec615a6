"""What measures for minutes on a disk that is full, or fills up meanwhile."""

import pytest

# Before files are limited: joblib warns where it cannot make a semaphore.
import sklearn.datasets  # noqa: F401
from full_disk import files_end_at
from typer.testing import CliRunner

from iternorm import bench, cli
from iternorm.experiments.demo import runs as demo
from iternorm.experiments.jobs import sweep

MODEL = """
from torch import nn

def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12))
"""
COMMANDS = {
    "analyze": ("analyze", "nets.py:mlp", "--data", "digits", "--snd", "off", "--json", "out/a.json"),
    "bench": ("bench", "--json", "out/b.json"),
    "demo": ("demo", "--epochs", 1, "--seeds", 1, "--out", "out"),
    "run": ("run", "fig1", "--results", "out"),
}
TABLES = {"analyze": "κ out", "bench": "BatchNorm2d", "demo": "condition"}


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODEL)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_full_disk_is_said_before_the_work(invoke, monkeypatch, verb):
    for module, work in ((bench, "run"), (demo, "run"), (sweep, "run")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("work before the disk was looked at"))
    with files_end_at(0):
        result = invoke(*COMMANDS[verb])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: out/")
    assert "cannot be written: File too large: make room" in " ".join(result.stderr.split())


@pytest.mark.parametrize("verb", TABLES)
def test_a_disk_that_fills_up_does_not_cost_the_table(invoke, monkeypatch, verb):
    case = {"rivals": [], "title": "BatchNorm2d"}
    monkeypatch.setattr(bench, "run", lambda **_: {"cases": [case]})
    monkeypatch.setattr(bench, "table", lambda case: case["title"])
    monkeypatch.setattr(bench, "notes", lambda result: [])
    trained = demo.run(epochs=1, seed=0, num_seeds=1) if verb == "demo" else None
    monkeypatch.setattr(demo, "run", lambda **_: trained)
    # Room for the look before the work, and for nothing else.
    with files_end_at(1):
        result = invoke(*COMMANDS[verb])
    assert result.exit_code == 2
    assert TABLES[verb] in result.stdout
    assert "cannot be written: File too large: make room" in " ".join(result.stderr.split())
