"""A layer whose forward is not that of its base class is not taken for one."""

import re
from typing import Any

import pytest
import torch
from changed_layers import Doubled
from foldable import check, settled
from third_party import BatchNormAct2d
from torch import nn

from iternorm import (
    IterNorm2d,
    convert_batchnorm,
    fold,
    fold_into_next_layer,
    fold_into_previous_layer,
    fold_pointwise,
)


def wrapped(layer: Any) -> Any:
    """As tools do that put a function of their own around a layer."""
    inner = layer.forward
    layer.forward = lambda *args: 2 * inner(*args)
    return layer


@pytest.mark.parametrize("make", [lambda: Doubled(4), lambda: wrapped(IterNorm2d(4))])
def test_a_norm_with_a_forward_of_its_own_is_kept(make):
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for before in (nn.Conv2d(4, 4, 1), nn.ReLU()):
        model = settled(nn.Sequential(before, make(), nn.Conv2d(4, 4, 1)))
        for example in (None, x):
            folded, table = fold(model, example)
            torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
            assert table[0].how == "kept"
            assert "has a forward of its own" in table[0].reason


def test_a_layer_with_a_forward_of_its_own_does_not_pass_its_input_on():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for passing in (nn.Identity(), nn.Dropout()):
        check(settled(nn.Sequential(nn.Conv2d(4, 4, 1), wrapped(passing), IterNorm2d(4))), x, ["pointwise"])


def test_by_hand_a_norm_that_does_more_is_refused():
    converted: Any = convert_batchnorm(BatchNormAct2d(4)).eval()
    for norm in (Doubled(4).eval(), converted):
        conv = nn.Conv2d(4, 4, 1)
        for call in (fold_pointwise, lambda norm: fold_into_previous_layer(conv, norm)):  # noqa: B023
            with pytest.raises(TypeError, match=re.escape(f"{type(norm).__name__} does more than whiten")):
                call(norm)
        with pytest.raises(TypeError, match="does more than whiten"):
            fold_into_next_layer(norm, conv)
