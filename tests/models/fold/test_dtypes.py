"""A model in half precision whose norms were left in fp32: what they become has the dtype of what reaches them."""

from typing import Any

import pytest
import torch
from foldable import norms_of, settled
from torch import nn

import iternorm
from iternorm import IterNorm1d, IterNorm2d, fold, fold_pointwise

# Of the largest output: a few roundings of activations and weights.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}


def mixed(model: nn.Module, dtype: torch.dtype) -> Any:
    """The model in `dtype`, and its whitening layers in fp32."""
    model = settled(model).to(dtype)
    for norm in norms_of(model):
        norm.float()
    return model


def check(model: Any, x: torch.Tensor, hows: list[str]) -> Any:
    """Fold by tracing and by running: no parameter is left in fp32, and the output is the model's."""
    expected = model(x)
    assert expected.dtype == x.dtype
    for example in (None, x):
        folded, table = fold(model, example)
        assert [row.how for row in table] == hows
        assert {parameter.dtype for parameter in folded.parameters()} == {x.dtype}
        error = (folded(x) - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[x.dtype]
    return folded


def first_in_the_model() -> nn.Module:
    return nn.Sequential(IterNorm2d(4, group_size=2), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def after_other_layers() -> nn.Module:
    middle = [nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), IterNorm2d(4, group_size=2, activation="relu")]
    return nn.Sequential(nn.Conv2d(4, 4, 3), *middle, nn.Conv2d(4, 3, 3, padding=1))


def in_a_chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3), IterNorm2d(4), nn.ReLU(), IterNorm2d(4), nn.Conv2d(4, 3, 1), nn.ReLU(), IterNorm2d(3)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("build", "hows"),
    [
        (first_in_the_model, ["pointwise"]),
        (after_other_layers, ["pointwise"]),
        (in_a_chain, ["previous", "next", "pointwise"]),
    ],
)
def test_norms_in_fp32_fold_into_the_dtype_of_the_activation(build, hows, dtype):
    torch.manual_seed(0)
    model = mixed(build(), dtype)
    check(model, torch.randn(3, 4, 7, 6).to(dtype), hows)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_vectors_and_decorrelated_features(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), IterNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    model = mixed(iternorm.decorrelate_features(model), dtype)
    check(model, torch.randn(8, 6).to(dtype), ["pointwise", "next"])


class InFull(nn.Module):
    """Casts around its norm, as code does that wants a norm in fp32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.norm = IterNorm2d(4, group_size=2)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.last(self.norm(y.float().relu()).relu().to(y.dtype))


def test_a_norm_that_is_given_fp32_stays_in_fp32():
    torch.manual_seed(0)
    model = mixed(InFull(), torch.bfloat16)
    x = torch.randn(3, 4, 6, 6).bfloat16()
    for example in (None, x):
        folded: Any = fold(model, example)[0]
        assert folded.norm.weight.dtype == torch.float32
        # One rounding of the norm's output, which may go either way.
        torch.testing.assert_close(folded(x), model(x), rtol=1e-2, atol=3e-2)


def test_a_run_under_autocast_leaves_the_layers_in_the_dtype_of_the_weights():
    torch.manual_seed(0)
    model = settled(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), IterNorm2d(4, group_size=2))).float()
    x = torch.randn(3, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        folded, _ = fold(model, x)
    assert {parameter.dtype for parameter in folded.parameters()} == {torch.float32}
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)


def test_one_layer_by_hand():
    norm = settled(IterNorm2d(4, group_size=2)).float()
    assert fold_pointwise(norm).weight.dtype == torch.float32
    x = torch.randn(3, 4, 5, 5).half()
    layer = fold_pointwise(norm, dtype=torch.float16)
    torch.testing.assert_close(layer(x), norm(x), rtol=4e-3, atol=4e-3)
