"""Conversions and folding put the new layers wherever a model holds the old ones."""

from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import iternorm
from iternorm import IterNorm2d, convert_batchnorm, convert_to_batchnorm

Named = namedtuple("Named", ["number", "norm"])


class Holding(nn.Module):
    """Its forward takes the norm from where `held` puts it."""

    def __init__(self, held, found):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.norm(torch.randn(9, 4, 2, 2) * 3 + 1)
        self.__dict__["held"] = held(self.norm)
        self.found = found

    def forward(self, x):
        return self.found(self.held)(self.conv(x)).relu()


HELD = {
    "by itself": (lambda norm: norm, lambda held: held),
    "dict": (lambda norm: {"after": norm}, lambda held: held["after"]),
    "pairs": (lambda norm: [("norm", norm), (1, 2)], lambda held: held[0][1]),
    "lists in a dict": (lambda norm: {"one": [[norm]], "none": []}, lambda held: held["one"][0][0]),
    "OrderedDict": (lambda norm: OrderedDict(one=norm), lambda held: held["one"]),
    "defaultdict": (lambda norm: defaultdict(list, one=[norm]), lambda held: held["one"][0]),
    "named tuple": (lambda norm: Named(1, norm), lambda held: held.norm),
    "set": (lambda norm: {norm}, lambda held: next(iter(held))),
    "objects in a list": (lambda norm: [SimpleNamespace(norm=norm)], lambda held: held[0].norm),
    "object": (lambda norm: SimpleNamespace(norms=[norm]), lambda held: held.norms[0]),
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_a_forward_that_finds_its_layers_in_any_container_uses_the_new_layers(name, fuse):
    torch.manual_seed(0)
    model, x = Holding(*HELD[name]).eval(), torch.randn(5, 3, 4, 4)
    kind, expected = type(model.held), model(x)
    convert_batchnorm(model, fuse=fuse)
    assert model.found(model.held) is model.norm
    assert type(model.norm) is IterNorm2d
    assert name == "by itself" or type(model.held) is kind
    torch.testing.assert_close(model(x), expected)
    for inputs in (None, x):
        folded: Any = iternorm.fold(model, inputs)[0]
        assert type(folded.found(folded.held)) is nn.Identity
        torch.testing.assert_close(folded(x), expected)
    assert model.found(model.held) is model.norm


def test_a_forward_over_a_list_uses_the_new_layers():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
            self.norm(torch.randn(9, 4, 2, 2) * 3 + 1)
            self.steps = [self.conv, self.norm, self.relu, torch.tanh]

        def forward(self, x):
            for step in self.steps:
                x = step(x)
            return x

    torch.manual_seed(0)
    for fuse in (False, True):
        model, x = Listed().eval(), torch.randn(5, 3, 4, 4)
        expected = model(x)
        convert_batchnorm(model, fuse=fuse)
        assert model.steps[1] is model.norm
        assert type(model.norm) is IterNorm2d
        torch.testing.assert_close(model(x), expected)
        folded: Any = iternorm.fold(model)[0]
        assert folded.steps[0] is folded.conv
        assert type(folded.steps[1]) is nn.Identity
        torch.testing.assert_close(folded(x), expected)
        convert_to_batchnorm(model)
        assert type(model.steps[1]) is nn.BatchNorm2d
        torch.testing.assert_close(model(x), expected)


def test_containers_that_hold_no_layer_are_the_same_objects():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    plain: Any = [[1, {"a": (2,)}]]
    plain.append(plain)
    held: Any = SimpleNamespace(plain=plain)
    model.__dict__.update(plain=plain, held=held)
    convert_batchnorm(model)
    assert vars(model)["plain"] is plain is held.plain is plain[1]
