"""Figure 8 and Table 1: the paper's setting, shared runs, and what is made of the results."""

import dataclasses

import numpy as np
import pytest

from iternorm.experiments.jobs import overview, registry, sweep
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Result
from iternorm.experiments.paper import fig8, table1
from iternorm.experiments.recipe import Recipe

EXPERIMENTS = {name: registry.Experiment(name, module) for name, module in (("fig8", fig8), ("table1", table1))}
# A recipe of the paper's, as shared by all runs.
PAPER = {
    "data": "cifar10",
    "batch_size": 128,
    "lr": 0.1,
    "epochs": 200,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "milestones": (60, 120, 160),
    "dropout": 0.3,
    "augment": True,
    "width": 1.0,
}


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    """Without the real files, so that the smallest size is generated."""
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "data"))


def finished(module, errors, *, plan=None):
    """Results as if run: `errors` maps (model, norm, seed) to the final test error, None for a run that diverged."""
    found = []
    for config in module.jobs(plan or Plan()):
        key = (config["model"], config["norm"], config.get("seed", 0))
        if key in errors:
            last = errors[key]
            rows = [
                {"epoch": 1, "train_error": 50.0, "test_error": 60.0},
                {"epoch": 2, "train_error": None if last is None else last / 10, "test_error": last},
            ]
            if last is None:
                rows[-1]["diverged"] = True
            found.append(Result("wrn", config, rows, 1.0, {}))
    return found


@pytest.mark.parametrize("module", [fig8, table1])
def test_jobs_are_the_papers(module):
    recipes = [Recipe.from_config(config) for config in module.jobs(Plan())]
    norms = ("BN", "IterNorm T=5 d=64") if module is fig8 else ("BN", "DBN-16", "IterNorm T=5 d=64")
    assert [(recipe.seed, recipe.model, recipe.norm) for recipe in recipes] == [
        (seed, model, norm) for seed in range(5) for model in ("wrn-28-10", "wrn-40-10") for norm in norms
    ]
    for recipe in recipes:
        assert {name: getattr(recipe, name) for name in PAPER} == PAPER
        assert [recipe.learning_rate(epoch) for epoch in (0, 59, 60, 120, 160, 199)] == pytest.approx(
            [0.1, 0.1, 0.02, 0.004, 0.0008, 0.0008]
        )
        assert recipe.norm_eps == (1e-3 if recipe.norm == "DBN-16" else 1e-5)
        assert (recipe.train_examples, recipe.test_examples, recipe.max_iterations) == (None, None, None)


def test_the_figure_and_the_table_share_their_runs():
    assert EXPERIMENTS["fig8"].home == EXPERIMENTS["table1"].home == "wrn"
    of_table = table1.jobs(Plan())
    assert all(config in of_table for config in fig8.jobs(Plan()))
    # The device decides where a run is done, not what it is.
    assert fig8.jobs(Plan(device="cuda")) == fig8.jobs(Plan())


def test_the_number_of_seeds_can_be_chosen():
    assert len(fig8.jobs(Plan(seeds=1))) == 4
    assert fig8.jobs(Plan(seeds=2))[:4] == fig8.jobs(Plan(seeds=1))
    assert len(table1.jobs(Plan(smoke=True))) == 6


def test_departures_and_costs_are_told():
    for experiment in EXPERIMENTS.values():
        assert experiment.title
        for field in ("Reproduces", "Claim", "Command", "Cost", "The paper got", "Departures"):
            assert experiment.field(field), field
        assert f"iternorm run {experiment.id}" in experiment.field("Command")
        assert "estimated" in experiment.cost
    assert "bf16" in EXPERIMENTS["fig8"].field("Departures")
    assert "after the first convolution" in EXPERIMENTS["fig8"].field("Departures")


def test_smoke_jobs_are_the_same_training_made_small():
    small, full = table1.jobs(Plan(smoke=True)), table1.jobs(Plan(seeds=1))
    sizes = ("data", "batch_size", "lr", "epochs", "train_examples", "test_examples", "width", "precision")
    for one, other in zip(small, full, strict=True):
        a, b = (dataclasses.asdict(Recipe.from_config(config)) for config in (one, other))
        assert {name for name in a if a[name] != b[name]} == set(sizes)
        assert a["data"] == "generated-cifar10"
        assert a["epochs"] * a["train_examples"] <= 128


def test_a_run_of_the_table_is_one_of_the_figure(tmp_path):
    pytest.importorskip("accelerate")
    plan = Plan(smoke=True)
    jobs = registry.select([EXPERIMENTS["table1"]], plan)[:1]
    (outcome,) = sweep.run(jobs, tmp_path, sweep.Options(threads=1))
    assert (outcome.what, outcome.error) == ("ran", None)
    assert outcome.result is not None
    assert [row["epoch"] for row in outcome.result.rows] == [1, 2]
    assert all(0 <= row["test_error"] <= 100 for row in outcome.result.rows)
    for experiment in EXPERIMENTS.values():
        state = overview.survey(experiment, tmp_path, smoke=True)
        assert [result.config for result in state.finished] == [outcome.config]


ERRORS = {
    **{("wrn-28-10", "BN", seed): error for seed, error in enumerate((3.8, 4.0))},
    **{("wrn-28-10", "IterNorm T=5 d=64", seed): error for seed, error in enumerate((3.5, 3.6))},
    ("wrn-40-10", "BN", 0): 3.5,
    ("wrn-40-10", "IterNorm T=5 d=64", 0): 3.6,
}


