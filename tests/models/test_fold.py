"""A folded model gives the output of the unfolded one, and holds no layer it could do without."""

import copy
import pickle
from typing import Any

import pytest
import third_party
import torch
from third_party import BatchNormAct2d, logits
from torch import nn
from torch.nn.utils import parametrizations

import iternorm
from iternorm import (
    DecorrelatedBatchNorm2d,
    FoldTable,
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
from iternorm.layers.base import WhiteningNorm


def settled(model) -> Any:
    """Statistics as after some training (full matrices, symmetric), random scales and shifts, fp64, eval."""
    generator = torch.Generator().manual_seed(1)
    model = model.double().eval()
    with torch.no_grad():
        for layer in model.modules():
            if not isinstance(layer, WhiteningNorm):
                continue
            layer.running_mean.normal_(generator=generator)
            noise = torch.empty_like(layer.get_buffer(f"running_{layer.running}")).normal_(generator=generator)
            covariance = noise @ noise.mT / noise.shape[-1] + torch.eye(noise.shape[-1])
            mask = layer.running_matrix.diagonal(dim1=-2, dim2=-1) != 0
            layer.running_matrix.copy_(covariance * mask[:, :, None] * mask[:, None, :])
            if layer.affine:
                layer.weight.uniform_(0.5, 1.5, generator=generator)
                layer.bias.normal_(generator=generator)
    return model


def norms_of(model):
    return [m for m in model.modules() if isinstance(m, WhiteningNorm)]


def check(model, x, hows, **words) -> tuple[Any, FoldTable]:
    """Fold by tracing and by running; both must give the same table and the model's output."""
    expected = model(x)
    tables = []
    for example in (None, x):
        folded, table = fold(model, example, **words)
        assert not norms_of(folded)
        torch.testing.assert_close(folded(x), expected, rtol=1e-10, atol=1e-10)
        assert [row.how for row in table] == hows
        tables.append(table)
    assert [row[:3] for row in tables[0]] == [row[:3] for row in tables[1]]
    assert norms_of(model)
    return folded, table


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


class Wired(nn.Module):
    """A convolution, a norm and a convolution, joined as `wire` says."""

    def __init__(self, wire, **modules):
        super().__init__()
        self.wire = wire
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = IterNorm2d(4)
        self.last = nn.Conv2d(4, 4, 1)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wire(self, x)


UNSAFE = {
    "output used twice": lambda m, x: m.norm(y := m.conv(x)) + y,
    "output returned": lambda m, x: torch.cat([m.norm(y := m.conv(x)), y]),
    "relu between": lambda m, x: m.norm(m.conv(x).relu()).relu(),
    "addition between": lambda m, x: m.norm(m.conv(x) + x).relu(),
    "in place between": lambda m, x: m.norm(m.conv(x).mul_(2)).relu(),
    "convolution used twice": lambda m, x: m.norm(m.conv(m.conv(x))).relu(),
    "norm used twice": lambda m, x: m.norm(m.norm(m.conv(x)).relu()).relu(),
    "weight read elsewhere": lambda m, x: m.norm(m.conv(x)).relu() * m.conv.weight.sum(),
    "norm's output used twice": lambda m, x: m.last(y := m.norm(x)) + y,
    "next used twice": lambda m, x: m.last(m.last(m.norm(x))),
    "norm's output changed in place": lambda m, x: m.last(m.norm(x).relu_()),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_neighbour_that_is_not_the_norms_alone_is_left_as_it_is(name):
    torch.manual_seed(0)
    model = settled(Wired(UNSAFE[name]))
    folded, table = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])
    assert torch.equal(folded.conv.weight, model.conv.weight)
    assert torch.equal(folded.last.weight, model.last.weight)
    assert table[0].into == ""


