"""`convert_batchnorm(model, fuse=True)`: what is recognized around a norm, and what is left and why."""

# A converted model is a Module to a checker, whatever it was.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportUnusedExpression=false

import random
import re

import pytest
import torch
from fusible import ADDS, BasicBlock, Wired, assert_same, conv, count, pair
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from iternorm import ConversionReport, IterNorm2d, convert_batchnorm
from iternorm.models.fuse.junctions import Absorbed

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


def checkpointed(m, x):
    return m.relu(m.norm(checkpoint(m.conv, x, use_reentrant=False)) + x)


LEFT = {
    # torch 2.6 sees an operator of the checkpoint first.
    "checkpointed": (checkpointed, "saves activations in another way|is called on nothing that comes"),
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
    assert re.search(reason, dict(report.unfused)["norm"])
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

    class Decorated(BasicBlock):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    class DecoratedInside(BasicBlock):
        def forward(self, x):
            return self.inside(x)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def inside(self, x):
            return super().forward(x)

    for kind, words in (
        (Options, "takes more, or less, than one argument"),
        (Decorated, "a decorator in it"),
        (DecoratedInside, "a decorator in it"),
        (Types, "isinstance in it"),
    ):
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


def test_a_norm_with_a_forward_of_its_own_is_left():
    class Negated(IterNorm2d):
        def forward(self, input, residual=None):
            return -super().forward(input, residual)

    model = nn.Sequential(conv(3, 8), Negated(8), nn.ReLU(), nn.BatchNorm2d(8)).eval()
    x, report = torch.randn(3, 3, 5, 5), ConversionReport()
    expected = model(x)
    convert_batchnorm(model, fuse=True, report=report)
    assert report.unfused[0] == ("1", "it has a forward of its own")
    torch.testing.assert_close(model(x), expected)


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
