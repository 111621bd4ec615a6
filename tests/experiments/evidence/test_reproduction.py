"""The report: what it says of what was run, of what was not, and that the same results give the same text."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_experiment
from page_checks import assert_self_contained

from iternorm.experiments.evidence import reproduction
from iternorm.experiments.jobs import registry, results
from iternorm.experiments.jobs.findings import Claim, Comparison, Finding, Verdict, measured
from iternorm.experiments.jobs.registry import Experiment, Plan

ROOT = Path(__file__).parents[3]
MADE = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "torch": {"version": "2.13.0"},
    "iternorm": "0.1.0",
    "commit": "0123456789abcdef",
    "time": "2026-11-14T10:00:00+00:00",
}


@pytest.fixture
def tiny(monkeypatch):
    """The tiny experiment as the only one."""
    text = "Tiny: nothing.\n\nCommand: iternorm run tiny\nCost: an hour.\nDepartures: `a_b*`\nand more."
    monkeypatch.setattr(tiny_experiment, "__doc__", text)
    monkeypatch.setattr(registry, "EXPERIMENTS", ("tiny",))
    monkeypatch.setitem(sys.modules, "iternorm.experiments.paper.tiny", tiny_experiment)
    return Experiment("tiny", tiny_experiment)


def save(root, experiment, seeds, made=MADE, seconds=40.0):
    for config in experiment.jobs(Plan(seeds=seeds)):
        row = {"value": config["seed"]}
        results.save(root, results.Result(experiment.home, config, [row], seconds, made))


def written(root, folder):
    markdown, page = reproduction.write(root, folder)
    assert (markdown, page) == (folder / "reproduction.md", folder / "reproduction.html")
    text = page.read_text(encoding="utf-8")
    assert_self_contained(text)
    return markdown.read_text(encoding="utf-8"), text


def test_what_was_not_run_says_so(tiny, tmp_path):
    text, page = written(tmp_path / "r", tmp_path / "docs")
    assert "| [tiny](#tiny) | Tiny: nothing | 1 not run | 0\u00a0of\u00a04 |" in text
    assert "**Not run**: none of 4 runs is finished. What it would take: `iternorm run tiny`; an hour." in text
    assert "| It \\| works. | not run | – |" in text
    assert "| BN\\_\\* | 7.5 ± 0.1 % | not run | – |" in text
    assert "<strong>Not run</strong>" in page
    assert "![" not in text
    assert not (tmp_path / "r").exists()


def test_numbers_claims_departures_and_origin_of_what_was_run(tiny, tmp_path):
    save(tmp_path / "r", tiny, 2)
    text, page = written(tmp_path / "r", tmp_path / "docs")
    assert "| [tiny](#tiny) | Tiny: nothing | 1 holds | 8\u00a0of\u00a08 |" in text
    assert "Of 1 claims: 1 holds." in text
    # Eight values, half 0 and half 1: the deviation is that of a sample.
    assert "| BN\\_\\* | 7.5 ± 0.1 % | 0.50 ± 0.53 % | 8 |" in text
    assert "| It \\| works. | holds | a \\< b |" in text
    assert "**Command:** `iternorm run tiny`" in text
    assert "**Departures:** `a_b*` and more." in text
    assert "<code>a_b*</code> and more." in page
    assert "| A CPU, 2 cores | torch 2.13.0, iternorm 0.1.0 | 0123456789 | 2026-11-14 | 8 | 5 min 20 s |" in text
    assert "![Tiny: nothing](../r/tiny/tiny.png)" in text
    assert (tmp_path / "r" / "tiny" / "tiny.png").stat().st_size > 1000
    assert "<svg" in page


def test_a_part_of_the_runs_is_named(tiny, tmp_path):
    save(tmp_path / "r", tiny, 1)
    path = results.result_path(tmp_path / "r", "tiny", tiny.jobs()[0])
    path.write_text("{")
    text, _ = written(tmp_path / "r", tmp_path / "docs")
    assert "**Run in part**: 3 of 4 runs are finished; missing: `bn-s0`." in text
    assert f"Not used: {path} is not complete JSON" in text


def test_runs_that_are_not_alike_have_lines_of_their_own(tiny, tmp_path):
    save(tmp_path / "r", tiny, 2)
    gpu = {**MADE, "machine": {"cpu": "A CPU", "gpu": "A GPU"}, "commit": "fedcba9876543210-dirty"}
    save(tmp_path / "r", tiny, 1, made=gpu, seconds=4000)
    text, _ = written(tmp_path / "r", tmp_path / "docs")
    assert "| A GPU | torch 2.13.0, iternorm 0.1.0 | fedcba9876 (dirty) | 2026-11-14 | 4 | 4 h 26 min |" in text
    assert "| 0123456789 | 2026-11-14 | 4 |" in text


def test_the_same_results_give_the_same_text(tiny, tmp_path):
    save(tmp_path / "r", tiny, 2)
    assert written(tmp_path / "r", tmp_path / "docs") == written(tmp_path / "r", tmp_path / "docs")


@pytest.mark.parametrize(
    ("ours", "unit", "text"),
    [
        ((), "%", "not run"),
        ((7.456,), "%", "7.46 %"),
        ((7.0, 8.0), "%", "7.50 ± 0.71 %"),
        ((float("nan"),), "%", "diverged"),
        ((float("inf"), 7.0), "%", "7.00 %, 1 diverged"),
        ((1234.5,), "", "1234"),
        ((0.0123456,), "ms", "0.0123 ms"),
        ((0.0,), "ms", "0 ms"),
    ],
)
def test_our_number_is_mean_and_deviation(ours, unit, text):
    assert reproduction._ours(Comparison("x", "", ours, unit)) == text


def test_verdicts_are_words():
    claim = Claim("x", Finding(Verdict.ONE_SEED, True), "", "1 of 4 configurations")
    assert reproduction._verdict(claim) == "one seed only, points to it, in 1 of 4 configurations"
    assert reproduction._verdict(replace(claim, coverage="")) == "one seed only, points to it"
    claims = [claim, claim, *(Claim("x", Finding(verdict), "") for verdict in Verdict if verdict is not claim.verdict)]
    claims.append(Claim("x", measured(True), "", "1 of 4 configurations"))
    assert reproduction._counted(claims) == (
        "2 hold (one in 1 of 4 configurations), 1 does not hold, 1 undecided, "
        "2 on one seed only (in 1 of 4 configurations), 1 not run"
    )


def test_the_committed_report_is_of_the_committed_results():
    text = reproduction._markdown(*reproduction._collect(ROOT / "results"), ROOT / "docs")
    committed = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert text == committed, "write it again: iternorm report"
