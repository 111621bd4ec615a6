"""A layer whose forward is not that of its base class is not taken for one."""

import re
from types import MethodType
from typing import Any

import pytest
import torch
from changed_layers import Doubled
from foldable import check, settled
from third_party import BatchNormAct2d
from torch import nn

from iternorm import (
    DecorrelatedLinear,
    IterNorm2d,
    convert_batchnorm,
    decorrelate_features,
    eval_map,
    fold,
    fold_into_next_layer,
    fold_into_previous_layer,
    fold_pointwise,
)


def wrapped(layer: Any) -> Any:
    """As tools do that put a function of their own around a layer."""
    inner = layer.forward
    layer.forward = lambda *args: 2 * inner(*args)
    return layer


@pytest.mark.parametrize("make", [lambda: Doubled(4), lambda: wrapped(IterNorm2d(4))])
def test_a_norm_with_a_forward_of_its_own_is_kept(make):
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for before in (nn.Conv2d(4, 4, 1), nn.ReLU()):
        model = settled(nn.Sequential(before, make(), nn.Conv2d(4, 4, 1)))
        for example in (None, x):
            folded, table = fold(model, example)
            torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
            assert table[0].how == "kept"
            assert "has a forward of its own" in table[0].reason


def test_a_layer_with_a_forward_of_its_own_does_not_pass_its_input_on():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for passing in (nn.Identity(), nn.Dropout()):
        check(settled(nn.Sequential(nn.Conv2d(4, 4, 1), wrapped(passing), IterNorm2d(4))), x, ["pointwise"])


def test_decorrelated_features_stay_before_a_linear_layer_with_a_forward_of_its_own():
    x = torch.randn(5, 4, dtype=torch.float64)
    model = settled(decorrelate_features(nn.Sequential(nn.ReLU(), nn.Linear(4, 3))))
    linear = model[1]
    linear.forward = MethodType(lambda self, x: nn.functional.linear(2 * self.norm(x), self.weight), linear)
    folded, _ = check(model, x, ["pointwise"])
    assert type(folded[1]) is DecorrelatedLinear


def test_by_hand_a_norm_that_does_more_is_refused():
    converted: Any = convert_batchnorm(BatchNormAct2d(4)).eval()
    for norm in (Doubled(4).eval(), converted):
        conv = nn.Conv2d(4, 4, 1)
        for call in (fold_pointwise, lambda norm: fold_into_previous_layer(conv, norm)):  # noqa: B023
            with pytest.raises(TypeError, match=re.escape(f"{type(norm).__name__} does more than whiten")):
                call(norm)
        with pytest.raises(TypeError, match="does more than whiten"):
            fold_into_next_layer(norm, conv)


def test_by_hand_what_is_no_pair_is_named():
    norm: Any = IterNorm2d(4).eval()
    calls: Any = (eval_map, fold_pointwise, lambda norm: fold_into_previous_layer(nn.Conv2d(4, 4, 1), norm))
    for call in calls:
        with pytest.raises(TypeError, match="norm is a BatchNorm2d; give a whitening layer, such as"):
            call(nn.BatchNorm2d(4))
    with pytest.raises(TypeError, match="norm is a Conv2d; give a whitening layer"):
        fold_into_previous_layer(norm, nn.Conv2d(4, 4, 1))  # pyright: ignore[reportArgumentType]
    for call in (fold_into_previous_layer, lambda linear, norm: fold_into_next_layer(norm, linear)):
        with pytest.raises(ValueError, match="the features of a linear layer are not the channels of IterNorm2d"):
            call(nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match="max_growth=nan must be at least 1"):
        fold(nn.Sequential(norm).eval(), max_growth=float("nan"))


def test_a_weight_that_is_no_parameter_of_the_layer_is_not_folded_into():
    class Scaled(nn.Conv2d):
        weight: Any = property(lambda self: self.unscaled * 2)

        def register_parameter(self, name, param):
            super().register_parameter("unscaled" if name == "weight" else name, param)

    scaled: Any = Scaled(4, 4, 3)
    nn.init.normal_(scaled.unscaled)
    fixed: Any = nn.Conv2d(4, 4, 3)
    weight = fixed.weight.detach()
    del fixed.weight
    fixed.register_buffer("weight", weight)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for conv in (scaled, fixed):
        check(settled(nn.Sequential(conv, IterNorm2d(4))), x, ["pointwise"])
        with pytest.raises(
            TypeError, match=r"is not a convolution or linear layer of torch\.nn that can be folded into"
        ):
            fold_into_previous_layer(conv, IterNorm2d(4).eval())


class Heat(nn.Module):
    """Class activation maps: what the last layer's weights are at each position."""

    def __init__(self, branch=False):
        super().__init__()
        self.branch = branch
        self.conv, self.fc = nn.Conv2d(4, 5, 1), nn.Linear(5, 3)

    def forward(self, x):
        features = self.conv(x)
        if self.branch and features.sum() == 0:
            return features
        maps = nn.functional.conv2d(features, self.fc.weight[:, :, None, None])
        return torch.cat([self.fc(features.mean((2, 3)))[:, :, None], maps.flatten(2)], 2)


def test_decorrelated_features_stay_before_a_weight_that_the_model_reads():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    folded, _ = check(settled(decorrelate_features(Heat())), x, ["pointwise"])
    assert type(folded.fc) is DecorrelatedLinear
    # The layer itself reads it.
    check(settled(decorrelate_features(nn.Linear(4, 3))), torch.randn(5, 4, dtype=torch.float64), ["next"])
    # Where there is nothing to read, a model need not be traced.
    model = settled(decorrelate_features(nn.Sequential(nn.Flatten(), nn.Linear(100, 3))))
    model.forward = lambda x: model[1](model[0](x)) if x.sum() else x
    assert [row.how for row in fold(model)[1]] == ["next"]
    model = settled(decorrelate_features(Heat(branch=True)))
    folded, table = fold(model, x)
    assert table[0].how == "pointwise"
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
