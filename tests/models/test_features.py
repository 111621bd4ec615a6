"""IterNorm before the last linear layer of a model."""

from typing import Any

import pytest
import third_party
import torch
from third_party import logits
from torch import nn
from torch.nn.utils import parametrizations

import iternorm
from iternorm import decorrelate_features


def test_decorrelate_features_of_a_third_party_model():
    model, x = third_party.build("transformers ResNet")
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = logits(model, x)
        assert decorrelate_features(model, group_size=16) is model
        # Running statistics start at 0 and the identity: nothing changes in eval.
        torch.testing.assert_close(logits(model, x), expected)
    assert set(keys) < set(model.state_dict())
    linear = model.get_submodule("classifier.1")
    assert isinstance(linear, nn.Linear)
    seen = []
    linear.get_submodule("norm").register_forward_hook(
        lambda module, args, output: seen.append((args[0].shape, output))
    )
    model.train()
    logits(model, x).square().mean().backward()
    shape, output = seen[0]
    assert shape == (8, linear.in_features)
    assert output.mean(0).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"decorrelated already, before 'classifier.1'"):
        decorrelate_features(model)


def test_decorrelated_features_are_the_last_dimension():
    first, last = nn.Linear(5, 6), nn.Linear(6, 3)
    model = decorrelate_features(nn.Sequential(first, last), group_size=3)
    assert type(model.get_submodule("0")) is nn.Linear
    x = torch.randn(4, 7, 5)
    hidden = first(x)
    expected = iternorm.functional.iter_norm(hidden.reshape(28, 6), training=True, group_size=3).view(4, 7, 6)
    torch.testing.assert_close(model(x), nn.functional.linear(expected, last.weight, last.bias))
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear"):
        decorrelate_features(nn.Conv2d(3, 3, 1))
    wrapped = nn.Sequential(nn.Linear(2, 2), parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"the last linear layer, '1', is parametrized; decorrelate first"):
        decorrelate_features(wrapped)
    assert type(decorrelate_features(wrapped, name="0").get_submodule("0")) is iternorm.DecorrelatedLinear
    with pytest.raises(ValueError, match=r"name='head' is no nn.Linear of this model; it has '0'"):
        decorrelate_features(nn.Sequential(nn.Linear(2, 2)), name="head")


def test_a_linear_layer_whose_weight_torch_reads_is_refused():
    # Its eval reads the weights of its linear layers and calls neither.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model = nn.Sequential(encoder, nn.Linear(8, 3))
    for name, given in ((None, encoder), ("0.layers.1.linear1", model)):
        before = str(given)
        with pytest.raises(ValueError, match=r"belongs to an nn.TransformerEncoderLayer.*name of another linear layer"):
            decorrelate_features(given, name=name)
        assert str(given) == before
    # A class with a forward of its own calls its layers.
    own = type("Own", (nn.TransformerEncoderLayer,), {"forward": lambda self, x: self.linear2(self.linear1(x))})
    assert "linear1.norm" in str(dict(decorrelate_features(own(8, 2, 16), name="linear1").named_modules()))
    decorrelate_features(model)
    x = torch.randn(64, 5, 8)
    model(x)
    model.eval()
    with torch.no_grad():
        whitened = model(x)
    torch.testing.assert_close(model(x), whitened)


def test_a_lazy_linear_layer_is_not_passed_over():
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
    with pytest.raises(ValueError, match="the last linear layer, '1', has not seen a batch; run one batch first"):
        decorrelate_features(model)
    model(torch.randn(5, 4))
    assert type(decorrelate_features(model).get_submodule("1")) is iternorm.DecorrelatedLinear


def test_a_linear_layer_with_a_forward_set_on_it_is_refused():
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    inner = model[1].forward
    model[1].forward = lambda input: inner(input)
    last = model[1]
    with pytest.raises(ValueError, match=r"'1' has a forward of its own set .*name of another linear layer"):
        decorrelate_features(model)
    assert model[1] is last
    decorrelate_features(model, name="0")
