"""A layer goes straight to the kernels for a batch like the one before, and notices whatever is not like it."""

import copy
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from checks import assert_same_state, correlated, state_of
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, SyncIterNorm
from iternorm.models import convert

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

SHAPE = (6, 8, 3, 3)


def batch() -> torch.Tensor:
    return correlated(*SHAPE, dtype=torch.float32)


def used_layer(**arguments) -> IterNorm2d:
    """A layer that has seen two batches, the second of which was like the first."""
    layer = IterNorm2d(8, group_size=4, impl="triton", **arguments)
    layer(batch())
    layer(batch())
    return layer


def rooms_of(layer, x) -> set[str]:
    """The modules of the package whose functions run when the layer takes a batch."""
    found = set()

    def note(frame, event, argument):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("iternorm."):
            found.add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(before)
    return found


CHECKS, KERNELS = "iternorm.whitening.validation", "iternorm.backends.triton.run"


@pytest.mark.parametrize(
    "arguments", [{}, {"affine": False}, {"track_running_stats": False}, {"running": "covariance"}, {"momentum": None}]
)
def test_batches_like_the_one_before_are_whitened_alike(arguments):
    layer, other = (IterNorm2d(8, group_size=4, impl=impl, **arguments) for impl in ("triton", "torch"))
    for x in [batch() for _ in range(3)]:
        torch.testing.assert_close(layer(x), other(x), rtol=1e-4, atol=1e-5)
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


def test_what_is_added_to_a_batch_like_the_one_before_is_checked():
    layer = used_layer()
    before = state_of(layer)
    for residual, message in (
        (torch.randn(6, 8, 3, 1), "residual has shape"),
        (batch().double(), "residual has dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(batch(), residual=residual)
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


@pytest.mark.parametrize("kind", [IterNorm2d, DecorrelatedBatchNorm2d])
def test_a_batch_like_the_one_before_is_not_checked_again(kind):
    layer = kind(8, group_size=4, impl="triton")
    assert {CHECKS, KERNELS} <= rooms_of(layer, batch())
    again = rooms_of(layer, batch())
    assert KERNELS in again
    assert CHECKS not in again


def test_another_implementation_set_between_two_batches_is_taken():
    layer = used_layer()
    layer.impl = "torch"
    assert KERNELS not in rooms_of(layer, batch())


@pytest.fixture
def begin_process_group():
    """A function that makes this process the first of two, whose collectives return at once."""
    yield lambda: dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    dist.destroy_process_group()


def test_a_process_group_that_begins_between_two_batches_is_asked(begin_process_group):
    layer = SyncIterNorm(8, group_size=4)
    # As "auto" is on a GPU, as long as the process is alone.
    layer.impl = "triton"
    assert KERNELS in rooms_of(layer, batch())
    assert KERNELS in rooms_of(layer, batch())
    begin_process_group()
    assert "iternorm.backends.triton.synchronized" in rooms_of(layer, batch())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_that_was_used_can_be_copied_and_saved(duplicate):
    layer = used_layer()
    x = batch()
    other = duplicate(layer)
    assert torch.equal(other(x), layer(x))
    assert_same_state(other, state_of(layer))


def test_a_batch_norm_made_of_a_layer_that_was_used_keeps_nothing_of_it():
    layer = used_layer()
    back = convert.convert_to_batchnorm(layer)
    assert vars(back).keys() == vars(nn.BatchNorm2d(8)).keys()