def test_a_model_output_with_the_convolutions_own_output():
    model = settled(Wired(lambda m, x: (m.norm(y := m.conv(x)), y)))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for example in (None, x):
        folded, _ = fold(model, example)
        for got, expected in zip(folded(x), model(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_hooks_see_what_they_saw():
    chain = lambda m, x: m.norm(m.conv(x)).relu()  # noqa: E731
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for name in ("conv", "norm"):
        model = settled(Wired(chain))
        seen = []
        getattr(model, name).register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        check(model, x, ["pointwise"])
        folded, _ = fold(model)
        seen.clear()
        model(x)
        folded(x)
        torch.testing.assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)


def test_parametrized_and_overridden_neighbours_are_left():
    class Doubled(nn.Conv2d):
        def forward(self, input):
            return 2 * super().forward(input)

    chain = lambda m, x: m.norm(m.conv(x)).relu()  # noqa: E731
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for conv in (parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), Doubled(4, 4, 3)):
        check(settled(Wired(chain, conv=conv)), x, ["pointwise"])


def test_a_layer_that_is_also_used_where_tracing_does_not_look():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = IterNorm1d(4)
            # torch.fx takes layers of torch.nn as one, with what is inside.
            self.encoder = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
            self.encoder.linear1 = self.linear

        def forward(self, x):
            return self.encoder(self.norm(self.linear(x)).unsqueeze(1))

    check(settled(Model()), torch.randn(3, 4, dtype=torch.float64), ["pointwise"])


def test_tied_weights_stay_tied():
    model: Any = Wired(lambda m, x: m.other(m.norm(m.conv(x)).relu()), other=nn.Conv2d(4, 4, 3))
    model.other.weight = model.conv.weight
    settled(model)
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])
    assert folded.other.weight is folded.conv.weight


def test_a_linear_layer_whose_features_are_not_channels():
    model = settled(nn.Sequential(nn.Linear(5, 6), IterNorm1d(6)))
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    folded, table = fold(model, x)
    assert table[0].how == "pointwise"
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_norm_with_an_activation_folds_and_keeps_it():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), BatchNormAct2d(6, drop=0.1), nn.Conv2d(6, 3, 1))
    model = settled(convert_batchnorm(model, group_size=4))
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["previous"])
    assert [type(m) for m in folded[1]] == [nn.Identity, nn.Dropout2d, nn.ReLU]


RESIDUALS = {
    "previous": lambda m, x: m.norm(m.conv(x), residual=x),
    "its own input": lambda m, x: m.norm(y := m.conv(x), residual=y),
    "by position": lambda m, x: m.norm(m.conv(x), x),
    "before a convolution": lambda m, x: m.last(m.norm(x, residual=m.conv(x))),
    "of another norm": lambda m, x: m.norm(m.conv(x), residual=m.norm2(m.last(x))),
}


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_what_a_norm_adds_to_its_output_is_still_added(name, activation):
    torch.manual_seed(0)
    words = {"norm": IterNorm2d(4, activation=activation)}
    if "another" in name:
        words["norm2"] = IterNorm2d(4)
    hows = {"its own input": ["pointwise"], "before a convolution": ["pointwise"], "of another norm": ["previous"] * 2}
    model = settled(Wired(RESIDUALS[name], **words))
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), hows.get(name, ["previous"]))
    pickle.loads(pickle.dumps(folded.norm))


def test_decorrelated_features_fold_into_their_linear_layer():
    model = settled(iternorm.decorrelate_features(nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), group_size=4))
    for shape in ((5, 6), (5, 2, 6)):
        folded, table = check(model, torch.randn(shape, dtype=torch.float64), ["next"])
        assert type(folded[1]) is nn.Linear
        assert not list(folded[1].children())
    assert table[0][:3] == ("1.norm", "next", "1")


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
    model = nn.Sequential(nn.Conv2d(3, 4, 1), IterNorm2d(4, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match="1 keeps no running statistics"):
        fold(model)
    with pytest.raises(TypeError, match="ReLU is not a convolution or linear layer"):
        fold_into_previous_layer(nn.ReLU(), IterNorm2d(4).eval())
    with pytest.raises(ValueError, match=r"matrix has shape \[3, 3\]"):
        iternorm.fold_into_previous(torch.eye(4), None, torch.eye(3), torch.zeros(3))


def test_a_model_without_whitening_is_copied():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    folded, table = fold(model)
    assert folded is not model
    assert table == []
