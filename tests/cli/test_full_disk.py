"""The command line on a disk that is full, or fills up meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Before files are limited: joblib warns where it cannot make a semaphore.
import sklearn.datasets  # noqa: F401
from terminal import words

from iternorm import bench
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


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system refuses, in the words of another error than a full disk's."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def invoke(invoke, tmp_path):
    (tmp_path / "nets.py").write_text(MODEL)
    return invoke


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_full_disk_is_said_before_the_work(invoke, monkeypatch, verb):
    for module, work in ((bench, "run"), (demo, "run"), (sweep, "run")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("work before the disk was looked at"))
    with files_end_at(0):
        result = invoke(*COMMANDS[verb])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: out/")
    assert "cannot be written: File too large: make room" in words(result.stderr)


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
    assert "cannot be written: File too large: make room" in words(result.stderr)


@pytest.mark.parametrize("verb", [("plot", "tiny"), ("report", "tiny", "--out", "docs")])
def test_a_full_disk_does_not_cost_the_figure_that_is_there(invoke, tiny, tmp_path, verb):
    invoke("run", "tiny", "--only", "dbn")
    invoke("plot", "tiny")
    path = tmp_path / "results" / "tiny" / "tiny.png"
    before = path.read_bytes()
    with files_end_at(4096):
        result = invoke(*verb)
    assert result.exit_code == 2
    assert "results/tiny/tiny.png cannot be written: File too large: make room" in words(result.stderr)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".tiny*"))
