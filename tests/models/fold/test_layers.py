"""A folded model gives the output of the unfolded one: each neighbour, whole networks, bad input."""

import copy

import pytest
import third_party
import torch
from foldable import check, norms_of, settled
from third_party import logits
from torch import nn

import iternorm
from iternorm import (
    DecorrelatedBatchNorm2d,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
    SyncIterNorm,
    convert_batchnorm,
    fold,
    fold_into_next_layer,
    fold_into_previous_layer,
    fold_pointwise,
)

PREVIOUS = {
    "Linear": (nn.Linear(5, 10), (5,)),
    "Conv1d": (nn.Conv1d(4, 10, 3, padding=1), (4, 7)),
    "Conv2d": (nn.Conv2d(4, 10, 3, stride=2, padding=1, bias=False), (4, 7, 6)),
    "Conv2d, 2 groups": (nn.Conv2d(4, 10, 3, padding=1, groups=2), (4, 7, 6)),
    "Conv2d, reflect": (nn.Conv2d(4, 10, 3, padding=1, padding_mode="reflect", dilation=1), (4, 7, 6)),
    "Conv2d, depthwise": (nn.Conv2d(10, 10, 3, padding="same", groups=10), (10, 7, 6)),
    "Conv3d": (nn.Conv3d(4, 10, (1, 3, 2)), (4, 4, 5, 6)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 10, 3, stride=2, padding=1, output_padding=1), (4, 5)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 10, 3, stride=2, bias=False), (4, 5, 3)),
    "ConvTranspose2d, 2 groups": (nn.ConvTranspose2d(4, 10, 2, groups=2), (4, 5, 3)),
    "ConvTranspose3d": (nn.ConvTranspose3d(4, 10, 2), (4, 3, 2, 4)),
}
NORMS = {2: IterNorm1d, 3: IterNorm1d, 4: IterNorm2d, 5: IterNorm3d}


# 5 fits into two groups of a convolution, 4 is ragged (4, 4, 2) and mixes them, None mixes all.
@pytest.mark.parametrize("group_size", [1, 4, 5, None])
@pytest.mark.parametrize("name", PREVIOUS)
def test_into_the_layer_before(name, group_size):
    torch.manual_seed(0)
    layer, shape = PREVIOUS[name]
    layer = copy.deepcopy(layer).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    model = settled(nn.Sequential(layer, NORMS[x.ndim](10, group_size=group_size)))
    torch.testing.assert_close(fold_into_previous_layer(*model)(x), model(x), rtol=1e-10, atol=1e-10)
    folded, _ = check(model, x, ["previous"], max_growth=float("inf"))
    assert [type(m) for m in folded] == [type(layer), nn.Identity]
    if group_size in (1, 5):
        assert getattr(folded[0], "groups", 1) == (10 if "depthwise" in name and group_size == 1 else 2) or (
            "groups" not in name and "depthwise" not in name
        )


NEXT = {
    "Linear": (nn.Linear(10, 4), (10,)),
    "Conv1d": (nn.Conv1d(10, 4, 3, bias=False), (10, 7)),
    "Conv2d": (nn.Conv2d(10, 4, 3, stride=2, dilation=2), (10, 9, 8)),
    "Conv2d, 2 groups": (nn.Conv2d(10, 4, 3, groups=2), (10, 7, 6)),
    "Conv2d, reflect": (nn.Conv2d(10, 4, 3, padding=1, padding_mode="reflect"), (10, 7, 6)),
    "Conv2d, valid": (nn.Conv2d(10, 4, 3, padding="valid"), (10, 7, 6)),
    "Conv2d, same 1x1": (nn.Conv2d(10, 4, 1, padding="same"), (10, 7, 6)),
    "Conv3d": (nn.Conv3d(10, 4, 2), (10, 4, 5, 6)),
}


