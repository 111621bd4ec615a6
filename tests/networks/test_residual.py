"""The residual networks have the layers of their papers, and the norms where this paper has them."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import iternorm
from iternorm.layers.base import WhiteningNorm
from iternorm.networks import models
from iternorm.networks.residual import ResNet, WideResNet

CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, WhiteningNorm)


def build(*arguments, **options) -> Any:
    """`models.build`; each of its networks has layers of its own."""
    return models.build(*arguments, **options)


def blocks_of(model) -> list[Any]:
    return [*model.blocks]


def names_of(model, kinds=NORMS):
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds)]


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "in_shape", "expected"),
    [
        # Zagoruyko and Komodakis have 36.5 and 55.8 million, torchvision's ResNets these exact numbers.
        ("wrn-28-10", 10, CIFAR, 36_479_194),
        ("wrn-40-10", 10, CIFAR, 55_841_754),
        ("resnet-18", 1000, IMAGENET, 11_689_512),
        ("resnet-50", 1000, IMAGENET, 25_557_032),
        ("resnet-101", 1000, IMAGENET, 44_549_160),
    ],
)
def test_networks_have_the_published_numbers_of_parameters(name, num_classes, in_shape, expected):
    with torch.device("meta"):
        assert num_parameters(build(name, "BN", num_classes, in_shape)) == expected


def test_wide_resnet_has_the_stages_of_its_paper():
    with torch.device("meta"):
        model = WideResNet(28, 10, norm=nn.BatchNorm2d)
    shapes = [(block.conv1.in_channels, block.conv1.out_channels, block.conv1.stride[0]) for block in blocks_of(model)]
    assert shapes == [
        *((16, 160, 1), *[(160, 160, 1)] * 3),
        *((160, 320, 2), *[(320, 320, 1)] * 3),
        *((320, 640, 2), *[(640, 640, 1)] * 3),
    ]
    for layer in (module for module in model.modules() if isinstance(module, nn.Conv2d)):
        assert layer.bias is None
        assert layer.kernel_size == (3, 3) or layer.padding == (0, 0)
    projected = [block.shortcut is not None for block in model.blocks]
    assert projected == [True, False, False, False] * 3
    assert (model.head.in_features, model.head.out_features) == (640, 10)


def test_a_wide_block_of_equal_width_has_an_identity_shortcut_in_the_first_stage_too():
    model = WideResNet(10, 1)
    assert [block.shortcut is not None for block in model.blocks] == [False, True, True]


def test_wide_resnet_normalizes_before_each_convolution_of_a_block_and_at_the_end():
    model = build("wrn-16-1", "BN", 10, CIFAR)
    blocks = [f"blocks.{index}.norm{place}" for index in range(6) for place in (1, 2)]
    assert names_of(model) == [*blocks, "norm"]
    widths = [layer.num_features for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert widths == [16, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64]


@pytest.mark.parametrize("label", ["IterNorm T=5 d=64", "SyncIterNorm T=5 d=64"])
def test_iternorm_stands_after_the_first_convolution_too(label):
    model = build("wrn-16-1", label, 10, CIFAR)
    assert names_of(model) == ["stem_norm", *names_of(build("wrn-16-1", "BN", 10, CIFAR))]
    assert model.stem_norm.num_features == 16


@pytest.mark.parametrize("label", ["plain", "BN", "DBN-16"])
def test_no_other_norm_stands_there(label):
    assert isinstance(build("wrn-10-1", label, 10, CIFAR).stem_norm, nn.Identity)


def test_a_wide_block_is_preactivated_and_shares_the_activation_with_its_projection():
    torch.manual_seed(0)
    model = WideResNet(10, 2, norm=nn.BatchNorm2d, width=0.25).double().eval()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    first, _, _ = blocks_of(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_()
            layer.running_var.uniform_(0.5, 2)

    def activated(norm, x):
        scale = (norm.running_var + norm.eps).rsqrt()[:, None, None]
        return ((x - norm.running_mean[:, None, None]) * scale).clamp(min=0)

    inner = activated(first.norm1, x)
    residual = first.conv2(activated(first.norm2, first.conv1(inner)))
    torch.testing.assert_close(first(x), residual + first.shortcut(inner))
    # No dropout in eval; without a projection the input itself is added.
    same = blocks_of(WideResNet(16, 1, norm=nn.BatchNorm2d, dropout=0.5).double().eval())[1]
    x = torch.randn(3, 16, 8, 8, dtype=torch.float64)
    residual = same.conv2(activated(same.norm2, same.conv1(activated(same.norm1, x))))
    torch.testing.assert_close(same(x), residual + x)


def test_wide_resnet_normalizes_rectifies_and_averages_before_the_head():
    torch.manual_seed(0)
    model = WideResNet(10, 1, norm=nn.BatchNorm2d, stem_norm=nn.BatchNorm2d).eval()
    nn.init.uniform_(model.get_parameter("stem_norm.weight"))
    nn.init.normal_(model.get_parameter("norm.bias"))
    x = torch.randn(2, 3, 32, 32)
    features = model.norm(model.blocks(model.stem_norm(model.conv(x)))).relu()
    assert features.shape[2:] == (8, 8)
    expected = model.head(nn.functional.avg_pool2d(features, 8).flatten(1))
    torch.testing.assert_close(model(x), expected)


def test_dropout_stands_between_the_convolutions_and_drops_single_activations():
    model = build("wrn-10-1", "BN", 10, CIFAR, dropout=0.3)
    assert [type(block.dropout) for block in model.blocks] == [nn.Dropout] * 3
    assert {block.dropout.p for block in model.blocks} == {0.3}
    seen = []
    block = model.blocks[0]
    block.conv1.register_forward_hook(lambda *_: seen.append("conv1"))
    block.norm2.register_forward_hook(lambda *_: seen.append("norm2"))
    block.dropout.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    block.conv2.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    torch.manual_seed(0)
    model(torch.randn(8, 3, 32, 32))
    assert seen[:2] == ["conv1", "norm2"]
    before, after = seen[2]
    assert seen[3] is after
    assert before.min() == 0
    alive = before > 0
    dropped = (after[alive] == 0).double().mean()
    assert 0.28 < dropped < 0.32
    # Whole channels are not dropped together.
    by_channel = ((after == 0) & alive).sum((2, 3)) / alive.sum((2, 3)).clamp(min=1)
    assert by_channel[alive.sum((2, 3)) > 100].max() < 0.6


@pytest.mark.parametrize("depth", [0, 4, 9, 27, 29, 30])
def test_wide_resnet_needs_a_depth_of_six_n_plus_four(depth):
    with pytest.raises(
        ValueError, match=rf"depth={depth} of a Wide ResNet: 6n \+ 4 from 10 is needed, \d+ for instance"
    ):
        WideResNet(depth, 1)


def test_resnet_normalizes_every_convolution_and_its_shortcuts():
    with torch.device("meta"):
        basic, deep = build("resnet-18", "BN", 1000, IMAGENET), build("resnet-50", "BN", 1000, IMAGENET)
    assert len(names_of(basic)) == len(names_of(basic, nn.Conv2d)) == 20
    assert len(names_of(deep)) == len(names_of(deep, nn.Conv2d)) == 53
    assert names_of(basic)[0] == "norm"
    assert [name for name in names_of(basic) if "shortcut" in name] == [f"blocks.{k}.shortcut.1" for k in (2, 4, 6)]
    strides = [block.convolutions[1].stride for block in deep.blocks]
    # In a bottleneck the 3x3 convolution has the stride.
    assert [index for index, stride in enumerate(strides) if stride == (2, 2)] == [3, 7, 13]
    assert {block.convolutions[0].stride for block in deep.blocks} == {(1, 1)}
    assert (basic.conv.kernel_size, basic.conv.stride, basic.conv.padding) == ((7, 7), (2, 2), (3, 3))
    assert (basic.head.in_features, deep.head.in_features) == (512, 2048)


@pytest.mark.parametrize(
    ("label", "whitened"),
    [
        ("BN", []),
        ("DBN-16-L1", ["norm"]),
        ("IterNorm-L1", ["norm"]),
        ("IterNorm-L1+DF", ["norm", "feature_norm"]),
        ("IterNorm-Full", None),
    ],
)
def test_resnet_variants_whiten_where_the_table_says(label, whitened):
    model = build("resnet-18", label, 12, (3, 32, 32), width=1 / 16)
    every = names_of(build("resnet-18", "BN", 12, (3, 32, 32), width=1 / 16))
    found = names_of(model, WhiteningNorm)
    assert found == (every if whitened is None else whitened)
    assert names_of(model) == every + ["feature_norm"] * ("DF" in label)


def test_features_are_normalized_after_pooling_and_before_the_head():
    torch.manual_seed(0)
    model = build("resnet-18", "IterNorm-L1+DF", 12, (3, 32, 32), width=1 / 8).train()
    seen = {}
    model.feature_norm.register_forward_pre_hook(lambda module, inputs: seen.update(before=inputs[0]))
    model.head.register_forward_pre_hook(lambda module, inputs: seen.update(after=inputs[0]))
    model.blocks.register_forward_hook(lambda module, inputs, output: seen.update(pooled=output.mean((2, 3))))
    model(torch.randn(512, 3, 32, 32))
    assert seen["before"].shape == seen["after"].shape == (512, 64)
    torch.testing.assert_close(seen["before"], seen["pooled"])
    correlated, decorrelated = (off_diagonal_correlation(seen[name]) for name in ("before", "after"))
    assert decorrelated < 0.6 * correlated


def off_diagonal_correlation(features):
    correlation = torch.corrcoef(features.detach().T)
    return (correlation - correlation.diag().diag()).norm()


def test_a_basic_block_is_the_one_of_the_paper():
    torch.manual_seed(0)
    model = ResNet(18, 3, nn.BatchNorm2d, width=1 / 8).double().eval()
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    _, same, projected, *_ = blocks_of(model)
    for block in (same, projected):
        (conv1, conv2), (norm1, norm2) = block.convolutions, block.norms
        residual = norm2(conv2(norm1(conv1(x)).clamp(min=0)))
        shortcut = x if block is same else block.shortcut[1](block.shortcut[0](x))
        torch.testing.assert_close(block(x), (residual + shortcut).clamp(min=0))
    assert projected(x).shape == (2, 16, 4, 4)


def test_a_bottleneck_is_the_one_of_the_paper():
    torch.manual_seed(0)
    block = blocks_of(ResNet(50, 3, nn.BatchNorm2d, width=1 / 8).double().eval())[3]
    x = torch.randn(2, 32, 8, 8, dtype=torch.float64)
    hidden = x
    for index in range(3):
        hidden = block.norms[index](block.convolutions[index](hidden))
        hidden = hidden.clamp(min=0) if index < 2 else hidden
    torch.testing.assert_close(block(x), (hidden + block.shortcut[1](block.shortcut[0](x))).clamp(min=0))
    assert [layer.kernel_size[0] for layer in block.convolutions] == [1, 3, 1]
    assert block(x).shape == (2, 64, 4, 4)


@pytest.mark.parametrize("make", [partial(WideResNet, 10, 4), partial(ResNet, 18)])
def test_convolutions_start_as_he_says_and_the_head_as_torch_does(make):
    torch.manual_seed(0)
    model = make(norm=nn.BatchNorm2d, num_classes=10)
    checked = 0
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 5000:
            fan_out = layer.out_channels * math.prod(layer.kernel_size)
            expected = math.sqrt(2 / fan_out)
            # The deviation of n values is off by a share of 1 / sqrt(2 n) of itself; five times that is a lot.
            assert abs(layer.weight.std() / expected - 1) < 5 / math.sqrt(2 * layer.weight.numel())
            assert abs(layer.weight.mean()) < 5 * expected / math.sqrt(layer.weight.numel())
            # Normal, not uniform: a uniform one ends at 1.73 deviations.
            assert layer.weight.abs().max() > 3 * expected
            checked += 1
        elif isinstance(layer, nn.BatchNorm2d):
            assert layer.weight.eq(1).all()
            assert layer.bias.eq(0).all()
    assert checked >= 5
    assert model.head.bias.eq(0).all()
    bound = 1 / math.sqrt(model.head.in_features)
    assert 0.95 * bound < model.head.weight.abs().max() <= bound


@pytest.mark.parametrize("label", ["plain", "BN", "DBN-16", "IterNorm T=5 d=64", "SyncIterNorm T=5 d=64"])
def test_gradients_reach_every_parameter_of_a_wide_resnet(label):
    torch.manual_seed(0)
    model = build("wrn-10-2", label, 10, CIFAR, dropout=0.3, width=0.5)
    check_gradients(model, torch.randn(8, 3, 32, 32), 10)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("label", ["plain", "BN", "DBN-16-L1", "IterNorm-L1", "IterNorm-Full", "IterNorm-L1+DF"])
def test_gradients_reach_every_parameter_of_a_resnet(depth, label):
    torch.manual_seed(0)
    model = build(f"resnet-{depth}", label, 12, (3, 64, 64), width=1 / 16)
    check_gradients(model, torch.randn(8, 3, 64, 64), 12)


def check_gradients(model, images, num_classes):
    images.requires_grad_(True)
    logits = model(images)
    assert logits.shape == (len(images), num_classes)
    nn.functional.cross_entropy(logits, torch.arange(len(images)) % num_classes).backward()
    for name, parameter in [("images", images), *model.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("size", [32, 56, 64, 97])
def test_resnet_takes_images_of_any_size(size):
    model = build("resnet-18", "BN", 12, (3, size, size), width=1 / 16).eval()
    assert model(torch.randn(2, 3, size, size)).shape == (2, 12)


def test_a_network_without_norm_changes_no_input_in_place():
    images = torch.randn(2, 3, 32, 32)
    for name in ("wrn-10-1", "resnet-18"):
        model = build(name, "plain", 10, CIFAR, width=0.25).eval()
        first = model(images)
        torch.testing.assert_close(model(images), first, rtol=0, atol=0)
        assert not names_of(model)


def test_width_shrinks_every_layer():
    model = build("wrn-28-10", "BN", 10, CIFAR, width=0.1)
    assert sorted({layer.num_features for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)}) == [
        2,
        16,
        32,
        64,
    ]
    model = build("resnet-50", "BN", 10, CIFAR, width=1 / 16)
    assert (model.conv.out_channels, model.head.in_features) == (4, 128)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="depth=20 of a ResNet: one of 18, 34, 50, 101, 152"):
        ResNet(20)
    with pytest.raises(ValueError, match="widen_factor=0 of a Wide ResNet"):
        WideResNet(28, 0)


def test_networks_fold_and_keep_channels_last():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for name, label in (("wrn-10-1", "IterNorm T=5 d=64"), ("resnet-18", "IterNorm-L1+DF")):
        model = build(name, label, 12, CIFAR, width=0.25).to(memory_format=torch.channels_last)
        seen = []
        model.blocks.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        model.train()(images)
        assert seen[0].is_contiguous(memory_format=torch.channels_last) or seen[0].shape[2:] == (1, 1)
        model.eval()
        folded, _ = iternorm.fold(model)
        torch.testing.assert_close(folded(images), model(images), rtol=1e-4, atol=1e-4)
