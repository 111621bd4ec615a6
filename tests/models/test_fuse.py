"""`convert_batchnorm(model, fuse=True)`: the same model, in which a norm adds the shortcut and applies the ReLU."""

# A converted model is a Module to a checker, whatever it was.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportUnusedExpression=false

import copy
import pickle
import random

import pytest
import third_party
import torch
from third_party import BatchNormAct2d, logits
from torch import nn
from torch.nn import functional as F

import iternorm
from iternorm import ConversionReport, IterNorm2d, SyncIterNorm, convert_batchnorm, convert_to_batchnorm, fold
from iternorm.layers.base import WhiteningNorm
from iternorm.models.fuse.junctions import Absorbed

ADDS = "adds the shortcut, then ReLU"


def conv(inputs, outputs, size=3, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def vgg():
    layers = []
    for inputs, outputs in ((3, 6), (6, 8)):
        layers += [conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


class BasicBlock(nn.Module):
    """Two convolutions; one ReLU module is used twice; the sum is in place."""

    def __init__(self, inputs=8, outputs=8, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A ReLU module for each norm, the shortcut's norm a child of the block, and a parameter that nobody uses."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.act1 = conv(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.bn2, self.act2 = conv(4, 4), nn.BatchNorm2d(4), nn.ReLU()
        self.conv3, self.bn3, self.act3 = conv(4, 12, 1), nn.BatchNorm2d(12), nn.ReLU()
        self.drop = nn.Identity()
        self.short_conv, self.short_bn = conv(8, 12, 1), nn.BatchNorm2d(12)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        y = self.act1(self.drop(self.bn1(self.conv1(x))))
        y = self.act2(self.bn2(self.conv2(y)))
        return self.act3(self.drop(self.bn3(self.conv3(y))) + self.short_bn(self.short_conv(x)))


class ResNet(nn.Module):
    """The stem has a ReLU of its own."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(), BasicBlock(8, 8, 2), Bottleneck())
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class PreActivation(nn.Module):
    """Nothing follows the sum."""

    def __init__(self):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(8), conv(8, 8)
        self.bn2, self.conv2 = nn.BatchNorm2d(8), conv(8, 8)

    def forward(self, x):
        y = self.conv1(self.bn1(x).relu())
        return x + self.conv2(F.relu(self.bn2(y), inplace=True))


class Wired(nn.Module):
    """Two convolutions with norms and a ReLU, joined as `wire` says."""

    def __init__(self, wire, **modules):
        super().__init__()
        self.wire = wire
        self.conv, self.norm, self.relu = conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.norm2 = conv(8, 8), nn.BatchNorm2d(8)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wire(self, x)


def pair(model, **words):
    """The model converted without and with fusion, and the report of the second."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
    report = ConversionReport()
    words = {"group_size": 4, **words}
    plain = convert_batchnorm(copy.deepcopy(model), **words)
    return plain, convert_batchnorm(model, fuse=True, report=report, **words), report


def assert_same(plain, fused, x):
    """Outputs, gradients and statistics in training and in eval."""
    assert list(fused.state_dict()) == list(plain.state_dict())
    for training in (True, False):
        results = []
        for model in (plain, fused):
            model.train(training).zero_grad()
            inputs = x.clone().requires_grad_()
            output = model(inputs)
            output.sin().sum().backward()
            grads = {name: p.grad for name, p in model.named_parameters()}
            results.append((output.detach(), inputs.grad, grads, dict(model.state_dict())))
        # Only the order of the additions may differ.
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


NETWORKS = {
    "vgg": (vgg, (3, 8, 8), {"1": "ReLU", "5": "ReLU"}),
    "basic block": (BasicBlock, (8, 6, 6), {"bn1": "ReLU", "bn2": ADDS}),
    "basic block with a stride": (lambda: BasicBlock(8, 12, 2), (8, 6, 6), {"bn1": "ReLU", "bn2": ADDS}),
    "bottleneck": (Bottleneck, (8, 6, 6), {"bn1": "ReLU", "bn2": "ReLU", "bn3": ADDS}),
    "resnet": (
        ResNet,
        (3, 8, 8),
        {"bn1": "ReLU"}
        | {f"layer1.{i}.{n}": text for i in (0, 1) for n, text in (("bn1", "ReLU"), ("bn2", ADDS))}
        | {"layer1.2.bn1": "ReLU", "layer1.2.bn2": "ReLU", "layer1.2.bn3": ADDS},
    ),
    "pre-activation": (PreActivation, (8, 6, 6), {"bn1": "ReLU", "bn2": "ReLU"}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_is_the_same_function(name):
    build, shape, expected = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    kinds = {key: type(module) for key, module in model.named_modules()}
    plain, fused, report = pair(model)
    assert fused is model
    assert dict(report.fused) == expected
    assert [key for key, _ in report.fused] == [key for key, _ in report.converted if key in expected]
    assert {key for key, _ in report.fused + report.unfused} == {key for key, _ in report.converted}
    for key, module in fused.named_modules():
        assert isinstance(module, (kinds[key], WhiteningNorm, Absorbed))
        assert type(module).__name__ in (kinds[key].__name__, "IterNorm2d", "Absorbed")
    x = torch.randn(4, *shape, dtype=torch.float64)
    assert_same(plain, fused, x)
    # Copies, too.
    state = copy.deepcopy(plain)
    for duplicate in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_same(copy.deepcopy(state), duplicate, x)


def count(model):
    """ReLUs and additions in the model's own code. What its norms do is not seen."""
    graph = torch.fx.symbolic_trace(model).graph
    relus = sum(type(model.get_submodule(n.target)) is nn.ReLU for n in graph.nodes if n.op == "call_module")
    called = [str(n.target) for n in graph.nodes if n.op in ("call_function", "call_method")]
    return relus + sum("relu" in name for name in called), sum("add" in name for name in called)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_norm_does_is_not_done_again(name):
    build, _, expected = NETWORKS[name]
    plain, fused, _ = pair(build())
    (relus, sums), (relus_left, sums_left) = count(plain), count(fused)
    assert relus - relus_left == sum("ReLU" in text for text in expected.values())
    assert sums - sums_left == sum("adds" in text for text in expected.values())


def test_without_it_nothing_is_fused():
    report = ConversionReport()
    model = convert_batchnorm(ResNet(), report=report)
    assert not report.fused
    assert not report.unfused
    assert "fused" not in str(report)
    assert all(layer.activation is None for layer in model.modules() if isinstance(layer, WhiteningNorm))
    assert type(model.layer1[0]) is BasicBlock


def test_the_report_names_what_was_fused_and_what_was_not():
    _, _, report = pair(BasicBlock(8, 12, 2))
    assert str(report).splitlines()[-3:] == [
        "fused      bn1: ReLU",
        f"fused      bn2: {ADDS}",
        "not fused  downsample.1: its module returns its output",
    ]


SUMS = {
    "+": lambda m, x: (m.norm(m.conv(x)) + x).relu(),
    "the other way round": lambda m, x: F.relu(x + m.norm(m.conv(x))),
    "torch.add": lambda m, x: torch.relu(torch.add(m.norm(m.conv(x)), x)),
    "methods in place": lambda m, x: m.norm(m.conv(x)).add_(x).relu_(),
    "+=": lambda m, x: wire_iadd(m, x),
    "a shortcut that changed in place": lambda m, x: wire_alias(m, x),
    "two norms": lambda m, x: m.relu(m.norm(m.conv(x)) + m.norm2(m.conv2(x))),
    "a shortcut that is activated": lambda m, x: m.relu(m.norm(m.conv(x)) + m.norm2(m.conv2(x)).relu()),
    "a shortcut through functions": lambda m, x: (m.norm(m.conv(x)) + F.relu(m.conv2(x.relu()))).relu(),
    "an empty shortcut": lambda m, x: m.relu(m.norm(m.conv(x)) + m.shortcut(x)),
    "no ReLU": lambda m, x: m.norm(m.conv(x)) + x,
}


def wire_iadd(m, x):
    y = m.norm(m.conv(x))
    y += x
    return m.relu(y)


def wire_alias(m, x):
    y = m.conv2(x)
    shortcut = y
    y += m.conv(x)
    return m.relu(m.norm(y) + shortcut)


@pytest.mark.parametrize("name", SUMS)
def test_every_way_to_write_the_sum(name):
    plain, fused, report = pair(Wired(SUMS[name], shortcut=nn.Sequential()).double())
    rows = dict(report.fused)
    assert rows["norm"] == ("adds the shortcut" if name == "no ReLU" else ADDS)
    if name == "two norms":
        assert dict(report.unfused)["norm2"] == "it is the shortcut that another layer adds"
    if "activated" in name:
        assert rows["norm2"] == "ReLU"
    assert count(fused)[1] == (name == "a shortcut that changed in place")
    assert_same(plain, fused, torch.randn(3, 8, 5, 5, dtype=torch.float64))


def in_training_only(m, x):
    y = m.norm(m.conv(x))
    return m.relu(y + x) if m.training else m.relu(y)


def by_chance(m, x):
    return m.relu(m.norm(m.conv(x)) + x) if random.random() < 2 else x


def by_torchs_chance(m, x):
    return m.relu(m.norm(m.conv(x)) + x) if torch.rand(1) < 2 else x


def by_value(m, x):
    return m.relu(m.norm(m.conv(x)) + x) if x.sum() > 0 else x


def without_gradients(m, x):
    with torch.no_grad():
        y = m.conv(x)
    return m.relu(m.norm(y) + x)


def keeping(m, x):
    m.seen = m.norm(m.conv(x))
    return m.relu(m.seen + x)


def into_the_shortcut(m, x):
    y = m.conv2(x)
    y += m.norm(m.conv(x))
    return m.relu(y)


def changed_between(m, x):
    y = m.conv(x)
    z = m.norm(y)
    y.detach().mul_(2)
    return m.relu(z + x)


LEFT = {
    "in training only": (in_training_only, "Wired does something else in training than in eval"),
    "by chance": (by_chance, "Wired draws random numbers in its forward"),
    "by torch's chance": (by_torchs_chance, "rand is called on nothing that comes from the input"),
    "by value": (by_value, "Wired cannot be traced by torch.fx: symbolically traced variables cannot be used"),
    "without gradients": (without_gradients, "_set_grad_enabled is called on nothing"),
    "a value that is kept": (keeping, "Wired sets attributes of its own in its forward"),
    "an output used twice": (lambda m, x: m.relu(y := m.norm(m.conv(x))) + y, "its output is used more than once"),
    "its own double": (lambda m, x: m.relu((y := m.norm(m.conv(x))) + y), "is not a second value"),
    "into the shortcut": (into_the_shortcut, "it is added to another value in place"),
    "a number": (lambda m, x: m.relu(m.norm(m.conv(x)) + 1), "is not a second value"),
    "a scaled sum": (lambda m, x: m.relu(torch.add(m.norm(m.conv(x)), x, alpha=2)), "neither a ReLU nor an addition"),
    "used twice": (lambda m, x: m.norm(m.norm(m.conv(x)).relu()).relu(), "it is used in more than one place"),
    "another activation": (lambda m, x: F.relu6(m.norm(m.conv(x))), "neither a ReLU nor an addition follows"),
    "returned": (lambda m, x: m.norm(m.conv(x)), "its module returns its output"),
    "an input changed before the sum": (changed_between, "its input is used between it and the addition"),
    "a sum over channels": (lambda m, x: (m.norm(m.conv(x)) + m.one(x)).relu(), "has 1 channels, it has 8"),
    "a sum over positions": (lambda m, x: (m.norm(m.conv(x)) + m.conv2(x.mean((2, 3), True))).relu(), "be pooled"),
    "a pooled norm": (lambda m, x: (m.norm(m.conv(m.pool(x))) + m.conv2(x)).relu(), "may be pooled"),
    "a value of unknown shape": (lambda m, x: (m.norm(m.conv(x)) + x[:, :1]).relu(), "of unknown shape"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_fused_stays_and_says_why(name):
    wire, reason = LEFT[name]
    one, pool = nn.Conv2d(8, 1, 1), nn.AdaptiveAvgPool2d(1)
    state = random.getstate(), torch.get_rng_state()
    plain, fused, report = pair(Wired(wire, one=one, pool=pool).double())
    assert random.getstate() == state[0]
    assert reason in dict(report.unfused)["norm"]
    assert not report.fused
    assert type(fused) is Wired
    assert "seen" not in vars(fused)
    assert fused.norm.activation is None
    if "chance" not in name and name not in ("a value that is kept", "an input changed before the sum"):
        assert_same(plain, fused, torch.randn(3, 8, 5, 5, dtype=torch.float64))


def test_a_forward_with_options_or_types_stays():
    class Options(BasicBlock):
        def forward(self, x, mask=None):
            out = super().forward(x)
            return out if mask is None else out * mask

    class Types(BasicBlock):
        def forward(self, x):
            return super().forward(self.first(x))

        def first(self, x):
            return x if isinstance(x, torch.Tensor) else x[0]

    for kind, words in ((Options, "takes more, or less, than one argument"), (Types, "isinstance in it")):
        plain, fused, report = pair(kind().double())
        assert words in dict(report.unfused)["bn2"]
        x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
        assert_same(plain, fused, x)
    assert torch.equal(fused.eval()([x]), fused(x))
    bound = BasicBlock()
    bound.forward = bound.forward
    _, _, report = pair(bound)
    assert "forward of its own set on the instance" in dict(report.unfused)["bn1"]


def test_a_shared_relu_stays_for_the_others():
    relu = nn.ReLU()
    model = nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8), relu, conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), relu
    )
    plain, fused, report = pair(model.double())
    assert dict(report.fused) == {"4": "ReLU"}
    assert dict(report.unfused) == {"1": "the ReLU after it is used elsewhere, too"}
    assert fused[2] is relu
    assert_same(plain, fused, torch.randn(3, 3, 5, 5, dtype=torch.float64))


def test_a_relu_of_which_all_uses_are_taken_goes_in_place():
    wire = lambda m, x: m.relu(m.norm2(m.conv2(m.relu(m.norm(m.conv(x))))))  # noqa: E731
    plain, fused, report = pair(Wired(wire).double())
    assert [text for _, text in report.fused] == ["ReLU", "ReLU"]
    assert type(fused) is Wired
    assert type(fused.relu) is Absorbed
    assert_same(plain, fused, torch.randn(3, 8, 5, 5, dtype=torch.float64))


def test_a_shared_norm_and_a_parent_that_reaches_in_are_left_alone():
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Sequential(conv(3, 8), norm, nn.ReLU()), nn.Sequential(conv(8, 8), norm, nn.ReLU()))
    _, _, report = pair(model)
    assert report.unfused == [("0.1", "it is used in more than one place")]

    class Taps(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())

        def forward(self, x):
            taps = []
            for layer in self.features:
                x = layer(x)
                taps.append(x)
            return torch.cat(taps)

    plain, fused, report = pair(Taps().double())
    assert report.unfused == [("features.1", "it is used in more than one place")]
    assert_same(plain, fused, torch.randn(3, 3, 5, 5, dtype=torch.float64))


@pytest.mark.parametrize("hooked", ["bn2", "relu", "block"])
def test_hooks_see_what_they_saw(hooked):
    block = BasicBlock().double()
    seen = []
    module = block if hooked == "block" else block.get_submodule(hooked)
    module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    plain, fused, report = pair(block)
    assert (dict(report.fused).get("bn2") == ADDS) == (hooked == "block")
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    plain(x)
    expected = list(seen)
    seen.clear()
    fused(x)
    torch.testing.assert_close(seen, expected)


def test_an_activation_that_the_layer_has_and_other_layers_of_the_model():
    model = nn.Sequential(IterNorm2d(3, activation="relu"), nn.ReLU(), IterNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    report = ConversionReport()
    convert_batchnorm(model, fuse=True, report=report)
    assert report.fused == [("2", "ReLU")]
    assert report.unfused[0] == ("0", "it has activation='relu' already")
    # What is fused is left alone by a second conversion, and there is nothing more to do.
    with pytest.warns(UserWarning, match="no BatchNorm layer was selected"):
        convert_batchnorm(model, fuse=True)


def test_synchronized_layers():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()).double()
    plain, fused, report = pair(model)
    assert isinstance(fused.bn1, SyncIterNorm)
    assert dict(report.fused) == NETWORKS["resnet"][2]
    assert_same(plain, fused, torch.randn(3, 3, 8, 8, dtype=torch.float64))
    # A fused model is synchronized, and is still fused.
    plain, fused, _ = pair(ResNet().double())
    iternorm.convert_sync_iternorm(plain), iternorm.convert_sync_iternorm(fused)
    assert isinstance(fused.layer1[0].bn2, SyncIterNorm)
    assert_same(plain, fused, torch.randn(3, 3, 8, 8, dtype=torch.float64))
    assert type(convert_to_batchnorm(fused).layer1[0]) is BasicBlock


@pytest.mark.parametrize("name", NETWORKS)
def test_the_way_back_is_the_original(name):
    build, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    original = copy.deepcopy(model)
    back = convert_to_batchnorm(convert_batchnorm(model, fuse=True))
    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    assert [repr(m) for m in back.modules()] == [repr(m) for m in original.modules()]
    assert_same(original, back, torch.randn(4, *shape, dtype=torch.float64))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_folds_as_the_unfused_one(name):
    build, shape, _ = NETWORKS[name]
    plain, fused, _ = pair(build().double())
    x = torch.randn(4, *shape, dtype=torch.float64)
    plain(x), fused(x)
    plain.eval(), fused.eval()
    for example in (None, x):
        folded, table = fold(fused, example)
        torch.testing.assert_close(folded(x), fused(x), rtol=1e-10, atol=1e-10)
        expected, expected_table = fold(plain, example)
        assert table == expected_table
        assert [type(m) for m in folded.modules()] == [type(m) for m in expected.modules()]
    assert count(fused) != count(plain)


def test_statistics_are_recalibrated_and_frozen_as_before():
    batches = [torch.randn(6, 3, 8, 8, dtype=torch.float64) for _ in range(3)]
    plain, fused, _ = pair(ResNet().double())
    for model in (plain, fused):
        iternorm.recalibrate(model, batches, progress=False)
        iternorm.freeze(model, where=lambda name, layer: "bn2" in name)
    torch.testing.assert_close(dict(fused.state_dict()), dict(plain.state_dict()), rtol=1e-9, atol=1e-10)
    assert_same(plain, fused, batches[0])


def test_a_batchnorm_with_an_activation_takes_it_in():
    model = nn.Sequential(conv(3, 8), BatchNormAct2d(8), conv(8, 8), BatchNormAct2d(8, nn.Identity), nn.ReLU())
    original = copy.deepcopy(model.double())
    plain, fused, report = pair(model)
    assert dict(report.fused) == {"1": "ReLU", "3": "ReLU"}
    x = torch.randn(3, 3, 5, 5, dtype=torch.float64)
    assert_same(plain, fused, x)
    back = convert_to_batchnorm(fused)
    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    residual = Wired(lambda m, x: F.relu(m.norm(m.conv(x)) + x), norm=BatchNormAct2d(8, nn.Identity)).double()
    plain, fused, report = pair(residual)
    assert dict(report.fused) == {"norm": ADDS}
    assert_same(plain, fused, torch.randn(3, 8, 5, 5, dtype=torch.float64))


@pytest.mark.rare
def test_a_converted_network_compiles_whole():
    torch.manual_seed(0)
    plain, fused, _ = pair(nn.Sequential(conv(3, 8), BasicBlock()))
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True)(x), plain(x), rtol=1e-4, atol=1e-4)
    program = torch.export.export(fused.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x[:3]), plain.eval()(x[:3]), rtol=1e-4, atol=1e-4)


