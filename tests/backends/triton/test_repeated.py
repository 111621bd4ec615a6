"""A layer goes straight to the kernels for a batch like the one before, and notices whatever is not like it."""

import copy
import pickle

import pytest
import torch
from checks import assert_same_state, correlated, state_of
from torch import nn

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, SyncIterNorm
from iternorm.layers import base
from iternorm.models import convert
from iternorm.whitening import collective, dispatch, fused, validation

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

SHAPE = (6, 8, 3, 3)


def batch() -> torch.Tensor:
    return correlated(*SHAPE, dtype=torch.float32)


def used_layer(**arguments) -> IterNorm2d:
    """A layer that has seen two batches, the second of which was like the first."""
    layer = IterNorm2d(8, group_size=4, impl="triton", **arguments)
    layer(batch())
    layer(batch())
    return layer


@pytest.fixture
def straight(monkeypatch):
    """How many batches went to the kernels, and how many of them by way of the checks."""
    counts = {"whitened": 0, "checked": 0}
    whiten, check = fused.whiten_eagerly, validation.check_input

    def whiten_counted(*args):
        counts["whitened"] += 1
        return whiten(*args)

    def check_counted(x):
        counts["checked"] += 1
        check(x)

    monkeypatch.setattr(fused, "whiten_eagerly", whiten_counted)
    monkeypatch.setattr(validation, "check_input", check_counted)
    return counts


@pytest.mark.parametrize(
    "arguments", [{}, {"affine": False}, {"track_running_stats": False}, {"running": "covariance"}, {"momentum": None}]
)
def test_a_batch_like_the_one_before_goes_straight_to_the_kernels(arguments, straight):
    layer, other = (IterNorm2d(8, group_size=4, impl=impl, **arguments) for impl in ("triton", "torch"))
    batches = [batch() for _ in range(3)]
    outputs = [layer(x) for x in batches]
    assert straight == {"whitened": 3, "checked": 1}
    for x, y in zip(batches, outputs, strict=True):
        torch.testing.assert_close(y, other(x), rtol=1e-4, atol=1e-5)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, rtol=1e-4, atol=1e-5)


SPOILED = [
    ("eps", -1.0, "eps=-1.0"),
    ("momentum", 2.0, "momentum=2.0"),
    ("group_size", 0, "group_size=0"),
    ("group_size", 3, "running_whitening has shape"),
    ("impl", "none", "impl='none'"),
    ("activation", "tanh", "activation='tanh'"),
    ("solver", "pca", "not 'pca'"),
    ("num_features", 4, "expected an input of 4 channels"),
    ("weight", nn.Parameter(torch.ones(3)), r"weight has shape \[3\]; 8 channels need \[8\]"),
    ("bias", nn.Parameter(torch.ones(3)), r"bias has shape \[3\]; 8 channels need \[8\]"),
    ("running_mean", torch.zeros(3), r"running_mean has shape \[3\]; 8 channels need \[8\]"),
    ("running_whitening", torch.zeros(2, 3, 3), r"running_whitening has shape \[2, 3, 3\]"),
]


@pytest.mark.parametrize(("name", "value", "message"), SPOILED)
def test_what_is_spoiled_between_two_batches_is_refused(name, value, message):
    layer = used_layer()
    setattr(layer, name, value)
    before = state_of(layer)
    with pytest.raises(ValueError, match=message):
        layer(batch())
    assert_same_state(layer, before)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.randn(6, 7, 3, 3), ValueError, "expected an input of 8 channels"),
        (torch.randn(6, 8, 9), ValueError, "expected 4D input"),
        (torch.randn(1, 8, 1, 1), ValueError, "more than 1 value per channel"),
        (torch.randn(SHAPE).double(), ValueError, "not torch.float64"),
        (torch.ones(SHAPE, dtype=torch.int64), TypeError, "input has dtype torch.int64"),
        (torch.randn(SHAPE).numpy(), TypeError, "input must be a tensor, got ndarray"),
        ([1.0], TypeError, "input must be a tensor, got list"),
    ],
)
def test_an_input_unlike_the_one_before_is_checked(x, error, message):
    layer = used_layer()
    before = state_of(layer)
    # A batch that was refused is none to be like.
    for _ in range(2):
        with pytest.raises(error, match=message):
            layer(x)
    assert_same_state(layer, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", 0.5),
        ("momentum", 0.7),
        ("num_iters", 1),
        ("solver", "zca"),
        ("activation", "relu"),
        ("track_running_stats", False),
        ("training", False),
    ],
)
def test_what_is_set_between_two_batches_holds(name, value):
    layer = used_layer()
    other = IterNorm2d(8, group_size=4, impl="torch")
    other.load_state_dict(layer.state_dict())
    x = batch()
    for each in (layer, other):
        setattr(each, name, value)
    torch.testing.assert_close(layer(x), other(x), rtol=1e-4, atol=1e-4)
    for key, expected in other.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], expected, rtol=1e-4, atol=1e-4)


def test_another_implementation_set_between_two_batches_is_taken(straight):
    layer = used_layer()
    layer.impl = "torch"
    layer(batch())
    assert straight["whitened"] == 2


def test_a_layer_of_zca_goes_straight_to_the_kernels(straight):
    layer = DecorrelatedBatchNorm2d(8, group_size=4, impl="triton")
    for _ in range(2):
        layer(batch())
    assert straight["whitened"] == 2
    assert straight["checked"] == 1


def test_a_process_group_that_begins_between_two_batches_is_asked(monkeypatch):
    # On a GPU "auto" is the kernels.
    monkeypatch.setattr(dispatch, "choose", lambda *_: dispatch.Backend.TRITON)
    layer = SyncIterNorm(8, group_size=4)
    layer(batch())
    layer(batch())
    group = object()
    monkeypatch.setattr(collective, "active_group", lambda _: group)
    monkeypatch.setattr(SyncIterNorm, "forward", IterNorm2d.forward)
    monkeypatch.setattr(base, "normalize", lambda x, weight, bias, settings, *rest: settings.process_group)
    assert layer(batch()) is group


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_that_was_used_can_be_copied_and_saved(duplicate, straight):
    layer = used_layer()
    x = batch()
    other = duplicate(layer)
    assert torch.equal(other(x), layer(x))
    assert_same_state(other, state_of(layer))


def test_a_batch_norm_made_of_a_layer_that_was_used_keeps_nothing_of_it():
    layer = used_layer()
    back = convert.convert_to_batchnorm(nn.Sequential(layer))[0]
    assert vars(back).keys() == vars(nn.BatchNorm2d(8)).keys()