@pytest.mark.parametrize("group_size", [1, 4, 5, None])
@pytest.mark.parametrize("name", NEXT)
def test_into_the_layer_after(name, group_size):
    torch.manual_seed(0)
    layer, shape = NEXT[name]
    x = torch.randn(3, *shape, dtype=torch.float64)
    model = settled(nn.Sequential(nn.ReLU(), NORMS[x.ndim](10, group_size=group_size), copy.deepcopy(layer)))
    torch.testing.assert_close(fold_into_next_layer(model[1], model[2])(x.relu()), model(x), rtol=1e-10, atol=1e-10)
    folded, _ = check(model, x, ["next"], max_growth=float("inf"))
    assert [type(m) for m in folded] == [nn.ReLU, nn.Identity, type(layer)]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(10, 4, 3, padding=1),
        nn.Conv2d(10, 4, 3, padding="same"),
        nn.ConvTranspose2d(10, 4, 2),
        nn.Linear(6, 4),
    ],
    ids=["padded", "same", "transposed", "linear over the width"],
)
def test_where_neither_neighbour_is_exact_it_is_one_convolution(layer):
    model = settled(nn.Sequential(nn.ReLU(), IterNorm2d(10, group_size=5), layer))
    x = torch.randn(3, 10, 6, 6, dtype=torch.float64)
    folded, table = check(model, x, ["pointwise"])
    assert type(folded[1]) is nn.Conv2d
    assert (folded[1].kernel_size, folded[1].groups) == ((1, 1), 2)
    assert "next: " in table[0].reason
    if not isinstance(layer, nn.Linear):
        with pytest.raises(ValueError, match="pads with zeros after the norm"):
            fold_into_next_layer(model[1], layer)


@pytest.mark.parametrize("group_size", [1, 4, 5, None])
@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 3, 2), (10, 3, 2, 2)])
def test_pointwise(shape, group_size):
    x = torch.randn(3, *shape, dtype=torch.float64)
    for norm in (NORMS[x.ndim](10, group_size=group_size), SyncIterNorm(10, group_size=group_size)):
        settled(norm)
        for dimensions in (None, x.ndim):
            layer = fold_pointwise(norm, dimensions)
            torch.testing.assert_close(layer(x), norm(x), rtol=1e-10, atol=1e-10)
    assert isinstance(layer, nn.Linear if x.ndim == 2 else nn.modules.conv._ConvNd)
    folded, table = fold(norm)
    torch.testing.assert_close(folded(x), norm(x), rtol=1e-10, atol=1e-10)
    assert table[0][:3] == ("", "pointwise", "")


def test_other_layers_and_running_covariance_fold():
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    for norm in (
        SyncIterNorm(6, group_size=4),
        IterNorm2d(6, group_size=4, running="covariance", affine=False),
        DecorrelatedBatchNorm2d(6, group_size=4, solver="cholesky"),
        DecorrelatedBatchNorm2d(6, group_size=4, solver="pca", running="covariance"),
    ):
        check(settled(nn.Sequential(nn.Conv2d(4, 6, 3), norm)), x, ["previous"])


def vgg(norm):
    layers, channels = [], 3
    for width in (16, "pool", 24, 24, "pool", 40):
        if width == "pool":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(40 * 4, 5))


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs, outputs, norm, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def resnet(norm):
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    blocks = [Block(16, 16, norm), Block(16, 24, norm, 2), Block(24, 40, norm, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5))


@pytest.mark.parametrize("network", [vgg, resnet])
def test_vgg_and_resnet_hold_the_layers_of_the_network_without_norms(network):
    torch.manual_seed(0)
    model = settled(network(lambda width: IterNorm2d(width, group_size=16)))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    folded, table = check(model, x, ["previous"] * len(norms_of(model)))
    bare = network(lambda width: nn.Identity())
    assert [type(m) for m in folded.modules()] == [type(m) for m in bare.modules()]
    assert sum(p.numel() for p in folded.parameters()) == sum(p.numel() for p in bare.parameters()) + sum(
        folded.get_submodule(row.into).bias.numel() for row in table
    )


@pytest.mark.parametrize("name", third_party.MODELS)
def test_third_party_model_folds_after_a_training_step(name):
    model, x = third_party.converted_and_trained(name)
    example = x if name in third_party.NOT_TRACEABLE else None
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model, x = model.to(dtype), x.to(dtype)
        folded, table = fold(model, None if example is None else x)
        assert len(table) == len(norms_of(model))
        assert not norms_of(folded)
        with torch.no_grad():
            torch.testing.assert_close(logits(folded, x), logits(model, x), rtol=tolerance, atol=tolerance)
    assert {row.how for row in table} <= {"previous", "next", "pointwise"}
    if "esnet18" in name or name == "transformers ResNet":
        assert {row.how for row in table} == {"previous"}
    # Folded into depthwise convolutions, and everywhere before a ReLU, DenseNet's way: one convolution each.
    if example is None:
        by_run = fold(model, x)[1]
        assert [row[:3] for row in by_run] == [row[:3] for row in table]


@pytest.mark.parametrize("name", third_party.NOT_TRACEABLE)
def test_a_model_that_cannot_be_traced_is_an_error_that_names_the_layer(name):
    model, _ = third_party.build(name)
    convert_batchnorm(model)
    layer = "conv_stem.first_conv" if "Mobile" in name else "embedder"
    with pytest.raises(
        ValueError, match=rf"torch.fx cannot trace \w+ at '[\w.]*{layer}' \(\w+\): .*Give example_inputs"
    ):
        fold(model)


