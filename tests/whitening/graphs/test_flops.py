"""FLOP counters count what the layers compute, whoever computes it."""

import subprocess
import sys

import pytest
import torch
from checks import skip_without_kernels
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from iternorm import IterNorm2d

# 4 x 10 x 5 x 5 in groups of 4, 4 and 2: one product of every sample with its group's matrix, two operations each.
PRODUCT = 2 * 4 * 25 * (4 * 4 + 4 * 4 + 2 * 2)


def newton(num_iters, products):
    return 2 * (num_iters - 1) * products * (4**3 + 4**3 + 2**3)


def counted(layer, x=None, backward=False):
    x = torch.randn(4, 10, 5, 5) if x is None else x
    x.requires_grad_(backward)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


# What the small matrices take apart from Newton's iteration, such as A μ: once in each direction, and by torch alone.
SMALL = 4 * PRODUCT // (4 * 25)


@pytest.mark.parametrize("impl", ["torch", "native", "triton"])
def test_training(impl):
    if impl == "triton":
        skip_without_kernels()
    layer = IterNorm2d(10, group_size=4, num_iters=5, impl=impl)
    forward = 2 * PRODUCT + newton(5, 3)
    assert forward <= counted(layer) <= forward + SMALL
    both = forward + 3 * PRODUCT + newton(5, 4)
    # Torch's counter does not know `baddbmm_`, one product of four in the iteration's backward.
    assert both - newton(5, 1) <= counted(layer, backward=True) <= both + SMALL


def test_eval_is_one_convolution():
    assert PRODUCT <= counted(IterNorm2d(10, group_size=4).eval()) <= PRODUCT + SMALL


def test_a_network_layer_by_layer():
    model = nn.Sequential(nn.Conv2d(3, 10, 3, bias=False), IterNorm2d(10, group_size=4, impl="torch"))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 3, 7, 7))
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    assert counts["Sequential.0"] == 2 * 4 * 25 * 10 * 3 * 9
    assert 2 * PRODUCT < counts["Sequential.1"] <= 2 * PRODUCT + newton(5, 3) + SMALL


def test_fake_tensors():
    with FakeTensorMode():
        layer = IterNorm2d(10, group_size=4, num_iters=5)
        count = counted(layer, torch.randn(4, 10, 5, 5), backward=True)
    assert count >= 5 * PRODUCT + newton(5, 3) + newton(5, 3)


def test_the_counter_need_not_be_imported_first():
    # And it is not imported by the package: it imports triton.
    code = (
        "import sys, torch, iternorm\n"
        "layer = iternorm.IterNorm2d(10, group_size=4, num_iters=5)\n"
        "layer(torch.randn(4, 10, 5, 5))\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "for _ in range(2):\n"
        "    with FlopCounterMode(display=False) as counter:\n"
        "        layer(torch.randn(4, 10, 5, 5))\n"
        "    print(counter.get_total_flops())\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    counts = [int(line) for line in result.stdout.split()]
    assert counts[0] == counts[1] >= 2 * PRODUCT + newton(5, 3)


def test_other_operators_are_not_disturbed():
    with FlopCounterMode(display=False) as counter:
        torch.mm(torch.randn(3, 4), torch.randn(4, 5))
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
