"""The networks of the experiments have the layers that the paper's tables list."""

import torch
from torch import nn

from iternorm.experiments.models import VGG


def test_vgg_is_table_a2():
    model = VGG(10, norm=nn.BatchNorm2d)
    found = []
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            assert (layer.kernel_size, layer.padding, layer.stride, layer.bias) == ((3, 3), (1, 1), (1, 1), None)
            found.append((layer.in_channels, layer.out_channels))
        elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            assert layer.kernel_size == 2
            found.append("max" if isinstance(layer, nn.MaxPool2d) else "average")
    assert found == [
        *((3, 64), (64, 64), "max"),
        *((64, 128), (128, 128), "max"),
        *((128, 256), (256, 256), (256, 256), (256, 256), "max"),
        *((256, 512), (512, 512), (512, 512), (512, 512), "max"),
        *((512, 512), (512, 512), (512, 512), (512, 512), "average"),
    ]
    assert (model.head.in_features, model.head.out_features) == (512, 10)


def test_vgg_normalizes_every_convolution_and_then_rectifies():
    model = VGG(10, norm=lambda width: nn.GroupNorm(1, width), blocks=((4, 2), (8, 1)))
    kinds = [type(layer).__name__ for layer in model.features]
    layer = ["Conv2d", "GroupNorm", "ReLU"]
    assert kinds == [*layer, *layer, "MaxPool2d", *layer, "AvgPool2d"]
    assert [norm.num_channels for norm in model.features if isinstance(norm, nn.GroupNorm)] == [4, 4, 8]
    assert not any(isinstance(layer, nn.GroupNorm) for layer in VGG(10, blocks=((4, 1),)).features)


def test_vgg_maps_images_to_classes_and_starts_with_a_small_head():
    model = VGG(7, norm=nn.BatchNorm2d, in_channels=1, blocks=((4, 1), (600, 1)))
    assert model(torch.randn(3, 1, 4, 4)).shape == (3, 7)
    assert 0.009 < model.head.weight.std() < 0.011
    assert model.head.bias.eq(0).all()
    # The convolutions keep torch's own initialization: uniform, bounded by the inverse root of the fan-in.
    weight = model.features[0].weight
    assert 0.2 < weight.abs().max() <= 1 / 3
