"""The demonstration at a tiny size, and its report."""

import copy
import json
import re
import statistics
from html import escape
from io import StringIO

import pytest
import torch
from page_checks import assert_self_contained
from rich.console import Console
from torch import nn

from iternorm.analysis.conditioning import covariance
from iternorm.experiments.demo import page as demo_report
from iternorm.experiments.demo import runs as demo
from iternorm.layers.norms import DecorrelatedBatchNorm1d
from iternorm.networks.models import MLP


@pytest.fixture(scope="module")
def results():
    return demo.run(epochs=3, seed=1, num_seeds=3)


@pytest.fixture(scope="module")
def digits():
    return demo.load_digits()


def without_times(results):
    results = copy.deepcopy(results)
    del results["seconds"], results["provenance"]
    for method in results["methods"]:
        for run in method["runs"]:
            del run["seconds"]
    return results


def test_results_are_json_and_complete(results):
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert [method["name"] for method in results["methods"]] == ["none", "BN", "DBN", "IterNorm"]
    for method in results["methods"]:
        assert [run["seed"] for run in method["runs"]] == results["config"]["seeds"] == [1, 2, 3]
        assert {run["learning_rate"] for run in method["runs"]} == {method["learning_rate"]}
        assert list(method["loss_of_learning_rate"]) == ["0.2", "0.5", "1", "2", "5"]
        losses = [loss for loss in method["loss_of_learning_rate"].values() if loss is not None]
        assert method["runs"][0]["train_loss"][-1] == min(losses)
        for run in method["runs"]:
            assert len(run["train_loss"]) == len(run["test_error"]) == 4
            assert (run["noise"] is None) == (method["name"] == "none")
            for place in ("before", "after"):
                assert len(run["conditioning"][place]["eigenvalues"]) == 100


def test_a_seed_decides_everything_but_times(results):
    assert without_times(demo.run(epochs=3, seed=1, num_seeds=3)) == without_times(results)
    # The initial loss, before any step, depends on the weights alone.
    for method in results["methods"]:
        assert len({run["train_loss"][0] for run in method["runs"]}) == 3


