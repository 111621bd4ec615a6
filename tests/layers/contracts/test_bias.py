"""Layers with a weight and no bias, as BatchNorm has them since torch 2.13."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from checks import assert_same_state, correlated, relative_error, skip_without_kernels, state_of
from torch import nn

import iternorm
from iternorm import IterNorm2d, SyncIterNorm

KINDS = [
    (iternorm.IterNorm1d, ()),
    (iternorm.IterNorm2d, (3, 3)),
    (iternorm.IterNorm3d, (2, 2, 2)),
    (iternorm.DecorrelatedBatchNorm1d, ()),
    (iternorm.DecorrelatedBatchNorm2d, (3, 3)),
    (iternorm.DecorrelatedBatchNorm3d, (2, 2, 2)),
    (SyncIterNorm, (3, 3)),
]


def biasless(kind=nn.BatchNorm2d, channels=8):
    """A BatchNorm without a bias and with statistics of its own, made in a way that torch 2.6 knows too."""
    layer = kind(channels)
    layer.register_parameter("bias", None)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.2, 3)
    return layer.eval()


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_it_is_the_layer_whose_bias_is_zero(kind, shape):
    bare, full = (kind(8, group_size=3, dtype=torch.float64, bias=b) for b in (False, True))
    assert bare.bias is None
    assert bare.weight.shape == (8,)
    nn.init.normal_(bare.weight)
    full.load_state_dict(bare.state_dict(), strict=False)
    x = correlated(12, 8, *shape)
    grad = torch.randn_like(x)
    for mode in (True, False):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for layer, leaf in zip((bare, full), inputs, strict=True):
            layer.zero_grad()
            layer.train(mode)(leaf).backward(grad)
        torch.testing.assert_close(bare(x), full(x))
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        torch.testing.assert_close(bare.weight.grad, full.weight.grad)


@pytest.mark.parametrize("impl", ["native", "torch", "reference", "triton"])
def test_every_implementation_takes_a_weight_alone(impl):
    if impl == "triton":
        skip_without_kernels()
    layer = IterNorm2d(8, group_size=3, impl=impl, bias=False)
    layer.weight.data.normal_()
    x = correlated(6, 8, 5, 5, dtype=torch.float32)
    on = x.to("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu").requires_grad_()
    layer.to(on.device)
    grad = torch.randn_like(on)
    y = layer(on)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (on, layer.weight)]
    expected = iternorm.reference.iter_norm(*wide, group_size=3)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    for ours, theirs in zip((y, on.grad, layer.weight.grad), (expected, *gradients), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_where_torch_has_the_argument_it_stands_where_batch_norm_has_it(kind, shape):
    argument = inspect.signature(kind).parameters["bias"]
    assert (argument.kind, argument.default) == (argument.KEYWORD_ONLY, True)
    theirs = inspect.signature(nn.BatchNorm2d).parameters.get("bias")
    if theirs is not None:
        assert (argument.kind, argument.default) == (theirs.kind, theirs.default)
    # As in BatchNorm, there is no bias without `affine`.
    layer = kind(8, affine=False, bias=True)
    assert layer.weight is layer.bias is None


def test_it_is_shown_copied_and_pickled():
    layer = IterNorm2d(8, bias=False)
    assert repr(layer).endswith("running='whitening', bias=False)")
    for plain in (IterNorm2d(8), IterNorm2d(8, affine=False, bias=False)):
        assert "bias" not in repr(plain)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.bias is None
        assert repr(other) == repr(layer)


def test_checkpoints_with_and_without_a_bias():
    bare, full = IterNorm2d(8, bias=False), IterNorm2d(8)
    assert "bias" not in bare.state_dict()
    state = {name: value + 1 for name, value in bare.state_dict().items()}
    IterNorm2d(8, bias=False).load_state_dict(state)
    # The two kinds do not fit each other, as with BatchNorm; what they share loads if one asks for that.
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        full.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "bias"'):
        bare.load_state_dict(full.state_dict())
    assert full.load_state_dict(state, strict=False).missing_keys == ["bias"]
    torch.testing.assert_close(full.weight.detach(), state["weight"])
    assert bare.load_state_dict(full.state_dict(), strict=False).unexpected_keys == ["bias"]
    assert bare.bias is None


def test_a_batch_norm_checkpoint_without_a_bias():
    batch_norm = biasless()
    layer = IterNorm2d(8, group_size=3, bias=False)
    layer.load_state_dict(batch_norm.state_dict())
    x = torch.randn(4, 8, 3, 3)
    torch.testing.assert_close(layer.eval()(x), batch_norm(x))


@pytest.mark.parametrize(
    ("kind", "ours"),
    [(nn.BatchNorm2d, IterNorm2d), (nn.BatchNorm3d, iternorm.IterNorm3d), (nn.SyncBatchNorm, SyncIterNorm)],
)
def test_converted_there_and_back(kind, ours):
    batch_norm = biasless(kind)
    x = torch.randn(4, 8, 3, 3, 3) if kind is nn.BatchNorm3d else torch.randn(4, 8, 3, 3)
    expected = batch_norm(x)
    layer = iternorm.convert_batchnorm(copy.deepcopy(batch_norm), group_size=3)
    assert type(layer) is ours
    assert layer.bias is None
    torch.testing.assert_close(layer(x), expected)
    back = iternorm.convert_to_batchnorm(layer)
    assert type(back) is kind
    assert back.bias is None
    assert back.state_dict().keys() == batch_norm.state_dict().keys()
    torch.testing.assert_close(back(x), expected)


def test_reset_parameters_after_a_conversion_resets_the_weight():
    layer: Any = iternorm.convert_batchnorm(biasless())
    layer.reset_parameters()
    torch.testing.assert_close(layer.weight.detach(), torch.ones(8))
    assert_same_state(layer, state_of(IterNorm2d(8, bias=False)))


def test_reset_parameters_of_a_bias_alone():
    layer = IterNorm2d(8)
    layer.bias.data.normal_()
    layer.register_parameter("weight", None)
    layer.reset_parameters()
    assert not layer.bias.any()


def test_synchronized_and_folded():
    convolution, norm = nn.Conv2d(3, 8, 3), IterNorm2d(8, group_size=3, bias=False)
    norm.weight.data.normal_()
    model = nn.Sequential(convolution, norm, nn.ReLU())
    x = torch.randn(16, 3, 6, 6)
    model(x)
    synchronized = iternorm.convert_sync_iternorm(copy.deepcopy(model))
    layer = synchronized.get_submodule("1")
    assert type(layer) is SyncIterNorm
    assert layer.bias is None
    model.eval()
    torch.testing.assert_close(synchronized.eval()(x), model(x))
    folded, table = iternorm.fold(model)
    assert [row.how for row in table] == ["previous"]
    assert relative_error(folded(x), model(x)) < 1e-5
    pointwise = iternorm.fold_pointwise(norm)
    y = convolution(x)
    assert relative_error(pointwise(y), norm(y)) < 1e-5
