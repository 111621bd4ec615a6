"""The report: what it says of what was run, of what was not, and that the same results give the same text."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_experiment
from page_checks import assert_self_contained

from iternorm.experiments.evidence import blocks, outcomes, reproduction
from iternorm.experiments.jobs import registry, results
from iternorm.experiments.jobs.findings import Claim, Comparison, Finding, Verdict, measured
from iternorm.experiments.jobs.registry import Experiment, Plan
from iternorm.experiments.jobs.results import Result

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
    assert "**Not run**: none of 4 runs is finished. What it would take: the command below; an hour." in text
    assert "```sh\niternorm run tiny\n```" in text
    assert "| It \\| works. | not run | – |" in text
    assert "| BN\\_\\* | 7.5 ± 0.1 % | not run |\n" in text
    assert "<strong>Not run</strong>" in page
    assert "![" not in text
    assert not (tmp_path / "r").exists()


def test_numbers_claims_departures_and_origin_of_what_was_run(tiny, tmp_path):
    save(tmp_path / "r", tiny, 2)
    text, page = written(tmp_path / "r", tmp_path / "docs")
    assert "| [tiny](#tiny) | Tiny: nothing | 1 holds | 8\u00a0of\u00a08 |" in text
    assert "Of 1 claims of the paper: 1 holds." in text
    # Eight values, half 0 and half 1: the deviation is that of a sample.
    # And it has as many decimals as the paper's number.
    assert "| BN\\_\\* | 7.5 ± 0.1 % | 0.5 ± 0.5 % | 8 |" in text
    assert "| It \\| works. | holds | a \\< b |" in text
    assert "<pre><code>iternorm run tiny</code></pre>" in page
    assert "**Departures:** `a_b*` and more." in text
    assert "<code>a_b*</code> and more." in page
    origin = "| A CPU, 2 cores | torch 2.13.0 | unknown | 0123456 | 2026-11-14 | 8 | 5 min 20 s |"
    assert origin in text
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
    made = "torch 2.13.0 | unknown | fedcba9 and uncommitted changes | 2026-11-14"
    assert f"| A GPU | {made} | 4 | 4 h 26 min |" in text
    assert "| 0123456 | 2026-11-14 | 4 |" in text


def test_the_oldest_runs_come_first_and_a_package_has_its_version(tiny, tmp_path):
    installed = {**MADE, "commit": None, "time": "2026-11-13T10:00:00+00:00"}
    save(tmp_path / "r", tiny, 2)
    for config in tiny.jobs(Plan(seeds=2))[4:]:
        results.save(tmp_path / "r", results.Result(tiny.home, config, [{"value": 1}], 1.0, installed))
    text, _ = written(tmp_path / "r", tmp_path / "docs")
    assert text.index("| iternorm 0.1.0 | 2026-11-13 | 4 |") < text.index("| 0123456 | 2026-11-14 | 4 |")


def test_the_same_results_give_the_same_text(tiny, tmp_path):
    save(tmp_path / "r", tiny, 2)
    assert written(tmp_path / "r", tmp_path / "docs") == written(tmp_path / "r", tmp_path / "docs")


@pytest.mark.parametrize(
    ("ours", "unit", "text"),
    [
        ((), "%", "not run"),
        ((7.456,), "%", "7.46 %"),
        ((7.0, 8.0), "%", "7.50 ± 0.71 %"),
        ((0.4, 0.42), "points", "0.41 ± 0.01 points"),
        ((float("nan"),), "%", "diverged"),
        ((float("inf"), 7.0), "%", "7.00 %, 1 diverged"),
        ((1234.5,), "", "1234"),
        ((0.0123456,), "ms", "0.0123 ms"),
        ((0.0,), "ms", "0 ms"),
    ],
)
def test_our_number_is_mean_and_deviation(ours, unit, text):
    assert reproduction._ours(Comparison("x", "", ours, unit)) == text


def test_a_number_whose_runs_all_diverged_was_run():
    runs = [Result("e", {"job": "a", "seed": seed}, [{"diverged": True}], 1.0, {}) for seed in range(3)]
    with_paper, without = (outcomes.compare("x", paper, runs) for paper in ("3.89", ""))
    rows = reproduction.numbers([with_paper]).rows
    assert rows == (("x", "3.89 %", "diverged", "3 of 3 runs diverged"),)
    assert not without.is_empty
    assert outcomes.compare("x", "", []).is_empty


def test_verdicts_are_words():
    claim = Claim("x", Finding(Verdict.ONE_SEED, True), "", "1 of 4 configurations")
    assert str(reproduction.verdict_of(claim)) == "one seed only, points to it, in 1 of 4 configurations"
    assert str(reproduction.verdict_of(replace(claim, coverage=""))) == "one seed only, points to it"
    claims = [claim, claim, *(Claim("x", Finding(verdict), "") for verdict in Verdict if verdict is not claim.verdict)]
    claims.append(Claim("x", measured(True), "", "1 of 4 configurations"))
    assert str(reproduction._counted(claims)) == (
        "2 hold (one in 1 of 4 configurations), 1 does not hold, 1 undecided, "
        "2 on one seed only: 2 for (in 1 of 4 configurations), 1 not run"
    )


def test_the_committed_report_is_of_the_committed_results():
    text = blocks.markdown(*reproduction._collect(ROOT / "results"), ROOT / "docs")
    committed = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert text == committed, "write it again: iternorm report"


def test_verdicts_have_colours_and_a_legend(tiny, tmp_path):
    save(tmp_path / "r", tiny, 1)
    text, page = written(tmp_path / "r", tmp_path / "docs")
    assert '<span class="verdict holds">1 holds</span>' in page or '<span class="verdict holds">holds</span>' in page
    for verdict in Verdict:
        name = verdict.value.replace(" ", "-")
        # The rule of the style sheet, and the legend.
        assert f".{name} {{" in page
        assert f'<span class="verdict {name}">{verdict.value}</span>' in page
        assert f"| {verdict.value} | " in text


def test_sections_have_ids_and_titles_and_lead_back(tiny, tmp_path):
    text, page = written(tmp_path / "r", tmp_path / "docs")
    assert '<a id="tiny"></a>\n\n## tiny: Tiny: nothing\n' in text
    assert "<h2>tiny: Tiny: nothing</h2>" in page
    assert '<span id="tiny"></span>' in page
    assert '<a href="#summary">' in page


def test_a_study_without_claims_has_no_summary_to_lead_back_to():
    page = blocks.page("Mine", "", [], [blocks.Section("mine", "Mine", ["Nothing."])])
    assert "<h2>mine: Mine</h2>" in page
    assert "ummary" not in page


def test_a_figure_in_a_folder_with_a_space_is_shown(tiny, tmp_path):
    save(tmp_path / "my results", tiny, 1)
    text, _ = written(tmp_path / "my results", tmp_path / "docs")
    assert "![Tiny: nothing](../my%20results/tiny/tiny.png)" in text


def test_how_a_result_was_made_is_told_where_it_is_known(tiny, tmp_path):
    made = {**MADE, "processes": 2, "precision": "bf16", "compile": True}
    made["data"] = {
        "name": "pictures", "classes": 10, "train_images": 5000, "test_images": 3925, "listing_sha256": "ab" * 32,
    }  # fmt: skip
    save(tmp_path / "r", tiny, 1, made=made)
    text, _ = written(tmp_path / "r", tmp_path / "docs")
    assert "| 2 processes, bf16, compiled | 0123456 |" in text
    assert (
        "**Data:** pictures: 10 classes, 5,000 training and 3,925 test images; sha256 of the list of files "
        "abababababababab." in text
    )


@pytest.mark.parametrize("counts", [{}, {"test_images": "many", "classes": None, "listing_sha256": 1}])
def test_data_that_noted_less_are_told_as_far_as_known(tiny, tmp_path, counts):
    save(tmp_path / "r", tiny, 1, made={**MADE, "data": {"name": "pictures", "train_images": 1200, **counts}})
    text, _ = written(tmp_path / "r", tmp_path / "docs")
    assert "**Data:** pictures: 1,200 training images." in text


def test_a_column_that_would_be_empty_is_left_out():
    numbers = [Comparison("a", "", (1.0,)), Comparison("b", "", ())]
    assert reproduction.numbers(numbers).columns == ("number", "ours", "n")
    assert reproduction.numbers(numbers).rows[1] == ("b", "not run", "–")
    numbers.append(Comparison("c", "3.5", (), note="why"))
    assert reproduction.numbers(numbers).columns == ("number", "the paper", "ours", "n", "note")
    assert reproduction.numbers(numbers).rows[0] == ("a", "–", "1.00 %", "1", "")


def test_a_mean_of_repeats_says_of_how_many():
    (row,) = reproduction.numbers([Comparison("a", "", (1.5,), "", count=10)]).rows
    assert row[-1] == "10"


def test_every_command_can_be_pasted():
    for name in registry.EXPERIMENTS:
        command = registry.get(name).field("Command")
        assert command.startswith(f"iternorm run {name} ")
        assert not set("[]<>|") & set(command)
        assert "FOLDER" not in command
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_a_report_of_some_experiments(tiny, tmp_path):
    save(tmp_path / "r", tiny, 1)
    paths = reproduction.write(tmp_path / "r", tmp_path, [tiny])
    assert [path.name for path in paths] == ["tiny.md", "tiny.html"]
    assert paths[0].read_text().startswith("# Tiny: nothing\n")
    assert_self_contained(paths[1].read_text())
    (several, _) = reproduction.write(tmp_path / "r", tmp_path, [tiny, replace(tiny, id="other")])
    assert several.name == "report.md"