def test_the_table_has_the_papers_numbers_beside_ours():
    found = {row.what: (row.paper, row.ours) for row in table1.compare(finished(table1, ERRORS))}
    assert found == {
        "WRN-28-10, BN": ("3.89 ± 0.13", (3.8, 4.0)),
        "WRN-28-10, DBN": ("3.79 ± 0.09", ()),
        "WRN-28-10, IterNorm": ("3.56 ± 0.12", (3.5, 3.6)),
        "WRN-40-10, BN": ("3.82 ± 0.11", (3.5,)),
        "WRN-40-10, DBN": ("3.74 ± 0.11", ()),
        "WRN-40-10, IterNorm": ("3.59 ± 0.07", (3.6,)),
    }
    assert all(row.ours == () for row in table1.compare([]))


def test_claims_of_the_table_follow_the_results():
    # Two seeds decide nothing; one points somewhere, and 0.1 points of 10,000 images point nowhere.
    found = table1.claims(finished(table1, ERRORS))
    words = ["undecided", "not run", "one seed only, points neither way", "not run", "undecided"]
    assert [str(claim.finding) for claim in found] == words
    third = {("wrn-28-10", "BN", 2): 3.9, ("wrn-28-10", "IterNorm T=5 d=64", 2): 3.55}
    found = table1.claims(finished(table1, ERRORS | third))
    assert [str(claim.finding) for claim in found] == ["holds", *words[1:4], "holds"]
    assert {str(claim.finding) for claim in table1.claims([])} == {"not run"}
    assert all("not run" in claim.evidence for claim in table1.claims([]))


@pytest.mark.parametrize(
    ("iternorm", "expected"),
    [
        ((3.50, 3.52, 3.51), "holds"),
        ((3.50, 3.52), "undecided"),
        # Lower, and by less than that.
        ((3.83, 3.84, 3.82), "does not hold"),
        ((4.00, 4.02, 4.01), "does not hold"),
        ((4.00, 4.02), "undecided"),
        # As likely none at all as the paper's.
        ((3.4, 4.2, 3.8), "undecided"),
        # One seed's error is that of 10,000 test images, 0.27 points of a difference, or 7 % of BN's error.
        ((3.2,), "one seed only, points to it"),
        ((3.5,), "one seed only, points neither way"),
        ((3.8,), "one seed only, points neither way"),
        ((4.2,), "one seed only, points against it"),
        ((), "not run"),
    ],
)
def test_the_relative_improvement_needs_several_seeds(iternorm, expected):
    errors = {("wrn-28-10", "BN", seed): error for seed, error in enumerate((3.88, 3.90, 3.89))}
    errors |= {("wrn-28-10", "IterNorm T=5 d=64", seed): error for seed, error in enumerate(iternorm)}
    claim = table1.claims(finished(table1, errors))[-1]
    assert "8.5 %" in claim.text
    assert str(claim.finding) == expected


def test_seeds_of_bn_that_diverged_leave_the_improvement_open():
    errors = {("wrn-28-10", "BN", seed): error for seed, error in enumerate((3.88, 3.90, 3.89, None))}
    errors |= {("wrn-28-10", "IterNorm T=5 d=64", seed): error for seed, error in enumerate((3.83, 3.84, 3.82))}
    lower, *_, improved = table1.claims(finished(table1, errors))
    assert [str(claim.finding) for claim in (lower, improved)] == ["holds", "undecided"]


def test_claims_of_the_figure_follow_the_results():
    # Of each network: training, then generalization. The training error is averaged over the epochs.
    found = fig8.claims(finished(fig8, ERRORS))
    pointing = "one seed only, points "
    words = ["undecided", "undecided", pointing + "against it", pointing + "neither way"]
    assert [str(claim.finding) for claim in found] == words
    assert "25.18" in found[0].evidence
    assert {str(claim.finding) for claim in fig8.claims([])} == {"not run"}
    diverged = finished(fig8, {("wrn-28-10", "BN", 0): 3.9, ("wrn-28-10", "IterNorm T=5 d=64", 0): None})
    words = [pointing + "against it"] * 2 + ["not run"] * 2
    assert [str(claim.finding) for claim in fig8.claims(diverged)] == words


def test_the_figure_compares_the_ends_of_its_curves():
    rows = fig8.compare(finished(fig8, ERRORS))
    assert len(rows) == 8
    by_name = {row.what: row for row in rows}
    assert by_name["WRN-28-10, BN, test error at the end"].ours == (3.8, 4.0)
    assert by_name["WRN-40-10, IterNorm, train error at the end"].ours == (0.36,)
    assert {row.paper for row in rows} == {""}


@pytest.mark.parametrize("module", [fig8, table1])
def test_any_part_of_the_results_is_drawn(module):
    results = finished(module, ERRORS)
    diverged = finished(module, {("wrn-28-10", "BN", 0): None})
    for part in (results, results[:1], results[-1:], diverged):
        figure = module.plot(part)
        assert len(figure.axes) == 2
        figure.canvas.draw()


def test_the_figure_has_solid_training_and_dashed_test_curves():
    figure = fig8.plot(finished(fig8, ERRORS))
    assert [axes.get_title() for axes in figure.axes] == ["(a) WRN-28-10", "(b) WRN-40-10"]
    left = figure.axes[0]
    assert [line.get_linestyle() for line in left.lines] == ["-", "--", "-", "--"]
    # The mean of the two seeds at the last epoch.
    assert np.asarray(left.lines[1].get_ydata())[-1] == pytest.approx(3.9)
    assert np.asarray(left.lines[0].get_ydata())[-1] == pytest.approx(0.39)
    only_first = fig8.plot(finished(fig8, {("wrn-28-10", "BN", 0): 3.9}))
    assert [text.get_text() for text in only_first.axes[1].texts] == ["not run"]
