"""Layers of a model become synchronized ones; what the ranks then compute is in tests/layers/test_sync.py."""

import copy

import pytest
import torch
from changed_layers import changed_layers
from torch import nn

import iternorm
from iternorm import convert_sync_iternorm


def test_everything_is_carried_and_sharing_is_kept():
    norm = iternorm.IterNorm2d(6, eps=1e-3, momentum=None, group_size=4, num_iters=3, running="covariance")
    norm.weight.requires_grad_(False)
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(norm, nn.ReLU(), norm).eval()
    x = torch.randn(3, 6, 2, 2)
    expected = model(x)
    converted = convert_sync_iternorm(model)
    assert converted is model
    assert model[0] is model[2]
    new = model[0]
    assert type(new) is iternorm.SyncIterNorm
    assert new.weight is norm.weight
    assert not new.weight.requires_grad
    assert (new.eps, new.momentum, new.group_size, new.num_iters, new.running) == (1e-3, None, 4, 3, "covariance")
    assert not new.training
    assert torch.equal(model(x), expected)
    assert len(calls) == 4
    assert type(convert_sync_iternorm(norm)) is iternorm.SyncIterNorm
    copied = copy.deepcopy(model).get_buffer("0.running_covariance")
    assert torch.equal(copied, norm.get_buffer("running_covariance"))


def test_what_is_left_is_named():
    model = nn.Sequential(iternorm.LazyDecorrelatedBatchNorm1d())
    with pytest.warns(UserWarning, match=r"0 \(LazyDecorrelatedBatchNorm1d\)"):
        convert_sync_iternorm(model)


def test_exact_whitening_is_synchronized_too():
    words = {"solver": "cholesky", "running": "covariance", "correction": 1, "shrinkage": 0.1}
    model = nn.Sequential(iternorm.DecorrelatedBatchNorm1d(4, 0.0, group_size=2, **words))
    x = torch.randn(9, 4)
    model(x)
    expected = model.eval()(x)
    (new,) = convert_sync_iternorm(model).children()
    assert type(new) is iternorm.SyncDecorrelatedBatchNorm
    assert {name: getattr(new, name) for name in words} == words
    assert torch.equal(model(x), expected)
    assert [type(child) for child in iternorm.convert_to_batchnorm(model).children()] == [nn.SyncBatchNorm]


def test_what_was_done_to_a_layer_is_not_lost():
    model = changed_layers()
    layers, x = list(model), torch.randn(3, 4, 5, 5)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"stay as they are: 0 \(.*1 \(.*2 \(.*3 \("):
        convert_sync_iternorm(model, batchnorm=True)
    assert list(model) == layers
    torch.testing.assert_close(model(x), expected)
