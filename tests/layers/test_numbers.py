"""Arguments may be numpy's numbers: a configuration that was read or searched has those."""

# To a type checker numpy's integers are no int, and these tests are about them.
# pyright: reportArgumentType=false

import copy
import json

import pytest
import torch
from checks import correlated
from torch import nn

import iternorm
from iternorm.analysis import analyze, iter_norm, snd

# It is there with the dev extra; `make test-versions` has torch alone.
np = pytest.importorskip("numpy")
NUMPY = {"eps": np.float32(1e-3), "momentum": np.float32(0.25), "group_size": np.int64(4), "num_iters": np.int16(3)}


def plain(words):
    """The same with Python's own numbers."""
    return {name: value.item() for name, value in words.items()}


@pytest.mark.parametrize("kind", [iternorm.IterNorm1d, iternorm.SyncIterNorm, iternorm.DecorrelatedBatchNorm1d])
def test_layers_keep_pythons_own_numbers(kind):
    words = dict(NUMPY)
    if kind is iternorm.DecorrelatedBatchNorm1d:
        del words["num_iters"]
    layer, other = kind(np.int32(8), **words), kind(8, **plain(words))
    assert repr(layer) == repr(other)
    for name in ("num_features", *words):
        assert type(getattr(layer, name)) in (int, float)
    x = correlated(32, 8, dtype=torch.float32)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer.running_whitening, other.running_whitening)


def test_they_may_be_set_later():
    layer, other = iternorm.IterNorm1d(8), iternorm.IterNorm1d(8)
    x = correlated(32, 8, dtype=torch.float32)
    for words in (NUMPY, {"num_iters": np.int64(7)}, {"momentum": np.float64(0.5)}, {"momentum": np.float32(0.25)}):
        for name, value in words.items():
            setattr(layer, name, value)
            setattr(other, name, value.item())
        if "group_size" in words:
            for module in (layer, other):
                module.running_whitening = torch.eye(4).expand(2, 4, 4).clone()
        assert torch.equal(layer(x), other(x))
        assert torch.equal(layer.running_whitening, other.running_whitening)
    layer.num_iters = "7"  # pyright: ignore[reportAttributeAccessIssue]
    before = layer.running_mean.clone()
    with pytest.raises(TypeError, match="num_iters='7' is not an integer"):
        layer(x)
    assert torch.equal(layer.running_mean, before)


def test_functions_and_conversions():
    x = correlated(32, 8, dtype=torch.float32)
    functional, reference = iternorm.functional, iternorm.reference
    assert torch.equal(
        functional.iter_norm(x, training=True, **NUMPY), functional.iter_norm(x, training=True, **plain(NUMPY))
    )
    words = {"group_size": np.int64(4), "eps": np.float32(1e-3)}
    expected = functional.decorrelated_batch_norm(x, training=True, **plain(words))
    assert torch.equal(functional.decorrelated_batch_norm(x, training=True, **words), expected)
    assert torch.equal(reference.iter_norm(x, **words), reference.iter_norm(x, **plain(words)))
    batch_norm = nn.BatchNorm1d(8, eps=np.float32(1e-3), momentum=np.float32(0.25))
    layer = iternorm.convert_batchnorm(batch_norm, group_size=np.int64(4), num_iters=np.int64(3))
    assert (layer.eps, layer.momentum, layer.group_size) == (float(np.float32(1e-3)), 0.25, 4)
    model = iternorm.decorrelate_features(nn.Sequential(nn.Linear(8, 3)), group_size=np.int64(4))
    assert model.get_submodule("0.norm").group_size == 4


@pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, np.float64(2), "2", None])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match=r"num_features=.* is not an integer; give the number of channels"):
        iternorm.IterNorm1d(value)
    with pytest.raises(TypeError, match=r"num_iters=.* is not an integer"):
        iternorm.IterNorm1d(8, num_iters=value)
    if value is not None:
        with pytest.raises(TypeError, match=r"group_size=.* is not an integer"):
            iternorm.IterNorm1d(8, group_size=value)


@pytest.mark.parametrize("value", [True, np.bool_(True), "0.1", 1j, [0.1]])
def test_what_is_no_number_is_refused(value):
    for name in ("eps", "momentum"):
        with pytest.raises(TypeError, match=rf"{name}=.* is not a number"):
            iternorm.IterNorm1d(8, **{name: value})


def test_analysis_takes_them_and_writes_json():
    data = torch.randn(64, 8)
    words = {"samples": 5, "draws": 6, "seed": 3}
    operation = iter_norm(np.int64(3), np.int64(4), np.float64(1e-3))
    estimate = snd(operation, data, np.int64(16), **{name: np.int64(value) for name, value in words.items()})
    assert estimate.value == snd(iter_norm(3, 4, 1e-3), data, 16, **words).value
    # BatchNorm keeps what it is given.
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(np.int64(8)))
    analysis = analyze(
        copy.deepcopy(model), [data], batch_sizes=np.array([8, 16]), draws=np.int64(4), alternatives=[operation]
    )
    assert analysis.layers[0].num_channels == 8
    assert json.loads(analysis.to_json())
