"""What a checkpoint of this layer, of BatchNorm and of the authors' layer becomes when it is loaded."""

import re
from typing import Any

import pytest
import torch
from checks import assert_same_state, correlated, relative_error, state_of
from torch import nn

from iternorm import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, IterNorm3d
from iternorm.layers.checkpoints import StateDictError


def trained_batch_norm(channels=10, kind=nn.BatchNorm2d, shape=(3, 3), **kwargs):
    layer = kind(channels, **kwargs).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    for _ in range(3):
        layer(3 * correlated(8, channels, *shape))
    return layer.eval()


def authors_state(channels, block):
    """The keys and shapes of the authors' 2019 layer, with random values."""
    groups = channels // block
    return {
        "weight": torch.randn(1, channels, 1, 1),
        "bias": torch.randn(1, channels, 1, 1),
        "running_mean": torch.randn(groups, block, 1),
        "running_wm": torch.randn(groups, block, block),
    }


@pytest.mark.parametrize("group_size", [1, 4, 5, 10, None])
@pytest.mark.parametrize(
    ("kind", "ours", "shape"),
    [
        (nn.BatchNorm1d, IterNorm1d, (7,)),
        (nn.BatchNorm2d, IterNorm2d, (3, 3)),
        (nn.BatchNorm3d, IterNorm3d, (2, 2, 2)),
        (nn.BatchNorm2d, DecorrelatedBatchNorm2d, (3, 3)),
    ],
)
def test_a_batch_norm_checkpoint_gives_batch_norms_eval(group_size, kind, ours, shape):
    batch_norm = trained_batch_norm(kind=kind, shape=shape)
    layer = ours(10, group_size=group_size, dtype=torch.float64)
    result = layer.load_state_dict(batch_norm.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    x = correlated(4, 10, *shape)
    torch.testing.assert_close(layer.eval()(x), batch_norm(x))
    assert layer.num_batches_tracked == 3


def test_a_batch_norm_checkpoint_in_covariance_mode():
    batch_norm = trained_batch_norm(eps=1e-3)
    x = correlated(4, 10, 3, 3)
    for solver in ("zca", "cholesky"):
        exact = DecorrelatedBatchNorm2d(10, 1e-3, group_size=4, solver=solver, running="covariance").double()
        exact.load_state_dict(batch_norm.state_dict())
        torch.testing.assert_close(exact.eval()(x), batch_norm(x))
    one = IterNorm2d(10, 1e-3, group_size=1, running="covariance").double()
    one.load_state_dict(batch_norm.state_dict())
    torch.testing.assert_close(one.eval()(x), batch_norm(x))
    iterated = IterNorm2d(10, 1e-3, group_size=4, running="covariance").double()
    with pytest.warns(UserWarning, match="5 Newton steps may stop short of the exact root"):
        iterated.load_state_dict(batch_norm.state_dict())
    variance = torch.cat([m.diagonal() for m in iterated.running_covariance])[:10]
    torch.testing.assert_close(variance, batch_norm.running_var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_norm_checkpoint_of_half_precision(dtype):
    saved = nn.BatchNorm2d(6)
    saved(3 * torch.randn(20, 6, 4, 4) + 1)
    state = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in saved.state_dict().items()
    }
    batch_norm, layer = nn.BatchNorm2d(6).eval(), IterNorm2d(6).eval()
    batch_norm.load_state_dict(state)
    layer.load_state_dict(state)
    x = 3 * torch.randn(5, 6, 4, 4) + 1
    # Not the roundings of half precision: 4e-4 and 8e-3.
    torch.testing.assert_close(layer(x), batch_norm(x), rtol=1e-5, atol=1e-5)
    layer.load_state_dict(state, assign=True)
    assert {value.dtype for value in layer.state_dict().values() if value.is_floating_point()} == {dtype}


def test_a_batch_norm_checkpoint_is_shrunk_alike_in_both_modes():
    state, x = trained_batch_norm().state_dict(), correlated(4, 10, 3, 3)
    outputs = []
    for running in ("whitening", "covariance"):
        layer = DecorrelatedBatchNorm2d(10, shrinkage=0.3, running=running, dtype=torch.float64)
        layer.load_state_dict(state)
        outputs.append(layer.eval()(x))
    torch.testing.assert_close(*outputs)


def test_a_variance_beside_our_own_matrix_is_not_taken():
    layer = IterNorm2d(4)
    layer(torch.randn(8, 4, 3, 3))
    before = state_of(layer)
    result = layer.load_state_dict({**layer.state_dict(), "running_var": torch.full((4,), 9.0)}, strict=False)
    assert result.unexpected_keys == ["running_var"]
    assert_same_state(layer, before)


def test_inside_a_model_and_without_a_batch_count():
    state = nn.Sequential(nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10)).state_dict()
    state = {k: v + 1 if v.is_floating_point() else v for k, v in state.items() if "num_batches" not in k}
    model = nn.Sequential(nn.Conv2d(3, 10, 1), IterNorm2d(10, group_size=4))
    untouched = dict(state)
    model.load_state_dict(state)
    assert state.keys() == untouched.keys()
    assert model[1].num_batches_tracked == 0
    batch_norm = nn.Sequential(nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10))
    batch_norm.load_state_dict(state, strict=False)
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(model.eval()(x), batch_norm.eval()(x))


def expected_blocks(state, x):
    """The authors' eval in their own groups."""
    channels = x.shape[1]
    whitening = torch.block_diag(*state["running_wm"])
    centered = x - state["running_mean"].view(1, channels, 1, 1)
    return torch.einsum("ij,njhw->nihw", whitening, centered) * state["weight"] + state["bias"]