def test_wide_groups_are_made_only_where_they_pay():
    x = torch.randn(2, 16, 6, 6, dtype=torch.float64)
    depthwise = settled(nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), IterNorm2d(16, group_size=8)))
    _, table = check(depthwise, x, ["pointwise"])
    assert "its 16 groups would become 2" in table[0].reason
    check(depthwise, x, ["previous"], max_growth=float("inf"))
    grouped = settled(nn.Sequential(nn.Conv2d(16, 16, 3, groups=2), IterNorm2d(16)))
    folded, _ = check(grouped, x, ["previous"])
    assert folded[0].groups == 1
    with pytest.raises(ValueError, match=r"max_growth=0.5 must be at least 1"):
        fold(grouped, max_growth=0.5)


def test_norms_on_both_sides_of_a_convolution():
    model = settled(
        nn.Sequential(nn.ReLU(), IterNorm2d(8, group_size=3), nn.Conv2d(8, 6, 3), nn.Dropout(0.5), IterNorm2d(6))
    )
    check(model, torch.randn(2, 8, 6, 6, dtype=torch.float64), ["next", "previous"])


def test_decorrelated_features_fold_into_their_linear_layer():
    model = settled(iternorm.decorrelate_features(nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), group_size=4))
    for shape in ((5, 6), (5, 2, 6)):
        folded, table = check(model, torch.randn(shape, dtype=torch.float64), ["next"])
        assert type(folded[1]) is nn.Linear
        assert not list(folded[1].children())
    assert table[0][:3] == ("1.norm", "next", "1")
    seen = []
    model[1].norm.register_forward_hook(lambda module, args, output: seen.append(output))
    folded, _ = fold(model)
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*seen, rtol=1e-10, atol=1e-10)
    # As a BatchNorm it stays where it is.
    back = iternorm.convert_to_batchnorm(model)
    folded, table = fold(back)
    assert not table
    torch.testing.assert_close(folded(x), back(x))


def test_the_table_is_in_the_order_of_the_model():
    by_sample = iternorm.GroupWhitening2d(4, num_groups=2)
    model = nn.Sequential(by_sample, nn.Conv2d(4, 6, 1), IterNorm2d(6), nn.Flatten(), nn.Linear(6, 3))
    _, table = fold(iternorm.decorrelate_features(model).eval())
    assert [row[:2] for row in table] == [("0", "kept"), ("2", "previous"), ("4.norm", "next")]


def test_training_mode_and_missing_statistics_are_errors():
    norm = IterNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
    with pytest.raises(ValueError, match="the model is in training mode"):
        fold(model)
    model.eval()
    norm.train()
    with pytest.raises(ValueError, match="1 is in training mode"):
        fold(model)
    with pytest.raises(ValueError, match="is in training mode"):
        fold_pointwise(norm)
    with pytest.raises(ValueError, match="is in training mode"):
        fold_into_previous_layer(model[0], norm)
    with pytest.raises(ValueError, match="is in training mode"):
        fold_into_next_layer(norm, nn.Conv2d(4, 3, 1))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), IterNorm2d(4, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match=r"1 keeps no running statistics .*; it cannot be folded"):
        fold(model)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), IterNorm2d(4)).to("meta").eval()
    with pytest.raises(ValueError, match="1 is on the meta device and has no values to fold"):
        fold(model)
    with pytest.raises(TypeError, match="ReLU is not a convolution or linear layer"):
        fold_into_previous_layer(nn.ReLU(), IterNorm2d(4).eval())
    with pytest.raises(ValueError, match=r"matrix has shape \[3, 3\]"):
        iternorm.fold_into_previous(torch.eye(4), None, torch.eye(3), torch.zeros(3))


def test_an_activation_does_not_go_into_weights():
    norm, conv = IterNorm2d(4, activation="relu").eval(), nn.Conv2d(4, 4, 1)
    for call in (
        lambda: fold_pointwise(norm),
        lambda: fold_into_previous_layer(conv, norm),
        lambda: fold_into_next_layer(norm, conv),
    ):
        with pytest.raises(ValueError, match="has activation='relu' in it, which weights cannot take in"):
            call()


@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_neighbour_stays_frozen(trained):
    norm = IterNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm).eval()
    model[0].requires_grad_(trained)
    folded, _ = fold(model)
    assert [parameter.requires_grad for parameter in folded.parameters()] == [trained] * 2
    assert not any(layer.training for layer in folded.modules())
    assert not fold_pointwise(norm).training


def test_a_model_without_whitening_is_copied():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    folded, table = fold(model)
    assert folded is not model
    assert table == []
