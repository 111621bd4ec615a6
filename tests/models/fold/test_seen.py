"""A norm is not folded past a place where a hook, an attribute or the model's output keeps what is there."""

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foldable import Wired, check, settled
from torch import nn

from iternorm import IterNorm2d, fold


def seen_by(hook: Any, module: nn.Module, *, register: Any = nn.Module.register_forward_hook) -> nn.Module:
    register(module, hook)
    return module


CHAINS = {
    "identity": lambda hook: [nn.Conv2d(4, 4, 1), seen_by(hook, nn.Identity()), IterNorm2d(4)],
    "dropout": lambda hook: [nn.ReLU(), IterNorm2d(4), seen_by(hook, nn.Dropout()), nn.Conv2d(4, 4, 1)],
    "end": lambda hook: [seen_by(hook, nn.Sequential(nn.ReLU(), IterNorm2d(4))), nn.Conv2d(4, 4, 1)],
    "beginning": lambda hook: [
        nn.Conv2d(4, 4, 1),
        seen_by(lambda m, args: hook(m, (), *args), nn.Sequential(IterNorm2d(4)), register=pre),
    ],
}
pre = nn.Module.register_forward_pre_hook


@pytest.mark.parametrize("where", CHAINS)
@pytest.mark.parametrize("changes", [True, False])
def test_a_hook_of_a_module_around_or_between_the_layers(where, changes):
    torch.manual_seed(0)
    seen = []

    def hook(module, args, output):
        seen.append(output)
        return output * 2 if changes else None

    model, x = settled(nn.Sequential(*CHAINS[where](hook))), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    folded, _ = check(model, x, ["pointwise"])
    seen.clear()
    model(x)
    folded(x)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)


def test_a_hook_around_both_layers_is_no_matter():
    seen = []
    inner = seen_by(lambda m, args, output: seen.append(output), nn.Sequential(nn.Conv2d(4, 4, 1), IterNorm2d(4)))
    check(settled(nn.Sequential(nn.ReLU(), inner)), torch.randn(2, 4, 5, 5, dtype=torch.float64), ["previous"])


@dataclass
class Outputs:
    features: Any
    rest: Any


@dataclass(slots=True)
class Slotted:
    features: Any
    rest: Any


def test_an_output_of_any_class_holds_what_it_held():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for kind in (Outputs, Slotted, SimpleNamespace):
        for wire in (
            lambda m, x, kind=kind: kind(features=(y := m.conv(x)), rest=[m.norm(y)]),
            lambda m, x, kind=kind: [kind(features=kind(features=(y := m.norm(x)), rest=1), rest=m.last(y))],
        ):
            model = settled(Wired(wire))
            folded, table = fold(model, x)
            assert table[0].how == "pointwise"
            for got, expected in zip(*(_tensors(each(x)) for each in (folded, model)), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list) else [getattr(value, name, None) for name in ("features", "rest")]
    return [each for part in parts if part is not None for each in _tensors(part)]


def test_what_a_forward_keeps_in_an_attribute():
    def keeping(m, x):
        m.kept = {"features": [m.conv(x)]}
        return m.norm(m.kept["features"][0])

    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        model: Any = settled(Wired(keeping))
        folded, _ = check(model, x, ["pointwise"])
        torch.testing.assert_close(folded.kept, model.kept)
        # What a trace leaves behind is not in the folded model.
        folded, _ = fold(settled(Wired(keeping_last)))
    assert not hasattr(folded, "kept")
    assert pickle.loads(pickle.dumps(folded))(x).shape == x.shape


def keeping_last(m, x):
    m.kept = m.last(x)
    return m.norm(m.kept)