def test_blocks_of_one_structure_share_a_class():
    _, fused, _ = pair(nn.Sequential(BasicBlock(), BasicBlock(), BasicBlock(8, 8, 2)))
    assert type(fused[0]) is type(fused[1]) is type(copy.deepcopy(fused[0])) is not type(fused[2])


def test_a_block_can_be_fused_in_two_steps_and_taken_apart_in_one():
    block = BasicBlock().double()
    plain = convert_batchnorm(copy.deepcopy(block))
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    convert_batchnorm(block, where="first", fuse=True)
    convert_batchnorm(block, fuse=True, report=(report := ConversionReport()))
    assert report.fused == [("bn2", ADDS)]
    assert_same(plain, block, x)
    back = convert_to_batchnorm(pickle.loads(pickle.dumps(block)))
    assert type(back) is BasicBlock


def test_a_forward_that_is_no_function_stays():
    class Callable:
        def __call__(self, x):
            return x

    class Odd(BasicBlock):
        forward = Callable()  # pyright: ignore[reportAssignmentType]

    _, _, report = pair(Odd())
    assert "Odd" in dict(report.unfused)["bn1"]


def test_bad_arguments_leave_the_model_as_it_was():
    model = BasicBlock()
    with pytest.raises(ValueError, match="group_size=0"):
        convert_batchnorm(model, fuse=True, group_size=0)
    model.bn1 = nn.LazyBatchNorm2d()
    with pytest.raises(ValueError, match="the first BatchNorm cannot be converted"):
        convert_batchnorm(model, where="first", fuse=True)
    assert type(model) is BasicBlock
    assert type(model.bn2) is nn.BatchNorm2d


def test_a_shape_that_the_structure_does_not_show_is_refused_by_the_layer():
    """A 1x1 image through a block with an unpadded shortcut: torch would broadcast."""
    wire = lambda m, x: F.relu(m.norm(m.conv(x)) + m.wide(x))  # noqa: E731
    _, fused, report = pair(Wired(wire, wide=nn.Conv2d(8, 8, 1, padding=1)))
    assert dict(report.fused) == {"norm": ADDS}
    before = {key: value.clone() for key, value in fused.state_dict().items()}
    with pytest.raises(ValueError, match=r"residual has shape \(2, 8, 3, 3\)"):
        fused(torch.randn(2, 8, 1, 1))
    torch.testing.assert_close(dict(fused.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["monai resnet18 2-D", "transformers ResNet", "monai DenseNet121"])
def test_third_party_models(name):
    model, x = third_party.build(name)
    with torch.no_grad():
        expected = logits(model, x)
        report = ConversionReport()
        convert_batchnorm(model, fuse=True, report=report)
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-4)
    assert len(report.fused) > len(report.unfused)
    assert ("monai resnet" in name) == (ADDS in dict(report.fused).values())