def test_threads_and_random_state_are_left_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    demo.run(epochs=1, num_seeds=1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_is_called_once_a_step():
    seen = []
    demo.run(epochs=2, num_seeds=2, progress=seen.append)
    assert len(seen) == demo.count_steps(2, 2)
    assert seen[0] == "none, learning rate 0.2"
    assert seen[-1] == "IterNorm, seed 1"


def test_normalization_makes_the_network_train(digits):
    runs = {
        method.name: demo.train(method, 1.0, digits, epochs=25, seed=0, progress=lambda: None)
        for method in demo.METHODS
    }
    for name in ("BN", "DBN", "IterNorm"):
        assert runs[name]["train_loss"][-1] < 0.25
        assert runs[name]["test_error"][-1] < 15
        assert runs[name]["train_loss"][-1] < runs["none"]["train_loss"][-1] / 4


def test_digits_are_split_once_and_for_all(digits):
    assert digits.train_images.shape == (1347, 64)
    assert digits.test_images.shape == (450, 64)
    assert digits.train_images.min() == 0
    assert digits.train_images.max() == 1
    assert torch.equal(digits.test_labels, demo.load_digits().test_labels)
    assert digits.test_labels.bincount().min() >= 43


def test_a_diverged_run_is_written_as_null(digits):
    method = demo.Method("none", "", None)
    run = demo.train(method, 1e30, digits, epochs=3, seed=0, progress=lambda: None)
    assert run["train_loss"][-1] is None
    assert run["conditioning"] is None
    assert run["noise"] is None


def test_noise_is_that_of_the_norm_and_grows_with_whitening(digits):
    found = {
        method.name: demo.train(method, 1.0, digits, epochs=5, seed=0, progress=lambda: None)["noise"]
        for method in demo.METHODS
    }
    assert found["none"] is None
    assert 0 < found["BN"] < found["DBN"] < 100
    assert 0 < found["BN"] < found["IterNorm"] < 100


def test_conditioning_is_measured_before_scale_and_shift(digits):
    # All 20 channels in one group: ZCA makes them exactly white, whatever the scale is.
    torch.manual_seed(0)
    model = MLP(64, 10, lambda width: DecorrelatedBatchNorm1d(width, eps=1e-12, group_size=None), hidden_features=20)
    nn.init.uniform_(model.norms[-1].get_parameter("weight"), 0.1, 3)
    before = copy.deepcopy(model.state_dict())
    found = demo.last_layer_conditioning(model, digits.train_images)
    assert found["after"]["condition_number"] == pytest.approx(1, abs=1e-6)
    assert found["after"]["effective_rank"] == pytest.approx(20, abs=1e-5)
    assert found["before"]["condition_number"] > 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_without_a_normalization_before_and_after_are_the_same(digits):
    model = MLP(64, 10)
    found = demo.last_layer_conditioning(model, digits.train_images)
    assert found["before"] == found["after"]
    hidden = model.double().linears[0](digits.train_images.double()).relu()
    hidden = model.linears[2](model.linears[1](hidden).relu())
    assert sum(found["after"]["eigenvalues"]) == pytest.approx(covariance(hidden).trace().item())


def test_mlp_is_the_papers():
    model = MLP(784, 10, nn.BatchNorm1d)
    widths = [(linear.in_features, linear.out_features) for linear in [*model.linears, model.head]]
    assert widths == [(784, 100), (100, 100), (100, 100), (100, 10)]
    assert [type(norm) for norm in model.norms] == [nn.BatchNorm1d] * 3
    # The normalization stands between linear and ReLU: a large negative shift leaves only the head's bias.
    for norm in model.norms:
        nn.init.constant_(norm.get_parameter("bias"), -1e6)
    assert torch.equal(model(torch.randn(4, 784)), model.head.bias.expand(4, 10))


def test_initial_weights_are_the_same_for_every_normalization():
    weights = []
    for method in demo.METHODS:
        torch.manual_seed(0)
        model = MLP(64, 10, method.norm)
        weights.append([linear.weight for linear in [*model.linears, model.head]])
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


def test_mlp_needs_a_hidden_layer():
    with pytest.raises(ValueError, match="num_layers=1 leaves no hidden layer"):
        MLP(4, 2, num_layers=1)


def test_page_is_self_contained_and_holds_the_numbers(results, tmp_path):
    path = demo_report.write(results, tmp_path)
    page = path.read_text(encoding="utf-8")
    assert_self_contained(page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("<svg") == 3
    for method in results["methods"]:
        mean = statistics.fmean(run["test_error"][-1] for run in method["runs"])
        deviation = statistics.stdev(run["test_error"][-1] for run in method["runs"])
        assert f"{mean:.2f} ± {deviation:.2f}" in page
        assert escape(method["description"]) in page
    assert results["provenance"]["torch"]["version"] in page
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_page_is_the_same_for_the_same_results(results):
    assert demo_report.page(results) == demo_report.page(copy.deepcopy(results))


def test_page_of_a_run_that_diverged(results):
    broken = copy.deepcopy(results)
    for index in (0, 3):
        for run in broken["methods"][index]["runs"][index // 3 :]:
            run.update(train_loss=[2.3, None, None, None], conditioning=None, noise=None)
    for run in broken["methods"][1]["runs"]:
        run["conditioning"]["after"]["condition_number"] = None
    page = demo_report.page(broken)
    assert_self_contained(page)
    assert ">diverged<" in page
    assert ", 2 diverged" in page
    assert "∞" in page


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([5.0, 5.1, 5.2], "IterNorm's is lower in this run"),
        ([0.0, 0.1, 0.2], "BN's is lower in this run"),
        ([1.0, 2.1, 3.2], "this run does not decide which is lower"),
    ],
)
def test_page_says_what_the_test_errors_decide(results, errors, said):
    changed = copy.deepcopy(results)
    for name, values in (("BN", errors), ("IterNorm", [2.0, 2.1, 2.2])):
        (method,) = (method for method in changed["methods"] if method["name"] == name)
        for run, value in zip(method["runs"], values, strict=True):
            run["test_error"][-1] = value
    assert said in demo_report.page(changed).replace("&#x27;", "'")


def test_page_of_one_seed(results):
    single = copy.deepcopy(results)
    single["config"]["seeds"] = [1]
    for method in single["methods"]:
        del method["runs"][1:]
    page = demo_report.page(single)
    assert_self_contained(page)
    assert "with one seed" in page
    assert "this run does not decide" in page


def test_table_fits_eighty_columns(results):
    console = Console(width=80, record=True, file=StringIO())
    wide = copy.deepcopy(results)
    for method in wide["methods"]:
        for run, error in zip(method["runs"], (10.0, 45.5, 99.0), strict=True):
            run["test_error"][-1] = error
            run["train_loss"][-1] = error / 10000
            run["conditioning"]["after"]["condition_number"] = 1e13
    console.print(demo_report.table(wide))
    text = console.export_text()
    assert "…" not in text
    assert "normalization" in text
