"""Layers whose number of channels comes with the first batch, or with a checkpoint."""

import io
import pickle
from typing import Any

import pytest
import torch
from checks import assert_same_state, correlated, state_of
from torch import nn
from torch.nn.parameter import is_lazy

import iternorm

KINDS = [
    (iternorm.LazyIterNorm1d, iternorm.IterNorm1d, ()),
    (iternorm.LazyIterNorm1d, iternorm.IterNorm1d, (3,)),
    (iternorm.LazyIterNorm2d, iternorm.IterNorm2d, (3, 3)),
    (iternorm.LazyIterNorm3d, iternorm.IterNorm3d, (2, 2, 2)),
    (iternorm.LazyDecorrelatedBatchNorm1d, iternorm.DecorrelatedBatchNorm1d, ()),
    (iternorm.LazyDecorrelatedBatchNorm2d, iternorm.DecorrelatedBatchNorm2d, (3, 3)),
    (iternorm.LazyDecorrelatedBatchNorm3d, iternorm.DecorrelatedBatchNorm3d, (2, 2, 2)),
]
WORDS = [
    {},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"running": "covariance", "momentum": None, "eps": 1e-3, "dtype": torch.float64},
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: ", ".join(words) or "default")
@pytest.mark.parametrize(("lazy", "kind", "shape"), KINDS)
def test_the_first_batch_makes_it_the_layer(lazy, kind, shape, words):
    layer, expected = lazy(group_size=4, **words), kind(10, group_size=4, **words)
    x = correlated(16, 10, *shape, dtype=words.get("dtype", torch.float32))
    assert torch.equal(layer(x), expected(x))
    assert type(layer) is kind
    assert repr(layer) == repr(expected)
    assert set(vars(layer)) == set(vars(expected))
    assert_same_state(layer, state_of(expected))
    # And it is one for good.
    with pytest.raises(ValueError, match="expected an input of 10 channels"):
        layer(x[:, :8])


@pytest.mark.parametrize("words", [{"num_iters": 3, "activation": "relu"}, {"impl": "torch"}])
def test_the_words_of_the_layer_go_over(words):
    layer, expected = iternorm.LazyIterNorm2d(**words), iternorm.IterNorm2d(6, **words)
    x = correlated(8, 6, 4, 4, dtype=torch.float32)
    assert torch.equal(layer(x), expected(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'groups'"):
        iternorm.LazyIterNorm2d(groups=3)
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        iternorm.LazyIterNorm2d(group_size=0)


def test_before_the_first_batch():
    layer = iternorm.LazyIterNorm2d()
    assert repr(layer).startswith("LazyIterNorm2d(0, eps=1e-05")
    assert all(
        is_lazy(t)
        for t in (*layer.parameters(), layer.get_buffer("running_mean"), layer.get_buffer("running_whitening"))
    )
    layer.reset_parameters()
    # Torch cannot deepcopy a buffer that has no size yet, of LazyBatchNorm2d neither.
    other = pickle.loads(pickle.dumps(layer))
    other(torch.randn(4, 6, 2, 2))
    assert type(other) is iternorm.IterNorm2d
    other = iternorm.LazyIterNorm2d().double()
    other(torch.randn(4, 6, 2, 2, dtype=torch.float64))
    assert other.weight.dtype == other.running_whitening.dtype == torch.float64
    # A batch that is refused leaves it as it was.
    for bad in (torch.randn(4, 6), torch.ones(4, 6, 2, 2, dtype=torch.int64)):
        with pytest.raises((ValueError, TypeError)):
            layer(bad)
        assert is_lazy(layer.weight)
        assert type(layer) is iternorm.LazyIterNorm2d


def test_in_a_network_with_an_optimizer():
    model = nn.Sequential(nn.LazyConv2d(8, 3), iternorm.LazyIterNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(16, 3, 6, 6)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    assert model[1].weight.grad is not None
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize("source", ["ours", "BatchNorm", "without statistics"])
def test_a_checkpoint_says_how_many_channels(source):
    words: dict[str, Any] = {"track_running_stats": False} if source == "without statistics" else {}
    saved = nn.BatchNorm2d(10) if source == "BatchNorm" else iternorm.IterNorm2d(10, group_size=4, **words)
    saved.weight.data.normal_()
    x = correlated(8, 10, 3, 3, dtype=torch.float32)
    saved(x)
    layer = iternorm.LazyIterNorm2d(group_size=4, **words)
    result = layer.load_state_dict(saved.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    torch.testing.assert_close(layer.eval()(x), saved.eval()(x))
    assert type(layer) is iternorm.IterNorm2d


def test_a_second_checkpoint_does_not_change_the_number_of_channels():
    layer = iternorm.LazyIterNorm2d(group_size=4)
    layer.load_state_dict(iternorm.IterNorm2d(10, group_size=4).state_dict())
    with pytest.raises(ValueError, match=r"has shape \[6\], this layer has \[10\]"):
        layer.load_state_dict(iternorm.IterNorm2d(6, group_size=4).state_dict())
    assert layer.num_features == 10


def test_a_checkpoint_of_a_layer_that_has_not_seen_a_batch():
    buffer = io.BytesIO()
    model = nn.Sequential(iternorm.LazyIterNorm2d())
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = nn.Sequential(iternorm.LazyIterNorm2d())
    other.load_state_dict(torch.load(buffer, weights_only=False))
    assert is_lazy(other.get_parameter("0.weight"))
    other(torch.randn(4, 6, 2, 2))
    assert type(other[0]) is iternorm.IterNorm2d


def test_tools_say_that_a_batch_is_needed():
    model = nn.Sequential(iternorm.LazyIterNorm2d())
    with pytest.warns(UserWarning, match="has not seen a batch"):
        iternorm.convert_to_batchnorm(model)
    with pytest.warns(UserWarning, match="LazyIterNorm2d"):
        iternorm.convert_sync_iternorm(model)
    with pytest.raises(ValueError, match="0 has not seen a batch"):
        iternorm.fold(model.eval())
    assert type(model[0]) is iternorm.LazyIterNorm2d
    # A pass over the data is one.
    batches = [torch.randn(8, 6, 3, 3) for _ in range(3)]
    iternorm.recalibrate(model, batches, progress=False)
    expected = iternorm.recalibrate(nn.Sequential(iternorm.IterNorm2d(6)), batches, progress=False)
    assert_same_state(model, state_of(expected))
