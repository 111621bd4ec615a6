"""Tables 2 and 3: the paper's setting, and what is made of the results."""

import dataclasses

import pytest

from iternorm.experiments.jobs import registry, sweep
from iternorm.experiments.jobs.findings import Finding, Verdict
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Result
from iternorm.experiments.paper import table2, table3
from iternorm.experiments.recipe import Recipe

EXPERIMENTS = {name: registry.Experiment(name, module) for name, module in (("table2", table2), ("table3", table3))}
PAPER = {
    "data": "imagenet",
    "batch_size": 256,
    "lr": 0.1,
    "epochs": 100,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-4,
    "milestones": (30, 60, 90),
    "norm_eps": 1e-5,
    "dropout": 0.0,
    "augment": True,
    "image_size": 224,
    "width": 1.0,
}
L1, FULL, DF = "IterNorm-L1", "IterNorm-Full", "IterNorm-L1+DF"


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    """Without the real files, so that the smallest size is generated."""
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "data"))


def finished(module, errors, seeds=1):
    """Results as if run: `errors` maps (model, norm) to the final top-1 error; seeds differ by 0.1."""
    return [
        Result("imagenet", config, [{"epoch": 1, "train_error": 1.0, **ends(errors[key], config)}], 1.0, {})
        for config in module.jobs(Plan(seeds=seeds))
        if (key := (config["model"], config["norm"])) in errors
    ]


def ends(error, config):
    error = None if error is None else error + config.get("seed", 0) / 10
    return {"test_error": error, "test_error_top5": None if error is None else error / 4, "diverged": error is None}


@pytest.mark.parametrize(
    ("module", "variants"),
    [
        (table2, [("resnet-18", norm) for norm in ("BN", "DBN-16-L1", L1, FULL, DF)]),
        (table3, [(model, norm) for model in ("resnet-50", "resnet-101") for norm in ("BN", L1, DF)]),
    ],
)
def test_jobs_are_the_papers(module, variants):
    recipes = [Recipe.from_config(config) for config in module.jobs(Plan())]
    assert [(recipe.model, recipe.norm) for recipe in recipes] == variants
    for recipe in recipes:
        assert {name: getattr(recipe, name) for name in PAPER} == PAPER
        rates = [recipe.learning_rate(epoch) for epoch in (0, 29, 30, 60, 90, 99)]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001])
    # With more seeds the first of all variants still comes first.
    twice = module.jobs(Plan(seeds=2))
    assert twice[: len(variants)] == module.jobs(Plan(device="cuda"))
    assert {config.get("seed", 0) for config in twice[len(variants) :]} == {1}


def test_both_tables_share_a_folder_without_sharing_a_name():
    assert {experiment.home for experiment in EXPERIMENTS.values()} == {"imagenet"}
    names = [config["job"] for module in (table2, table3) for config in module.jobs(Plan())]
    assert len(set(names)) == 11


def test_departures_and_costs_are_told():
    for experiment in EXPERIMENTS.values():
        for field in ("Reproduces", "Claim", "Command", "Cost", "The paper got", "Departures"):
            assert experiment.field(field), field
        assert f"iternorm run {experiment.id}" in experiment.field("Command")
        assert "estimated" in experiment.cost
    assert "bf16" in EXPERIMENTS["table2"].field("Departures")
    assert "4 GPUs" in EXPERIMENTS["table3"].field("Departures")


def test_smoke_jobs_are_the_same_training_made_small():
    sizes = ("data", "batch_size", "lr", "epochs", "train_examples", "test_examples", "width", "image_size")
    for module in (table2, table3):
        for one, other in zip(module.jobs(Plan(smoke=True)), module.jobs(Plan()), strict=True):
            a, b = (dataclasses.asdict(Recipe.from_config(config)) for config in (one, other))
            assert {name for name in a if a[name] != b[name]} == set(sizes)
            assert a["data"] == "generated-imagenet"
            assert (a["epochs"] * a["train_examples"] <= 128, a["image_size"] <= 32) == (True, True)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_a_run_has_both_errors_and_fills_its_rows(name, tmp_path):
    pytest.importorskip("accelerate")
    experiment = EXPERIMENTS[name]
    jobs = registry.select([experiment], Plan(smoke=True))[:1]
    (outcome,) = sweep.run(jobs, tmp_path, sweep.Options(threads=1))
    assert (outcome.what, outcome.error) == ("ran", None)
    assert outcome.result is not None
    assert [row["epoch"] for row in outcome.result.rows] == [1, 2]
    # There are more than ten classes, so the top-5 error is measured.
    last = outcome.result.rows[-1]
    assert 0 <= last["test_error_top5"] <= last["test_error"] <= 100
    assert [len(row.ours) for row in experiment.compare([outcome.result])][:3] == [1, 1, 0]


