"""The networks of the experiments have the layers that the paper's tables list, and `build` makes them by name."""

import pytest
import torch
from torch import nn

import iternorm
from iternorm.networks.models import MLP, NAMES, VGG, VGG_BLOCKS, build
from iternorm.networks.norms import make_norm
from iternorm.networks.residual import ResNet, WideResNet


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


@pytest.mark.parametrize("label", ["IterNorm T=5", "IterNorm T=5 d=8", "DBN-16", "SyncIterNorm T=5 d=8"])
def test_a_vgg_whose_whitening_layers_rectify_is_the_same_network(label):
    whole = build("vgg", label, 10, (3, 32, 32), width=1 / 32).double()
    assert not any(isinstance(layer, nn.ReLU) for layer in whole.modules())
    apart = VGG(10, make_norm(label), blocks=[(width // 32, depth) for width, depth in VGG_BLOCKS]).double()
    assert sum(isinstance(layer, nn.ReLU) for layer in apart.features) == 16
    assert_the_same_network(whole, apart)


@pytest.mark.parametrize("label", ["IterNorm T=5 d=8", "DBN-16"])
def test_a_wide_resnet_whose_whitening_layers_rectify_is_the_same_network(label):
    whole = build("wrn-10-2", label, 10, (3, 32, 32), width=1 / 4).double()
    found = {name: norm.activation for name, norm in whole.named_modules() if hasattr(norm, "activation")}
    assert {name for name, activation in found.items() if activation is None} <= {"stem_norm"}
    stem = make_norm(label) if "stem_norm" in found else None
    apart = WideResNet(10, 2, 10, make_norm(label), stem_norm=stem, width=1 / 4).double()
    assert_the_same_network(whole, apart)


def assert_the_same_network(whole, apart):
    """Outputs, gradients and running statistics are the same to the last bit."""
    # Names and shapes are the same, so that checkpoints of one are those of the other.
    apart.load_state_dict(whole.state_dict())
    images = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    for training in (True, False):
        outputs = []
        for model in (whole, apart):
            model.train(training).zero_grad()
            model(images).square().sum().backward()
            outputs.append([model(images), *(parameter.grad for parameter in model.parameters())])
        # The same operations in the same order.
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
    for one, other in zip(whole.buffers(), apart.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_batch_norm_leaves_the_relu_to_the_network():
    model = build("vgg", "BN", 10, (3, 32, 32), width=1 / 32)
    assert sum(isinstance(layer, nn.ReLU) for layer in model.modules()) == 16


def test_vgg_maps_images_to_classes_and_starts_with_a_small_head():
    model = VGG(7, norm=nn.BatchNorm2d, in_channels=1, blocks=((4, 1), (600, 1)))
    assert model(torch.randn(3, 1, 4, 4)).shape == (3, 7)
    assert 0.009 < model.head.weight.std() < 0.011
    assert model.head.bias.eq(0).all()
    # The convolutions keep torch's own initialization: uniform, bounded by the inverse root of the fan-in.
    weight = model.get_parameter("features.0.weight")
    assert 0.2 < weight.abs().max() <= 1 / 3


def test_build_makes_the_papers_mlp():
    model = build("mlp", "IterNorm T=5", 10, (1, 28, 28), eps=1e-3)
    assert type(model) is MLP
    assert [(layer.in_features, layer.out_features) for layer in (*model.linears, model.head)] == [
        *((784, 100), (100, 100), (100, 100), (100, 10)),
    ]
    assert [type(norm) for norm in model.norms] == [iternorm.IterNorm1d] * 3
    assert [(norm.group_size, norm.num_iters, norm.eps) for norm in model.norms] == [(None, 5, 1e-3)] * 3
    assert build("mlp", "plain", 10, (1, 28, 28), width=0.2).get_parameter("head.weight").shape == (10, 20)


def test_build_makes_the_papers_vgg():
    model = build("vgg", "DBN-16", 10, (3, 32, 32), eps=1e-3)
    assert type(model) is VGG
    norms = [layer for layer in model.features if isinstance(layer, iternorm.DecorrelatedBatchNorm2d)]
    assert [norm.num_features for norm in norms] == [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    assert {(norm.group_size, norm.eps) for norm in norms} == {(16, 1e-3)}
    small = build("vgg", "BN", 7, (1, 32, 32), width=1 / 16)
    assert small(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert small.get_parameter("head.weight").shape == (7, 32)


def test_build_passes_names_and_arguments_on():
    model = build("wrn-16-2", "BN", 7, (1, 32, 32), eps=1e-3, dropout=0.3)
    assert type(model) is WideResNet
    assert (model.conv.in_channels, model.head.out_features, len(model.blocks)) == (1, 7, 6)
    assert (model.norm.eps, model.norm.num_features) == (1e-3, 128)
    assert model.get_submodule("blocks.0.dropout").p == 0.3
    model = build("resnet-50", "IterNorm-L1", 7, (1, 64, 64), eps=1e-3, width=0.25)
    assert type(model) is ResNet
    assert (model.conv.in_channels, model.head.out_features, len(model.blocks), model.norm.eps) == (1, 7, 16, 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds(name):
    assert isinstance(build(name, "BN", 10, (3, 32, 32), width=1 / 50), nn.Module)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("wm-28-10", "'wrn-28-10' or"),
        ("WRN-28-10", "'wrn-28-10' or"),
        ("resnet18", "'resnet-18' or"),
        ("vgg16", "'vgg'"),
        ("mpl", "'mlp'"),
    ],
)
def test_an_unknown_network_is_an_error_with_the_nearest_names(name, near):
    with pytest.raises(
        ValueError, match=f"no network is called '{name}': did you mean {near}.*names are like mlp, vgg"
    ):
        build(name, "BN", 10, (3, 32, 32))


@pytest.mark.parametrize("name", ["mlp", "vgg", "wrn-10-1", "resnet-18"])
def test_an_unknown_norm_is_an_error_in_every_network(name):
    with pytest.raises(ValueError, match="no norm is called 'GN'"):
        build(name, "GN", 10, (3, 32, 32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vgg", "in_shape": (3, 28, 28)}, r"in_shape=\(3, 28, 28\): vgg takes images of 32x32"),
        ({"name": "vgg", "dropout": 0.3}, "dropout=0.3: vgg has no dropout"),
        ({"name": "resnet-18", "dropout": 0.3}, "dropout=0.3: resnet-18 has no dropout"),
        ({"name": "wrn-27-10"}, "depth=27 .* 28 for instance"),
        ({"name": "resnet-20"}, "depth=20 of a ResNet"),
        ({"name": "mlp", "width": 0}, "width=0"),
        ({"name": "mlp", "num_classes": 0}, "num_classes=0"),
        ({"name": "vgg", "norm": "IterNorm-L1"}, "L1 is a place in a ResNet"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(arguments, message):
    given = {"name": "mlp", "norm": "BN", "num_classes": 10, "in_shape": (3, 32, 32), **arguments}
    with pytest.raises(ValueError, match=message):
        build(**given)