@pytest.mark.parametrize(
    ("channels", "block", "group_size"),
    [(160, 32, 32), (160, 32, 64), (64, 32, 64), (12, 4, None), (8, 1, 3), (6, 6, 64)],
)
def test_the_authors_checkpoint(channels, block, group_size):
    state = authors_state(channels, block)
    layer = IterNorm2d(channels, group_size=group_size)
    result = layer.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    x = torch.randn(3, channels, 2, 2)
    assert relative_error(layer.eval()(x), expected_blocks(state, x)) < 1e-6


def test_the_authors_160_channels_in_blocks_of_32_become_groups_of_64_64_32():
    state = authors_state(160, 32)
    layer = IterNorm2d(160)
    layer.load_state_dict(state)
    assert layer.running_whitening.shape == (3, 64, 64)
    blocks = state["running_wm"]
    torch.testing.assert_close(layer.running_whitening[1], torch.block_diag(blocks[2], blocks[3]))
    torch.testing.assert_close(layer.running_whitening[2, :32, :32], blocks[4])
    assert not layer.running_whitening[2, 32:].any()
    assert not layer.running_whitening[2, :, 32:].any()


def test_the_authors_affine_for_2d_input_and_without_statistics():
    state = {"weight": torch.randn(1, 6), "bias": torch.randn(1, 6)}
    layer = IterNorm1d(6, track_running_stats=False)
    layer.load_state_dict(state)
    torch.testing.assert_close(layer.weight.detach(), state["weight"][0])


@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kwargs", [{"affine": False}, {"track_running_stats": False}, {}])
def test_our_own_checkpoint_round_trips(running, momentum, kwargs):
    layer = IterNorm2d(10, momentum=momentum, group_size=4, running=running, **kwargs)
    for _ in range(2):
        layer(correlated(8, 10, 3, 3, dtype=torch.float32))
    copy = IterNorm2d(10, momentum=momentum, group_size=4, running=running, **kwargs)
    copy.load_state_dict(layer.state_dict())
    assert_same_state(copy, state_of(layer))
    state: Any = layer.state_dict()
    assert state._metadata[""]["version"] == 1
    names = {"weight", "bias"} if kwargs.get("affine", True) else set()
    if kwargs.get("track_running_stats", True):
        names |= {"running_mean", f"running_{running}", "num_batches_tracked"}
    assert set(layer.state_dict()) == names


BAD_STATES = [
    pytest.param(
        lambda: IterNorm2d(10),
        lambda: IterNorm2d(12).state_dict(),
        r"state_dict['weight'] has shape [12], this layer has [10]",
        id="another width",
    ),
    pytest.param(
        lambda: IterNorm2d(10, group_size=4),
        lambda: IterNorm2d(10, group_size=5).state_dict(),
        "state_dict['running_whitening'] has shape [2, 5, 5], this layer has [3, 4, 4]; build the layer with the "
        "num_features (10 here) and group_size (4 here)",
        id="another group_size",
    ),
    pytest.param(
        lambda: IterNorm2d(10),
        lambda: IterNorm2d(10, running="covariance").state_dict(),
        "holds running_covariance and this layer keeps running_whitening; build it with running='covariance'",
        id="another statistic",
    ),
    pytest.param(
        lambda: IterNorm2d(10),
        lambda: {**nn.BatchNorm2d(10).state_dict(), "running_var": torch.ones(9)},
        "running_var has shape [9], this layer has num_features=10",
        id="another BatchNorm",
    ),
    pytest.param(
        lambda: IterNorm2d(10, group_size=5),
        lambda: authors_state(10, 2),
        "running_wm has shape [5, 2, 2], which does not divide 10 channels in groups of 5; "
        "build the layer with group_size=2",
        id="blocks across groups",
    ),
    pytest.param(
        lambda: IterNorm2d(10, group_size=5),
        lambda: {**authors_state(10, 5), "running_wm": torch.ones(2, 4, 5)},
        "running_wm has shape [2, 4, 5]",
        id="blocks not square",
    ),
    pytest.param(
        lambda: IterNorm2d(10, running="covariance"),
        lambda: authors_state(10, 10),
        'averages covariances; build it with running="whitening"',
        id="authors' into covariance mode",
    ),
    pytest.param(
        lambda: DecorrelatedBatchNorm1d(10),
        lambda: {**DecorrelatedBatchNorm1d(10).state_dict(), "bias": torch.ones(3)},
        "state_dict['bias'] has shape [3]",
        id="one bad entry",
    ),
]


@pytest.mark.parametrize(("layer", "state", "message"), BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(layer, state, message):
    layer = layer()
    before = state_of(layer)
    state = {k: torch.full_like(v, 7) for k, v in state().items()}
    for kind in (StateDictError, ValueError, RuntimeError):
        with pytest.raises(kind, match=re.escape(message)):
            layer.load_state_dict(state)
    assert_same_state(layer, before)


def test_missing_and_unexpected_keys_are_reported_as_by_batch_norm():
    layer = IterNorm2d(4)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"weight": torch.ones(4)})
    result = layer.load_state_dict({"weight": torch.ones(4), "nonsense": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["nonsense"]
    assert "running_whitening" in result.missing_keys


def test_assign_keeps_the_given_tensors():
    layer = IterNorm2d(8, device="meta")
    state = IterNorm2d(8).state_dict()
    layer.load_state_dict(state, assign=True)
    assert layer(torch.randn(4, 8, 2, 2)).isfinite().all()


def test_an_assigned_state_without_a_batch_count_gets_one_on_its_device():
    state = {name: value for name, value in nn.BatchNorm2d(6, device="meta").state_dict().items() if "num" not in name}
    layer = IterNorm2d(6)
    layer.load_state_dict(state, assign=True)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
