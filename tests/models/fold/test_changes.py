"""A layer is not folded into the next one if its own input is changed in place before that one is called."""

import pytest
import torch
from foldable import Wired, check, settled
from torch import nn


def between(change):
    """Does something with the norm's input before the next convolution has the norm's output."""

    def wire(m, x):
        taken = x * 1
        normalized = m.norm(taken)
        other = change(m, taken)
        return m.last(normalized) + other

    return wire


def added(m, x):
    x += 1
    return x


CHANGES = {
    "addition": added,
    "method": lambda m, x: x.relu_(),
    "layer": lambda m, x: m.relu(x),
    "layer that gives it back": lambda m, x: added(m, m.drop(x)),
    "layer that gives a view": lambda m, x: added(m, m.drop(m.flat(x))).mean(),
    "view": lambda m, x: x.view(-1).mul_(2).view(x.shape),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_whose_input_changes_before_the_next_layer_stays_before_that(name):
    model = settled(Wired(between(CHANGES[name]), relu=nn.ReLU(inplace=True), drop=nn.Dropout(), flat=nn.Flatten()))
    check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])


def test_a_norm_whose_input_another_layer_only_reads_goes_into_the_next():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    check(settled(Wired(between(lambda m, x: m.conv(x)))), x, ["next"])
    check(settled(Wired(between(lambda m, x: m.drop(x)), drop=nn.Dropout())), x, ["next"])
    # What happens afterwards is no matter.
    check(settled(Wired(lambda m, x: m.last(m.norm(y := x * 1)) + added(m, y))), x, ["next"])
    with torch.inference_mode():
        x = x.clone()
    # Such tensors do not count their changes.
    with torch.no_grad():
        check(settled(Wired(lambda m, x: m.last(m.norm(x)))), x, ["next"])
