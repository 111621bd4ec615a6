"""A model with whitening layers becomes one with BatchNorm."""

import pytest
import third_party
import torch
from changed_layers import changed_layers
from third_party import logits
from torch import nn

from iternorm import DecorrelatedBatchNorm1d, convert_batchnorm, convert_to_batchnorm


@pytest.mark.parametrize("name", ["transformers ResNet", "monai resnet18 2-D"])
def test_the_way_back_gives_the_original_output(name):
    model, x = third_party.build(name)
    classes = [type(m) for m in model.modules()]
    with torch.no_grad():
        expected = logits(model, x)
        back = convert_to_batchnorm(convert_batchnorm(model))
        torch.testing.assert_close(logits(back, x), expected, rtol=1e-4, atol=1e-5)
    assert [type(m) for m in back.modules()] == classes


def test_what_was_done_to_a_layer_is_not_lost():
    model = changed_layers()
    layers, x = list(model), torch.randn(3, 4, 5, 5)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"3 layer.* is parametrized.*1: .* forward of its own.*2: .* forward of its"):
        convert_to_batchnorm(model)
    assert list(model) == layers
    torch.testing.assert_close(model(x), expected)


def test_a_whitening_matrix_with_no_diagonal_scale_stays():
    model = nn.Sequential(DecorrelatedBatchNorm1d(4, solver="pca"), DecorrelatedBatchNorm1d(4, running="covariance"))
    model(torch.randn(16, 4))
    with pytest.warns(UserWarning, match="0: DecorrelatedBatchNorm1d averages whitening matrices along principal axes"):
        convert_to_batchnorm(model)
    assert type(model[0]) is DecorrelatedBatchNorm1d
    assert type(model[1]) is nn.BatchNorm1d
