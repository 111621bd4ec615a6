"""What is shown while jobs run: bars on a terminal, lines in a log."""

import io
from pathlib import Path

import pytest
import tiny_experiment
from rich.console import Console
from rich.progress import Progress

from iternorm.experiments.jobs import console, sweep
from iternorm.experiments.jobs.registry import Experiment


@pytest.fixture
def tiny():
    return Experiment("tiny", tiny_experiment)


def test_bars_show_what_a_job_passes(tiny):
    with Progress(disable=True) as progress:
        bars = console.Bars(progress, [(tiny, config) for config in tiny.jobs()])
        bars.step("tiny", "bn-s0", 3, 10, {"loss": 0.25, "error": 7.5, "rate": 12345.0})
        bars.step("tiny", "dbn-s0", 1, 10, {"loss": None})
        shown = [(task.description, task.completed, task.total, task.fields["values"]) for task in progress.tasks]
        assert shown == [
            ("jobs", 0, 4, ""),
            ("tiny bn-s0", 3, 10, "loss 0.25, error 7.50 %, 12,345 images/s"),
            ("tiny dbn-s0", 1, 10, "loss –"),
        ]


def test_a_log_gets_a_line_every_half_minute(tiny, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    written = io.StringIO()
    lines = console.Lines(Console(file=written, width=20))
    # A resumed job: 40 of 100 were done before.
    for seconds, done in ((100.0, 40), (129.9, 69), (130.0, 70), (159.9, 79), (160.0, 80)):
        clock[0] = seconds
        lines.step("tiny", "bn-s0", done, 100, {"loss": 0.25, "rate": 12345.0} if done > 70 else {})
    lines.step("tiny", "dbn-s0", 1, 10, {})
    assert written.getvalue().splitlines() == [
        "tiny bn-s0: 70 of 100, 30.0 s left",
        "tiny bn-s0: 80 of 100, loss 0.25, 12,345 images/s, 30.0 s left",
    ]
    # One that ended and comes again begins anew.
    lines.ended(sweep.Outcome(tiny, {"job": "bn-s0"}, Path("x"), "failed"))
    clock[0] = 200.0
    lines.step("tiny", "bn-s0", 1, 100, {})
    assert len(written.getvalue().splitlines()) == 2
