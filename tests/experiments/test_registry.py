"""Experiments: their results on disk, what is skipped and what is run again, and every one at its smoke size."""

import itertools
import json
from types import ModuleType

import pytest

from iternorm.analysis.report import write_text_atomically
from iternorm.experiments import registry, results, tableA1
from iternorm.experiments.registry import Experiment


@pytest.fixture
def counting():
    """An experiment of two jobs that notes each run."""
    module = ModuleType("counting", "Counts.\n\nCost: nothing.")
    module.ran = []

    def run(config, device, step):
        module.ran.append(config["job"])
        step(1, 1)
        return [{"value": 2 * config["number"]}, {"value": None}]

    module.jobs = lambda smoke, device: [{"job": f"n{n}", "number": n, "pair": (n, n)} for n in (1, 2)]
    module.run = run
    return Experiment("counting", module)


def test_results_hold_what_made_them(counting, tmp_path):
    outcomes = list(registry.run(counting, tmp_path))
    assert [outcome.skipped for outcome in outcomes] == [False, False]
    content = json.loads(outcomes[0].path.read_text())
    assert content["format"] == 1
    assert content["experiment"] == "counting"
    assert content["config"] == {"job": "n1", "number": 1, "pair": [1, 1]}
    assert content["rows"] == [{"value": 2}, {"value": None}]
    assert content["seconds"] >= 0
    assert {"commit", "torch", "machine", "time", "device"} <= set(content["provenance"])
    assert [result.rows[0]["value"] for result in registry.load(counting, tmp_path)] == [2, 4]
    assert registry.count_finished(counting, tmp_path) == (2, 2)


def test_finished_jobs_are_skipped_and_an_interrupted_run_resumes(counting, tmp_path):
    run = registry.run(counting, tmp_path)
    next(run)
    run.close()
    assert counting.module.ran == ["n1"]
    assert registry.count_finished(counting, tmp_path) == (1, 2)
    assert [outcome.skipped for outcome in registry.run(counting, tmp_path)] == [True, False]
    assert counting.module.ran == ["n1", "n2"]


def test_a_job_that_fails_leaves_no_file(counting, tmp_path):
    def broken(config, device, step):
        raise RuntimeError("no")

    counting.module.run = broken
    with pytest.raises(RuntimeError, match="no"):
        list(registry.run(counting, tmp_path))
    assert registry.count_finished(counting, tmp_path) == (0, 2)


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
    path = next(registry.run(counting, tmp_path)).path
    good, bad = path.read_text(), damage(path.read_text())
    path.write_text(bad)
    with pytest.raises(results.UnusableResultError, match=reason):
        registry.load(counting, tmp_path)
    outcome = next(registry.run(counting, tmp_path))
    assert reason in outcome.set_aside
    assert str(path) in outcome.set_aside
    aside = path.with_name(path.name + ".unusable")
    assert aside.name in outcome.set_aside
    assert aside.read_text() == bad
    assert json.loads(path.read_text())["rows"] == json.loads(good)["rows"]
    # A second one does not overwrite the first.
    path.write_text("{")
    next(registry.run(counting, tmp_path))
    assert aside.read_text() == bad
    assert aside.with_name(aside.name + ".1").read_text() == "{"


def test_path_is_a_function_of_the_configuration(tmp_path):
    config = {"job": "a", "x": 1, "y": [1, 2]}
    path = results.result_path(tmp_path, "fig", config)
    assert path == results.result_path(tmp_path, "fig", {"y": (1, 2), "x": 1, "job": "a"})
    assert path != results.result_path(tmp_path, "fig", {**config, "x": 2})
    with pytest.raises(ValueError, match="'a/b'"):
        results.result_path(tmp_path, "fig", {"job": "a/b"})


def test_missing_results_are_named(counting, tmp_path):
    next(registry.run(counting, tmp_path))
    with pytest.raises(ValueError, match=r"1 of 2 results are missing .*\(n2\).*`iternorm run counting`"):
        registry.load(counting, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "near"), [("fig", "fig"), ("figa2", "figA2"), ("table1", "tableA1"), ("fig44", "fig4")]
)
def test_unknown_ids_get_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=rf"'{wrong}': did you mean .*{near}.*all are"):
        registry.get(wrong)


def test_ids_without_likeness_get_the_list():
    with pytest.raises(ValueError, match=r"'zebra': all are: fig1"):
        registry.get("zebra")


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
class TestEveryExperiment:
    def test_docstring_says_what_a_reader_needs(self, name):
        experiment = registry.get(name)
        assert experiment.title.endswith(".")
        assert experiment.cost
        for word in ("Reproduces:", "Claim:", f"Command: iternorm run {name}", "The paper got:", "Departures:"):
            assert word in experiment.module.__doc__

    def test_jobs_have_their_own_files(self, name, tmp_path):
        experiment = registry.get(name)
        configs = experiment.jobs() + experiment.jobs(smoke=True)
        assert len({results.result_path(tmp_path, name, config) for config in configs}) == len(configs)

    def test_smoke_run_and_plot(self, name, tmp_path):
        experiment = registry.get(name)
        steps = []
        for outcome in registry.run(experiment, tmp_path, smoke=True, progress=lambda *values: steps.append(values)):
            assert not outcome.skipped
            assert outcome.result.rows
        # Every job reports its end.
        finished = {job for job, done, total in steps if done == total}
        assert finished == {config["job"] for config in experiment.jobs(smoke=True)}
        loaded = registry.load(experiment, tmp_path, smoke=True)
        figure = experiment.plot(loaded)
        figure.savefig(tmp_path / "figure.png", dpi=50)
        assert (tmp_path / "figure.png").stat().st_size > 2000
        assert all(axes.has_data() for axes in figure.axes)


