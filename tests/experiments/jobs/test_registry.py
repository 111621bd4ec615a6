"""Experiments: their list, their jobs and docstrings, and every one at its smoke size."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from iternorm.experiments.jobs import overview, registry, results, sweep
from iternorm.experiments.jobs.findings import Verdict, measured
from iternorm.experiments.jobs.registry import Experiment, Plan
from iternorm.experiments.paper import tableA1
from iternorm.report.files import write_text_atomically

ROOT = Path(__file__).parents[3]
# As `iternorm run --smoke` has it.
SMOKE = sweep.Options(threads=1)


def swept(name, root):
    """The results of a smoke run."""
    jobs = registry.select([registry.get(name)], Plan(smoke=True))
    return [outcome.result for outcome in sweep.run(jobs, root, SMOKE)]


@pytest.fixture
def seeded():
    """An experiment of two networks and as many seeds as asked for."""
    module: Any = ModuleType("seeded", "Seeds.\n\nCost: nothing,\nreally.\nDepartures: some\nof them.\n")
    module.jobs = lambda plan: [{"job": f"{n}-s{s}", "seed": s} for n in ("a", "ab") for s in range(plan.seeds or 2)]
    return Experiment("seeded", module)


def save(experiment, root, *jobs, plan=None):
    for config in experiment.jobs(plan):
        if config["job"] in jobs:
            results.save(root, results.Result(experiment.home, config, [{}], 1.0, {}))


def names(chosen):
    return [config["job"] for _, config in chosen]


def test_only_takes_texts_and_patterns(seeded):
    def select(*only):
        return names(registry.select([seeded], Plan(), only))

    assert select() == ["a-s0", "a-s1", "ab-s0", "ab-s1"]
    assert select("ab") == ["ab-s0", "ab-s1"]
    assert select("a-*") == ["a-s0", "a-s1"]
    assert select("a?-s0", "a-s1") == ["a-s1", "ab-s0"]
    with pytest.raises(ValueError, match=r"--only 'zz' selects no job: the names are a-s0, a-s1, ab-s0, ab-s1"):
        select("ab", "zz")


def test_fields_of_a_docstring_may_take_several_lines(seeded):
    assert seeded.title == "Seeds."
    assert seeded.cost == "nothing, really"
    assert seeded.field("Departures") == "some of them."
    assert seeded.field("Claim") == ""


@pytest.mark.parametrize(("values", "text"), [({"seeds": 0}, "seeds=0 runs"), ({"device": "tpu"}, "device='tpu' is")])
def test_a_plan_that_makes_no_sense_is_refused(values, text):
    with pytest.raises(ValueError, match=text):
        Plan(**values)


def test_survey_finds_more_seeds_than_the_default_if_they_were_begun(seeded, tmp_path):
    save(seeded, tmp_path, "a-s0")
    state = overview.survey(seeded, tmp_path)
    assert (len(state.finished), state.total) == (1, 4)
    save(seeded, tmp_path, "a-s2", "ab-s3", plan=Plan(seeds=4))
    state = overview.survey(seeded, tmp_path)
    assert [result.config["job"] for result in state.finished] == ["a-s0", "a-s2", "ab-s3"]
    assert [config["job"] for config in state.missing] == ["a-s1", "ab-s0", "ab-s1"]


def test_survey_finds_results_of_the_other_device(seeded, tmp_path):
    seeded.module.jobs = lambda plan: [{"job": plan.device, "device": plan.device}]
    assert str(overview.survey(seeded, tmp_path)) == "0 of 1"
    save(seeded, tmp_path, "cuda", plan=Plan(device="cuda"))
    assert str(overview.survey(seeded, tmp_path)) == "1 of 2"


def test_survey_finds_more_seeds_of_the_other_device(seeded, tmp_path):
    seeded.module.jobs = lambda plan: [{"job": f"{plan.device}-s{seed}"} for seed in range(plan.seeds or 1)]
    save(seeded, tmp_path, "cuda-s0", "cuda-s1", "cuda-s2", plan=Plan(device="cuda", seeds=3))
    assert str(overview.survey(seeded, tmp_path)) == "3 of 4"


def test_nothing_to_draw_is_named(seeded, tmp_path):
    with pytest.raises(ValueError, match=r"seeded: none of 4 results is in .*`iternorm run seeded --results .*`"):
        overview.draw(seeded, tmp_path)


def test_all_stands_for_every_experiment():
    chosen = [experiment.id for experiment in registry.get_all(["fig4", "all", "fig4"])]
    assert chosen[0] == "fig4"
    assert sorted(chosen) == sorted(registry.EXPERIMENTS)


def test_path_is_a_function_of_the_configuration(tmp_path):
    config = {"job": "a", "x": 1, "y": [1, 2]}
    path = results.result_path(tmp_path, "fig", config)
    assert path == results.result_path(tmp_path, "fig", {"y": (1, 2), "x": 1, "job": "a"})
    assert path != results.result_path(tmp_path, "fig", {**config, "x": 2})
    with pytest.raises(ValueError, match="'a/b'"):
        results.result_path(tmp_path, "fig", {"job": "a/b"})


@pytest.mark.parametrize(
    ("wrong", "near"), [("fig", "fig"), ("figa2", "figA2"), ("tablea1", "tableA1"), ("fig44", "fig4")]
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
        assert f"iternorm run {name}" in experiment.field("Command")
        for field in registry.FIELDS:
            assert experiment.field(field), field

    def test_jobs_have_their_own_files(self, name, tmp_path):
        experiment = registry.get(name)
        configs = experiment.jobs() + experiment.jobs(Plan(smoke=True))
        assert len({results.result_path(tmp_path, experiment.home, config) for config in configs}) == len(configs)

    def test_smoke_run_and_plot(self, name, tmp_path):
        experiment = registry.get(name)
        jobs = registry.select([experiment], Plan(smoke=True))
        steps = []
        for outcome in sweep.run(jobs, tmp_path, SMOKE, progress=lambda *values: steps.append(values)):
            assert outcome.what == "ran", outcome.error
            assert outcome.result.rows
        # Every job reports its end.
        finished = {job for _, job, done, total, _ in steps if done == total}
        assert finished == set(names(jobs))
        state = overview.survey(experiment, tmp_path, smoke=True)
        assert (len(state.finished), state.missing) == (len(jobs), ())
        # Real results are elsewhere.
        assert overview.survey(experiment, tmp_path).finished == ()
        figure = experiment.plot(state.finished)
        figure.savefig(tmp_path / "figure.png", dpi=50)
        assert (tmp_path / "figure.png").stat().st_size > 2000
        # The small size leaves out some of the configurations: their panels say that they were not run.
        for axes in figure.axes:
            assert axes.has_data() or [text.get_text() for text in axes.texts] == ["not run"]
        assert any(axes.has_data() for axes in figure.axes)
        # Any part of the results is enough to draw and to judge.
        for part in (state.finished[:1], state.finished[-1:]):
            experiment.plot(part).savefig(tmp_path / "part.png", dpi=50)
            assert experiment.claims(part)
            experiment.compare(part)

    def test_without_results_nothing_is_claimed(self, name):
        experiment = registry.get(name)
        claims = experiment.claims([])
        assert claims
        assert {claim.verdict for claim in claims} <= {Verdict.NOT_RUN}
        assert all(number.ours == () for number in experiment.compare([]))

    def test_committed_results_are_of_this_version(self, name):
        state = overview.survey(registry.get(name), ROOT / "results")
        assert state.unusable == ()


def test_every_committed_result_is_that_of_a_job():
    # A setting that changes moves the paths of its jobs, and what was trained would be lost.
    folder, found = ROOT / "results", set()
    for name in registry.EXPERIMENTS:
        experiment = registry.get(name)
        finished = overview.survey(experiment, folder).finished
        found |= {results.result_path(folder, experiment.home, result.config) for result in finished}
    assert found == set(folder.glob("*/*.json"))


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig4", "fig5", "figA2", "tableA1"])
def test_what_takes_minutes_is_committed_whole_and_judged(name):
    experiment = registry.get(name)
    state = overview.survey(experiment, ROOT / "results")
    assert state.missing == ()
    assert all(claim.verdict is not Verdict.NOT_RUN and claim.evidence for claim in experiment.claims(state.finished))


def test_claims_follow_the_results():
    experiment = registry.get("fig4")
    finished = overview.survey(experiment, ROOT / "results").finished
    assert all(claim.verdict is Verdict.HOLDS for claim in experiment.claims(finished))
    spoiled = [replace(result, rows=[{**row, "snd": 1 / row["snd"]} for row in result.rows]) for result in finished]
    assert [claim.finding for claim in experiment.claims(spoiled)] == [*map(measured, (True, False, True, False))]


def rows_of(name, tmp_path):
    return [(result.config, {row["operation"]: row for row in result.rows}) for result in swept(name, tmp_path)]


def test_gaussian_figures_are_repeatable(tmp_path):
    assert rows_of("fig4", tmp_path / "a") == rows_of("fig4", tmp_path / "b")


def test_experiments_that_train_are_told_from_measurements():
    assert {name for name in registry.EXPERIMENTS if not registry.get(name).trains} == {
        *("fig1", "fig2", "fig4", "fig5", "figA2", "tableA1")
    }


def test_fig1_shows_what_the_paper_says(tmp_path):
    (result,) = swept("fig1", tmp_path)
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
    small, large = (result.rows[0] for result in swept("fig2", tmp_path))
    assert (small["batch_size"], large["batch_size"]) == (16, 64)
    assert large["snd"] < small["snd"]


def test_table_a1_has_the_papers_layers(tmp_path):
    (result,) = swept("tableA1", tmp_path)
    paper = {row["name"]: row["paper_ms"] for row in result.rows if row["paper_ms"]}
    assert paper["conv3x3"] == 5.65
    assert paper["IterNorm T=5 d=64"] == 7.40
    assert all(row["median_ms"] > 0 for row in result.rows)
    assert result.provenance["precision"] == "fp32"
    # A median stands for as many rounds, and times have as many digits in every line.
    known = [row for row in result.rows if row["paper_ms"]]
    rows = [{**row, "median_ms": milliseconds} for row, milliseconds in zip(known, (0.4, 5, 287.4), strict=False)]
    shown = tableA1.compare([results.Result("tableA1", result.config, rows, 0.0, {})])
    assert {number.count for number in shown} == {result.config["rounds"]} == {2}
    assert [number.note.split(" ms;")[0] for number in shown] == ["0.400", "5.00", "287"]
    assert "the paper 5.65 ms" in shown[0].note


def test_the_papers_marks_stand_on_no_time_of_table_a1():
    figure = tableA1.plot(overview.survey(registry.get("tableA1"), ROOT / "results").finished)
    figure.canvas.draw()
    for axes in figure.axes:
        marks = [place for group in axes.collections for place in axes.transData.transform(group.get_offsets())]
        assert len(marks) >= 5
        for text in axes.texts:
            box = text.get_window_extent()
            assert not any(box.contains(*mark) for mark in marks), (axes.get_title(), text.get_text())


def test_table_a1_takes_eager_calls_of_the_gpus_benchmark():
    def candidate(name, layout, milliseconds, ratio):
        samples = [milliseconds - 0.1, milliseconds, milliseconds + 0.2]
        samples = samples[1:2] if name == "DBN d=16" else samples
        timing = {"eager_ms": milliseconds, "eager_samples_ms": samples if milliseconds else []}
        return {"name": name, "layout": layout, "eager_ratio_to_convolution": ratio, **timing}

    candidates = [candidate("conv3x3", "NCHW", 2.0, 1.0), candidate("conv3x3", "NHWC", 1.0, 1.0)]
    candidates += [candidate("IterNorm T=5 d=64", "NCHW", 1.0, 0.5), candidate("DBN d=16", "NCHW", 8.0, 4.0)]
    rows = tableA1.cuda_rows({"shape": [64, 64, 32, 32], "failed": None, "rivals": candidates})
    assert [(row["name"], row["median_ms"], row["ratio_to_convolution"], row["paper_ms"]) for row in rows] == [
        ("conv3x3", 2.0, 1.0, 5.65),
        ("IterNorm T=5 d=64", 1.0, 0.5, 7.40),
        ("DBN d=16", 8.0, 4.0, 15.92),
    ]
    # How many timings there were of each, for the report: slow ones have fewer.
    assert [row["timings"] for row in rows] == [3, 3, 1]
    config = {"job": "x", "shape": [64, 64, 32, 32], "device": "cuda", "rounds": 15}
    told = tableA1.compare([results.Result("tableA1", config, rows, 1.0, {})])
    assert [number.count for number in told] == [3, 3, 1]
    # DBN by eigendecomposition and by the kernels are two rows beside the paper's one.
    both = [*candidates, candidate("DBN d=16 kernels", "NCHW", 1.0, 0.5)]
    rows = tableA1.cuda_rows({"shape": [64, 64, 32, 32], "failed": None, "rivals": both})
    assert [row["paper_ms"] for row in rows] == [5.65, 7.40, 15.92, 15.92]
    # Groups of 64 of 128 channels are not what the paper timed.
    rows = tableA1.cuda_rows({"shape": [64, 128, 32, 32], "failed": None, "rivals": candidates})
    assert [row["paper_ms"] for row in rows] == [13.62, None, 35.02]
    with pytest.raises(RuntimeError, match="out of memory"):
        tableA1.cuda_rows({"shape": [64, 64, 32, 32], "failed": "out of memory", "rivals": []})


def test_table_a1_on_a_gpu_times_128_channels_together_and_both_ways_of_dbn(tmp_path, monkeypatch):
    from fake_gpu import FakeGpu

    from iternorm.timing.gpu import clock as timing
    from iternorm.timing.gpu import precompile

    compiled = []
    monkeypatch.setattr(timing, "Gpu", FakeGpu)
    monkeypatch.setattr(precompile, "compile_all", compiled.extend)
    context = registry.Context("cuda", lambda *args, **values: None, tmp_path)
    # The channels of the table and fewer samples: the shapes are those of the table for the choice of layers only.
    shape = (64, 128, 32, 32)
    monkeypatch.setattr("iternorm.timing.gpu.comparison.Case", _small_case)
    rows = tableA1.run({"job": "cuda-C128", "shape": list(shape), "device": "cuda", "rounds": 1}, context)
    assert context.record == {"precision": "tf32"}
    paper = {row["name"]: row["paper_ms"] for row in rows if row["paper_ms"]}
    assert paper == {
        "conv3x3": 13.62, "IterNorm T=3 d=128": 13.32, "IterNorm T=5 d=128": 13.92, "IterNorm T=7 d=128": 14.68,
        "DBN d=16": 35.02, "DBN d=16 kernels": 35.02,
    }  # fmt: skip
    assert {job.layout for job in compiled} == {"NCHW"}
    assert {job.name for job in compiled} >= {"IterNorm T=5 d=128", "DBN d=16 kernels"}
    result = results.Result("tableA1", {"job": "a", "shape": list(shape), "device": "cuda", "rounds": 1}, rows, 0.0, {})
    cheap, faster = tableA1.claims([result])
    limit = "; at most 1.31 is needed, on a GPU as in the paper"
    assert cheap.evidence == f"time / time of the convolution: on cuda 1.00 with 128 channels{limit}"
    assert cheap.coverage == "1 of 2 sizes"
    assert "of DBN by our kernels, which the paper did not have, 1.00 with 128 channels;" in faster.evidence
    assert [number.what.partition(",")[0] for number in tableA1.compare([result])] == [
        *("conv3x3", "IterNorm T=3 d=128", "IterNorm T=5 d=128", "IterNorm T=7 d=128", "DBN d=16", "DBN d=16 kernels")
    ]
    # A GPU decides, and a CPU is told beside it.
    slow = [{**row, "median_ms": row["median_ms"] * (9 if "IterNorm" in row["name"] else 1)} for row in rows]
    cpu = results.Result("tableA1", {"job": "b", "shape": list(shape), "device": "cpu"}, slow, 0.0, {})
    for found in ([cpu, result], [result, cpu]):
        assert tableA1.claims(found)[0].finding == measured(True)
        assert tableA1.claims(found)[0].evidence.endswith(
            f"on cuda 1.00 with 128 channels; on cpu 9.00 with 128 channels{limit}"
        )
    assert tableA1.claims([cpu])[0].finding == measured(None)
    assert [claim.finding for claim in tableA1.claims([])] == [measured(None)] * 2
    assert len(tableA1.compare([result])) == len(paper)


def _small_case(shape, dtype, channels_last):
    from iternorm.bench import Case

    return Case((2, shape[1], 4, 4), dtype, channels_last)


def test_atomic_write_is_what_results_use(tmp_path, monkeypatch):
    config = {"job": "a"}
    seen = []
    monkeypatch.setattr(
        results, "write_text_atomically", lambda path, text: seen.append(write_text_atomically(path, text))
    )
    results.save(tmp_path, results.Result("x", config, [{}], 0.0, {}))
    assert seen == [results.result_path(tmp_path, "x", config)]
    assert results.load(tmp_path, "x", config).rows == [{}]