def test_the_tables_have_the_papers_numbers():
    found = {row.what: row.paper for row in (*table2.compare([]), *table3.compare([]))}
    assert found == {
        "ResNet-18, Baseline (BN), top-1": "29.76",
        "ResNet-18, Baseline (BN), top-5": "10.39",
        "ResNet-18, DBN-L1, top-1": "29.50",
        "ResNet-18, DBN-L1, top-5": "10.26",
        "ResNet-18, IterNorm-L1, top-1": "29.34",
        "ResNet-18, IterNorm-L1, top-5": "10.22",
        "ResNet-18, IterNorm-Full, top-1": "29.30",
        "ResNet-18, IterNorm-Full, top-5": "10.21",
        "ResNet-18, IterNorm-L1 + DF, top-1": "28.86",
        "ResNet-18, IterNorm-L1 + DF, top-5": "10.08",
        "ResNet-50, Baseline (BN), top-1": "23.95",
        "ResNet-50, Baseline (BN), top-5": "7.02",
        "ResNet-50, IterNorm-L1, top-1": "23.28",
        "ResNet-50, IterNorm-L1, top-5": "6.72",
        "ResNet-50, IterNorm-L1 + DF, top-1": "22.91",
        "ResNet-50, IterNorm-L1 + DF, top-5": "6.47",
        "ResNet-101, Baseline (BN), top-1": "22.45",
        "ResNet-101, Baseline (BN), top-5": "6.29",
        "ResNet-101, IterNorm-L1, top-1": "21.95",
        "ResNet-101, IterNorm-L1, top-5": "5.99",
        "ResNet-101, IterNorm-L1 + DF, top-1": "21.77",
        "ResNet-101, IterNorm-L1 + DF, top-5": "5.94",
    }


def test_our_numbers_stand_beside_the_papers():
    results = finished(table2, {("resnet-18", "BN"): 30.0, ("resnet-18", DF): 28.0})
    found = {row.what: row.ours for row in table2.compare(results) if row.ours}
    assert found == {
        "ResNet-18, Baseline (BN), top-1": (30.0,),
        "ResNet-18, Baseline (BN), top-5": (7.5,),
        "ResNet-18, IterNorm-L1 + DF, top-1": (28.0,),
        "ResNet-18, IterNorm-L1 + DF, top-5": (7.0,),
    }


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({}, "-----"),
        ({"BN": 30, "DBN-16-L1": 29.5, L1: 29.2, FULL: 29.1, DF: 28.8}, "+++++"),
        ({"BN": 29, "DBN-16-L1": 29.5, L1: 29.8, FULL: 29.0, DF: 30.1}, "xxxxx"),
        ({"BN": 30, L1: 29.4}, "-+---"),
        # Three seeds are good to 0.08 points: 0.1 is no significant difference, and 0.48 would have been one.
        ({L1: 29.1, FULL: 29.0, DF: 29.0}, "---+?"),
        ({L1: 29.0, FULL: 29.9}, "---+-"),
        ({L1: 29.0, DF: None}, "----x"),
    ],
)
def test_claims_of_table_2_follow_the_results(errors, expected):
    signs = dict(zip(Verdict, "+x?1-", strict=True))
    results = finished(table2, {("resnet-18", norm): error for norm, error in errors.items()}, seeds=3)
    assert "".join(signs[claim.verdict] for claim in table2.claims(results)) == expected


def test_one_seed_of_table_2_points_where_50000_images_let_it():
    errors = {"BN": 30.0, "DBN-16-L1": 29.2, L1: 29.0, FULL: 28.8, DF: 28.0}
    found = table2.claims(finished(table2, {("resnet-18", norm): error for norm, error in errors.items()}))
    assert all(claim.verdict is Verdict.ONE_SEED for claim in found)
    # That every norm is no better than the first needs a difference of 0.48 points to be visible.
    assert [claim.finding.points for claim in found] == [True, True, None, None, True]
    assert "± 0.29 (of the test set)" in found[0].evidence


def test_claims_of_table_3_follow_the_results():
    errors = {("resnet-50", "BN"): 24.0, ("resnet-50", L1): 23.0, ("resnet-50", DF): 23.5, ("resnet-101", L1): 22.0}
    found = table3.claims(finished(table3, errors))
    assert [claim.finding for claim in found] == [
        *(Finding(Verdict.ONE_SEED, points) for points in (True, None)),
        *[Finding(Verdict.NOT_RUN)] * 2,
    ]
    assert "not run" in found[2].evidence


@pytest.mark.parametrize(("module", "panels"), [(table2, 2), (table3, 4)])
def test_any_part_of_the_results_is_drawn(module, panels):
    every = {(config["model"], config["norm"]): 25.0 for config in module.jobs(Plan())}
    first = next(iter(every))
    for errors in (every, {first: 25.0}, {first: None}):
        figure = module.plot(finished(module, errors))
        assert len(figure.axes) == panels
        figure.canvas.draw()


def test_each_panel_has_its_own_numbers():
    figure = table3.plot(finished(table3, {("resnet-101", "BN"): 24.0}))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"ResNet-{depth}, ImageNet, top-{k}" for depth in (50, 101) for k in (1, 5)]
    first = [" ".join(axes.texts[0].get_text().split()) for axes in figure.axes]
    assert first == [
        "paper 23.95 ours not run",
        "paper 7.02 ours not run",
        "paper 22.45 ours 24.00 (one seed)",
        "paper 6.29 ours 6.00 (one seed)",
    ]
