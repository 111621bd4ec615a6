"""Statistics of a population by one pass; frozen statistics."""

import copy
import pickle
import sys
from collections import UserDict

import pytest
import torch
from torch import nn

import iternorm
from iternorm import (
    DecorrelatedBatchNorm2d,
    IterNorm1d,
    IterNorm2d,
    SyncIterNorm,
    convert_batchnorm,
    freeze,
    recalibrate,
    unfreeze,
)


def data(sizes=(16, 7, 30, 3), shape=(6, 3, 2), mean=3.0):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(shape[0], shape[0], generator=generator, dtype=torch.float64)
    return [
        torch.einsum("ij,nj...->ni...", mix, torch.randn(n, *shape, generator=generator, dtype=torch.float64)) + mean
        for n in sizes
    ]


def population(batches):
    samples = torch.cat(batches).transpose(0, 1).flatten(1)
    return samples.mean(1), torch.cov(samples, correction=0), samples.var(1)


@pytest.mark.parametrize(
    "layer",
    [
        IterNorm2d(6, group_size=4, dtype=torch.float64),
        IterNorm2d(6, group_size=None, running="covariance", dtype=torch.float64),
        SyncIterNorm(6, group_size=3, dtype=torch.float64),
        DecorrelatedBatchNorm2d(6, group_size=4, dtype=torch.float64),
        DecorrelatedBatchNorm2d(6, solver="cholesky", dtype=torch.float64),
        nn.BatchNorm2d(6, dtype=torch.float64),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_statistics_are_those_of_all_batches_together(layer):
    batches = data()
    assert recalibrate(layer, batches, progress=False) is layer
    mean, covariance, variance = population(batches)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-10, atol=1e-10)
    assert int(layer.num_batches_tracked) == 4
    if isinstance(layer, nn.BatchNorm2d):
        torch.testing.assert_close(layer.running_var, variance, rtol=1e-10, atol=1e-10)
        return
    # In eval the layer now gives what training gives on all the data as one batch.
    x = torch.cat(batches)
    expected = copy.deepcopy(layer).train()(x)
    torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-9, atol=1e-9)
    if layer.running == "covariance":
        torch.testing.assert_close(layer.running_covariance[0], covariance, rtol=1e-10, atol=1e-10)


def test_fp32_with_a_mean_of_a_thousand_deviations():
    batches = [b.float() / b.std() for b in data(sizes=(64, 64), mean=0.0)]
    batches = [b + 1000 for b in batches]
    layer = recalibrate(IterNorm2d(6, running="covariance"), batches, progress=False)
    _, covariance, _ = population([b.double() for b in batches])
    torch.testing.assert_close(layer.get_buffer("running_covariance")[0].double(), covariance, rtol=1e-3, atol=1e-3)


def test_a_network_with_dropout_and_one_large_batch():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
    ).double()
    convert_batchnorm(model, group_size=4, where=lambda name, _: name == "1")
    model.train()
    model[4].eval()
    x = torch.cat(data())
    recalibrate(model, [(x, torch.zeros(len(x)))], progress=False)
    # The modes are what they were.
    assert [m.training for m in model] == [True, True, True, True, False, True]
    assert model[1].track_running_stats
    # With one batch, eval now is training without dropout.
    evaluated = model.eval()(x)
    model.train()
    model[3].eval()
    torch.testing.assert_close(model[:5](x), model.eval()[:5](x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(evaluated.mean((0, 2, 3)), model[5].bias.data, rtol=1e-9, atol=1e-9)


def test_batches_of_other_kinds():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = IterNorm1d(3)

        def forward(self, *, pixels):
            return self.norm(input=pixels)

    model = Model()
    x = torch.randn(8, 3)
    recalibrate(model, ({"pixels": x} for _ in range(2)), progress=False)
    torch.testing.assert_close(model.norm.running_mean, x.mean(0))
    # What the processors of transformers return is a mapping, and no dict.
    recalibrate(model, [UserDict(pixels=x - 1)], progress=False)
    torch.testing.assert_close(model.norm.running_mean, x.mean(0) - 1)
    recalibrate(model, [{"x": x + 1}], forward=lambda model, batch: model(pixels=batch["x"]), progress=False)
    torch.testing.assert_close(model.norm.running_mean, x.mean(0) + 1)


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "batches is empty"),
        ([torch.randn(4, 3), torch.randn(4, 5)], ValueError, "expected an input of 3 channels"),
        ([torch.randn(4, 3), torch.full((4, 3), torch.nan)], ValueError, "the input of 0 was not finite"),
    ],
)
def test_a_pass_that_fails_changes_nothing(batches, error, message):
    model = nn.Sequential(IterNorm1d(3), nn.BatchNorm1d(3)).train()
    model[1].eval()
    before = state(model)
    with pytest.raises(error, match=message):
        recalibrate(model, batches, progress=False)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [model[0].training, model[1].training] == [True, False]
    assert not model[0]._forward_hooks
    assert model[0].track_running_stats