def rows_of(name, tmp_path):
    experiment = registry.get(name)
    list(registry.run(experiment, tmp_path, smoke=True))
    return [
        (result.config, {row["operation"]: row for row in result.rows})
        for result in registry.load(experiment, tmp_path, smoke=True)
    ]


def test_gaussian_figures_are_repeatable(tmp_path):
    assert rows_of("fig4", tmp_path / "a") == rows_of("fig4", tmp_path / "b")


def test_fig1_shows_what_the_paper_says(tmp_path):
    experiment = registry.get("fig1")
    (result,) = [outcome.result for outcome in registry.run(experiment, tmp_path, smoke=True)]
    panels = {row["panel"]: row for row in result.rows}
    covariance = panels["BN"]["covariance"]
    assert covariance[0][0] == pytest.approx(1, abs=1e-3)
    assert covariance[0][1] > 0.3
    for row, expected in zip(panels["DBN"]["covariance"], ([1, 0], [0, 1]), strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
    # Step by step both variances approach 1, that of the larger eigenvalue first.
    steps = [panels[f"IterNorm T={steps}"]["variance_along_eigenvectors"] for steps in (0, 1, 2, 3, 5)]
    for before, after in itertools.pairwise(steps):
        assert abs(1 - after[0]) <= abs(1 - before[0])
        assert abs(1 - after[1]) < abs(1 - before[1])
    assert all(abs(1 - large) < abs(1 - small) for large, small in steps)


def test_fig2_spreads_less_with_the_larger_batch(tmp_path):
    experiment = registry.get("fig2")
    small, large = (outcome.result.rows[0] for outcome in registry.run(experiment, tmp_path, smoke=True))
    assert (small["batch_size"], large["batch_size"]) == (16, 64)
    assert large["snd"] < small["snd"]


def test_table_a1_has_the_papers_layers(tmp_path):
    experiment = registry.get("tableA1")
    (result,) = [outcome.result for outcome in registry.run(experiment, tmp_path, smoke=True)]
    paper = {row["name"]: row["paper_ms"] for row in result.rows if row["paper_ms"]}
    assert paper["conv3x3"] == 5.65
    assert paper["IterNorm T=5 d=64"] == 7.40
    assert all(row["median_ms"] > 0 for row in result.rows)


def test_table_a1_takes_eager_calls_of_the_gpus_benchmark():
    def rival(name, layout, milliseconds, ratio):
        samples = [milliseconds - 0.1, milliseconds, milliseconds + 0.2]
        timing = {"eager_ms": milliseconds, "eager_samples_ms": samples if milliseconds else []}
        return {"name": name, "layout": layout, "eager_ratio_to_convolution": ratio, **timing}

    rivals = [rival("conv3x3", "NCHW", 2.0, 1.0), rival("conv3x3", "NHWC", 1.0, 1.0)]
    rivals += [rival("IterNorm T=5 d=64", "NCHW", 1.0, 0.5), rival("DBN d=16", "NCHW", 8.0, 4.0)]
    rows = tableA1.cuda_rows({"shape": [64, 64, 32, 32], "failed": None, "rivals": rivals})
    assert [(row["name"], row["median_ms"], row["ratio_to_convolution"], row["paper_ms"]) for row in rows] == [
        ("conv3x3", 2.0, 1.0, 5.65),
        ("IterNorm T=5 d=64", 1.0, 0.5, 7.40),
        ("DBN d=16", 8.0, 4.0, 15.92),
    ]
    # Groups of 64 of 128 channels are not what the paper timed.
    rows = tableA1.cuda_rows({"shape": [64, 128, 32, 32], "failed": None, "rivals": rivals})
    assert [row["paper_ms"] for row in rows] == [13.62, None, 35.02]
    with pytest.raises(RuntimeError, match="out of memory"):
        tableA1.cuda_rows({"shape": [64, 64, 32, 32], "failed": "out of memory", "rivals": []})


def test_atomic_write_is_what_results_use(tmp_path, monkeypatch):
    config = {"job": "a"}
    seen = []
    monkeypatch.setattr(
        results, "write_text_atomically", lambda path, text: seen.append(write_text_atomically(path, text))
    )
    results.save(tmp_path, results.Result("x", config, [], 0.0, {}))
    assert seen == [results.result_path(tmp_path, "x", config)]
    assert results.load(tmp_path, "x", config).rows == []
