"""The kernel that joins partial moments: several rows of a matrix to a program, where there are many groups."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from checks import correlated

from iternorm import GroupWhitening2d, IterNorm2d
from iternorm.backends.triton import items, plan
from iternorm.backends.triton.launches import reductions

WORDS: dict = {"num_iters": 1, "impl": "triton"}
LAYERS = {
    "16 groups": (lambda: IterNorm2d(62, group_size=4, **WORDS), (3, 62, 4, 4)),
    "samples": (lambda: GroupWhitening2d(8, num_groups=4, **WORDS), (7, 8, 4, 4)),
    "more rows than there are": (lambda: GroupWhitening2d(72, num_groups=18, **WORDS), (2, 72, 5, 5)),
}


def step(name, last, monkeypatch):
    """What a layer returns, its gradients and its state after a step; and how many rows a program has reduced."""
    make, shape = LAYERS[name]
    for module in (plan, items):
        monkeypatch.setattr(module, "_plans", {})
    torch.manual_seed(0)
    layer, x = make(), correlated(*shape, dtype=torch.float32)
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    y = layer(x)
    found = [y, *torch.autograd.grad(y, (x, *layer.parameters()), torch.randn(shape)), *layer.buffers()]
    (made,) = (*plan._plans.values(), *items._plans.values())
    rows = {made.launches[reduction].constants["EACH"] for reduction in ("reduce", "cross_reduce")}
    return found, rows


# The partials of a batch do not depend on its memory format; those of samples do.
@pytest.mark.parametrize(
    ("name", "last"),
    [("16 groups", False), ("samples", False), ("samples", True), ("more rows than there are", True)],
)
def test_several_rows_to_a_program_give_the_bits_of_one(name, last, monkeypatch, poisoned_memory):
    several, rows = step(name, last, monkeypatch)
    assert min(rows) > 1
    monkeypatch.setattr(reductions, "_MOST_ROWS", 1)
    one, rows = step(name, last, monkeypatch)
    assert rows == {1}
    for a, b in zip(several, one, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("groups", "size", "expected"),
    [(1, 64, 1), (1, 128, 1), (32, 64, 1), (64, 32, 1), (128, 32, 2), (256, 32, 4), (512, 32, 8), (4096, 64, 8)],
)
def test_an_h200_keeps_a_thousand_programs_busy(groups, size, expected):
    x = torch.empty(1, groups * size, 1, 1)
    made = plan.Plan(plan.plan_for(x, None, None, size, 5, None).key, x)
    made.num_sms = 132
    launch = made.launches["reduce"]
    assert launch.constants["EACH"] == expected
    assert launch.grid == (groups, size // expected)


@pytest.mark.parametrize("name", ["reduce", "cross_reduce"])
@pytest.mark.parametrize("size", [16, 64, 96, 128])
@pytest.mark.parametrize("side", [1, 8, 32])
def test_registers_of_a_reduction_suffice(side, size, name):
    x = torch.empty(64, size, side, side)
    made = plan.Plan(plan.plan_for(x, None, None, size, 5, None).key, x)
    made.num_sms = 132
    launch = made.launches[name]
    assert launch.constants["PB"] * launch.constants["BD"] <= 64 * 32 * launch.warps