def test_layers_without_statistics_and_layers_never_reached():
    with pytest.raises(ValueError, match="has no whitening or BatchNorm layer with running statistics"):
        recalibrate(nn.Sequential(IterNorm1d(3, track_running_stats=False)), [torch.randn(4, 3)])
    with pytest.raises(ValueError, match=r"frozen layers are left alone until iternorm\.unfreeze"):
        recalibrate(freeze(nn.Sequential(IterNorm1d(3))), [torch.randn(4, 3)])
    model = nn.ModuleDict({"used": IterNorm1d(3), "unused": nn.BatchNorm1d(3)})
    with pytest.warns(UserWarning, match="no batch reached these layers, which keep their statistics: unused"):
        recalibrate(model, [torch.randn(4, 3)], forward=lambda m, x: m.get_submodule("used")(x), progress=False)


@pytest.mark.parametrize("installed", [True, False])
def test_progress_needs_no_rich(installed, monkeypatch, capsys):
    if installed:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    layer = IterNorm1d(3)
    recalibrate(layer, [torch.randn(4, 3)] * 3)
    assert layer.num_batches_tracked == 3
    assert ("Recalibrating" in capsys.readouterr().out) is installed


def test_frozen_statistics_survive_train_and_let_the_rest_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), IterNorm1d(6, group_size=3))
    for _ in range(3):
        model(torch.randn(16, 4))
    assert freeze(model) is model
    before = {k: v for k, v in state(model).items() if "running" in k or "num_batches" in k}
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.train()
        assert [m.training for m in copied] == [True, False, True, False]
        copied(torch.randn(16, 4)).square().sum().backward()
        torch.optim.SGD(copied.parameters(), 0.1).step()
        assert all(torch.equal(copied.state_dict()[k], v) for k, v in before.items())
        assert all(p.grad is not None for p in copied.parameters())
    # A copy is frozen by itself.
    copied.eval()
    assert model[0].training
    recalibrated = copy.deepcopy(model)
    with pytest.raises(ValueError, match="no whitening or BatchNorm layer with running statistics to recalibrate"):
        recalibrate(recalibrated, [torch.randn(4, 4)])

    # Conversion keeps a layer frozen.
    convert_batchnorm(model)
    model.train()
    assert not model[1].training
    unfreeze(model)
    assert [m.training for m in model] == [True] * 4
    model.eval()
    model.train()
    model(torch.randn(16, 4))
    assert not torch.equal(model.get_buffer("3.running_mean"), before["3.running_mean"])


def test_freeze_by_name_and_bad_input():
    model = nn.Sequential(IterNorm1d(3), IterNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match=r"1 \(IterNorm1d\) keeps no running statistics to freeze"):
        freeze(model)
    assert model[0].training
    freeze(model, where="first")
    assert not model[0].training
    with pytest.raises(ValueError, match="where='last' is not known"):
        freeze(model, where="last")
    iternorm.unfreeze(model)
    assert model[0].training
