"""Tools for models and the layers that whiten each sample by itself: what has a meaning works, the rest is named."""

import pytest
import torch
from torch import nn

import iternorm
from iternorm.analysis import analyze

LAYERS = [iternorm.GroupWhitening2d(8, num_groups=4), iternorm.InstanceWhitening2d(8)]


def network(layer):
    return nn.Sequential(nn.Conv2d(3, 8, 3), iternorm.IterNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), layer)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_fold_keeps_the_layer_and_says_why(layer):
    model = network(layer).eval()
    x = torch.randn(2, 3, 12, 12)
    folded, table = iternorm.fold(model)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)
    assert [row.how for row in table] == ["previous", "kept"]
    assert table[1].name == "4"
    assert "each sample by itself" in table[1].reason
    for call in (iternorm.eval_map, iternorm.fold_pointwise, lambda n: iternorm.fold_into_previous_layer(model[3], n)):
        with pytest.raises(
            TypeError, match=f"{type(layer).__name__} whitens each sample by itself, so it has no fixed"
        ):
            call(layer)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_conversion_to_batch_norm_names_the_layer(layer):
    model = network(layer)
    with pytest.warns(
        UserWarning, match=f"4: {type(layer).__name__} whitens each sample by itself, which no BatchNorm"
    ):
        iternorm.convert_to_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[4] is layer


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_other_conversions_leave_the_layer_alone(layer):
    model = network(layer)
    model[1] = nn.BatchNorm2d(8)
    model = iternorm.freeze(iternorm.convert_sync_iternorm(iternorm.convert_batchnorm(model)))
    assert model[4] is layer  # pyright: ignore[reportIndexIssue]
    iternorm.recalibrate(iternorm.unfreeze(model), [torch.randn(8, 3, 12, 12)], progress=False)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_analysis_sees_the_layer_and_no_noise_of_the_batch(layer):
    report = analyze(network(layer), [torch.randn(16, 3, 12, 12) for _ in range(3)], batch_sizes=(16,))
    found = {row.name: row for row in report.layers}
    assert found["4"].kind == type(layer).__name__
    text = report.table()
    assert type(layer).__name__ in text


def test_analysis_of_a_head_does_not_take_it_for_another_operation():
    head = iternorm.DecorrelatedBatchNorm2d(8, 0.0, correction=1, shrinkage=0.1)
    report = analyze(network(head), [torch.randn(16, 3, 12, 12) for _ in range(3)], batch_sizes=(16,))
    assert {row.name: row for row in report.layers}["4"].operation == "DecorrelatedBatchNorm2d"
