"""Layers with an activation in them: on the torch path, in eval, folded, converted, copied."""

import copy
import pickle

import pytest
import torch
from checks import correlated, relative_error
from torch import nn

import iternorm
from iternorm import functional


def layers_for(kind=iternorm.IterNorm2d, **words):
    """A layer with an activation, and the same layer without."""
    with_one, without = kind(8, group_size=4, activation="relu", **words), kind(8, group_size=4, **words)
    with_one.bias.data.normal_()
    without.load_state_dict(with_one.state_dict())
    return with_one, without


@pytest.mark.parametrize("impl", ["torch", "reference", "auto"])
@pytest.mark.parametrize("kind", [iternorm.IterNorm2d, iternorm.DecorrelatedBatchNorm2d])
def test_it_is_relu_after_the_layer_in_training_and_in_eval(kind, impl):
    fused, plain = layers_for(kind, impl=impl)
    x = correlated(6, 8, 4, 4).float()
    grad = torch.randn_like(x)
    for mode in (True, False):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = fused.train(mode)(inputs[0]), plain.train(mode)(inputs[1]).relu()
        assert torch.equal(*outputs)
        assert (outputs[0] == 0).any()
        for y in outputs:
            y.backward(grad)
        assert relative_error(inputs[0].grad, inputs[1].grad) < 1e-6
        assert relative_error(fused.weight.grad, plain.weight.grad) < 1e-6
    assert relative_error(fused.running_whitening, plain.running_whitening) < 1e-6


def test_the_functions_take_it():
    x = correlated(20, 8).float()
    y = functional.iter_norm(x, training=True, group_size=4)
    assert torch.equal(functional.iter_norm(x, training=True, group_size=4, activation="relu"), y.relu())
    y = functional.decorrelated_batch_norm(x, training=True, group_size=4)
    assert torch.equal(functional.decorrelated_batch_norm(x, training=True, group_size=4, activation="relu"), y.relu())


@pytest.mark.parametrize("wrong", ["gelu", "ReLU", nn.ReLU, True])
def test_another_activation_is_an_error_that_says_what_there_is(wrong):
    with pytest.raises(ValueError, match=r'activation=.* is not known; use "relu", or None'):
        iternorm.IterNorm2d(8, activation=wrong)
    with pytest.raises(ValueError, match=r'activation=.* is not known; use "relu", or None'):
        functional.iter_norm(torch.randn(4, 8), training=True, activation=wrong)
    layer = iternorm.IterNorm2d(8)
    layer.activation = wrong
    with pytest.raises(ValueError, match=r'activation=.* is not known; use "relu", or None'):
        layer(torch.randn(4, 8, 2, 2))
    assert layer.num_batches_tracked == 0


def test_it_is_shown_copied_and_pickled():
    layer = iternorm.IterNorm2d(8, activation="relu")
    assert repr(layer).endswith("running='whitening', activation='relu')")
    assert "activation" not in repr(iternorm.IterNorm2d(8))
    assert copy.deepcopy(layer).activation == "relu"
    assert pickle.loads(pickle.dumps(layer)).activation == "relu"
    assert layer.state_dict().keys() == iternorm.IterNorm2d(8).state_dict().keys()


@pytest.mark.parametrize("padding", [0, 1])
def test_folding_leaves_the_activation_in_place(padding):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), iternorm.IterNorm2d(8, activation="relu"), nn.Conv2d(8, 4, 3, padding=padding)
    )
    x = torch.randn(8, 3, 9, 9)
    model(x)
    folded, table = iternorm.fold(model.eval())
    assert [row.how for row in table] == ["previous"]
    assert isinstance(folded.get_submodule("1").activation, nn.ReLU)
    assert not any(isinstance(layer, iternorm.IterNorm2d) for layer in folded.modules())
    assert relative_error(folded(x), model(x)) < 1e-5
    # The model that was folded still has it.
    assert model[1].activation == "relu"


def test_an_activation_between_keeps_the_norm_out_of_the_next_layer():
    model = nn.Sequential(iternorm.IterNorm2d(8, activation="relu"), nn.Conv2d(8, 4, 1))
    x = correlated(6, 8, 4, 4).float()
    model(x)
    folded, table = iternorm.fold(model.eval())
    assert table[0].how == "pointwise"
    assert "an activation lies between" in table[0].reason
    assert relative_error(folded(x), model(x)) < 1e-5


def test_layers_cannot_take_it_into_their_weights():
    norm = iternorm.IterNorm2d(8, activation="relu").eval()
    convolution = nn.Conv2d(8, 8, 1)
    for call in (
        lambda: iternorm.fold_into_previous_layer(convolution, norm),
        lambda: iternorm.fold_into_next_layer(norm, convolution),
        lambda: iternorm.fold_pointwise(norm),
    ):
        with pytest.raises(ValueError, match=r"activation='relu' in it.*iternorm\.fold"):
            call()


def test_conversions_keep_it_or_say_why_not():
    model = nn.Sequential(iternorm.IterNorm2d(8, activation="relu"))
    synchronized = iternorm.convert_sync_iternorm(copy.deepcopy(model))
    assert synchronized.get_submodule("0").activation == "relu"
    x = correlated(6, 8, 4, 4).float()
    assert torch.equal(synchronized(x), copy.deepcopy(model)(x))
    report = iternorm.ConversionReport()
    with pytest.warns(UserWarning, match="activation='relu' in it, which no BatchNorm has"):
        back = iternorm.convert_to_batchnorm(model, report=report)
    assert isinstance(back.get_submodule("0"), iternorm.IterNorm2d)
    assert report.skipped


def test_a_batchnorm_made_of_a_layer_has_nothing_of_it():
    made = iternorm.convert_to_batchnorm(iternorm.IterNorm2d(8))
    assert set(vars(made)) == set(vars(nn.BatchNorm2d(8)))
