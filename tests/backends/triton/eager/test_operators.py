"""The operators of compiled graphs and synchronized layers, launched from C++ as Python launches them, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import correlated
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from iternorm import IterNorm2d, SyncIterNorm
from iternorm.backends.triton.eager import library
from iternorm.whitening import fused

SHAPE = (5, 6, 2, 2)


@pytest.fixture
def registered(driver, monkeypatch):
    """C++ computes the operators on CPU tensors."""

    class OnCpu:
        def __getattr__(self, name):
            return getattr(library._found, name)

        def register_operators(self, key, *functions):
            return library._found.register_operators("CPU", *functions)

    monkeypatch.setattr(fused._steps(), "functions", OnCpu)
    monkeypatch.setattr(fused, "_registration", None)
    fused._register_compiled()
    return driver


def batch(dtype=torch.float32) -> torch.Tensor:
    return correlated(*SHAPE, dtype=torch.float32).to(dtype)


def forward_arguments(
    affine=True, running=True, residual=False, relu=False, momentum=0.1, dtype=torch.float32
) -> tuple:
    weight, bias = (torch.rand(6), torch.rand(6)) if affine else (None, None)
    kept = (torch.zeros(6), torch.eye(4).repeat(2, 1, 1), torch.tensor(0)) if running else (None,) * 3
    z = batch(dtype) if residual else None
    return batch(dtype), weight, bias, z, *kept, momentum, False, 4, 1, 1e-5, False, relu


def copied(arguments) -> list:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


FORMS = [
    {},
    {"affine": False},
    {"running": False},
    {"residual": True, "relu": True},
    {"momentum": None},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forward_from_cpp_is_that_from_python(form, registered):
    arguments = forward_arguments(**form)
    ours, theirs = copied(arguments), copied(arguments)
    # The second call finds what the first has recorded.
    for count in (3, 6):
        found = torch.ops.iternorm.fused_forward(*ours)
        assert len(registered.launched) == count
        expected = fused._forward_in_python(*theirs)
        for one, other in zip((*found, *ours), (*expected, *theirs), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("relu", "residual", "summed", "needs_input"),
    [(False, False, False, True), (True, False, False, True), (True, True, True, True), (False, False, False, False)],
)
def test_backward_from_cpp_is_that_from_python(affine, relu, residual, summed, needs_input, registered):
    given = forward_arguments(affine, running=False, residual=residual, relu=relu)
    y, state = fused._forward_in_python(*given)
    x, weight, *_ = given
    # Memory that does not lie as the input's does is copied.
    grad = batch().contiguous(memory_format=torch.channels_last)
    more = batch() if summed else None
    arguments = (grad, more, x, weight, state, y if relu else None, 4, 1, 1e-5, False, needs_input, residual)
    found = torch.ops.iternorm.fused_backward(*arguments)
    assert registered.launched
    for one, other in zip(found, fused._backward_in_python(*arguments), strict=True):
        assert torch.equal(one, other)


def test_what_was_not_recorded_is_computed_in_python(registered):
    x, *rest = forward_arguments()
    strided = torch.empty(5, 6, 2, 4)[..., ::2].copy_(x)
    ours, theirs = copied(rest), copied(rest)
    found, expected = torch.ops.iternorm.fused_forward(strided, *ours), fused._forward_in_python(strided, *theirs)
    assert not registered.launched
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Block(nn.Module):
    """The end of a residual block, after a layer and a ReLU."""

    def __init__(self, impl: str):
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 1, bias=False)
        self.norms = nn.ModuleList(IterNorm2d(6, group_size=4, num_iters=1, impl=impl) for _ in range(2))

    def forward(self, x):
        return torch.relu(self.norms[1](self.convolution(torch.relu(self.norms[0](x)))) + x)


@pytest.mark.rare
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_compiled_network_is_launched_from_cpp(channels_last, registered):
    compiled, expected = (nn.Sequential(Block(impl), Block(impl)) for impl in ("triton", "torch"))
    expected.load_state_dict(compiled.state_dict())
    torch.compiler.reset()
    run = torch.compile(compiled, fullgraph=True)
    for _ in range(2):
        registered.launched.clear()
        results = []
        x = batch()
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        for network, call in ((compiled, run), (expected, expected)):
            leaf = x.detach().clone().requires_grad_()
            y = call(leaf)
            results.append([y, *torch.autograd.grad(y.sin().sum(), (leaf, *network.parameters())), *network.buffers()])
        # Four layers, three kernels each way.
        assert len(registered.launched) == 24
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_synchronized_step_from_cpp_is_that_from_python(activation, driver, monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layers = [SyncIterNorm(6, group_size=4, num_iters=1, impl="triton", activation=activation) for _ in range(2)]
        results, found = [], []
        for layer, built in zip(layers, (library._found, None), strict=True):
            monkeypatch.setattr(library, "_found", built)
            torch.manual_seed(3)
            for _ in range(2):
                x, z = batch().requires_grad_(), batch().requires_grad_()
                y = layer(x, residual=z)
                y.backward(batch())
                found = [y.detach(), x.grad, z.grad, *(p.grad.clone() for p in layer.parameters())]
            results.append([*found, *layer.state_dict().values()])
    finally:
        dist.destroy_process_group()
    assert len(driver.launched) == 8
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_an_error_of_a_collective_reaches_the_caller(driver, monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer: Any = SyncIterNorm(6, group_size=4, num_iters=1, impl="triton")
        for _ in range(2):
            layer(batch().requires_grad_())

        def fail(*arguments, **words):
            raise dist.DistBackendError("a rank is gone")

        for name in ("all_gather_into_tensor", "all_gather_single"):
            monkeypatch.setattr(dist, name, fail, raising=False)
        before = layer.running_whitening.clone()
        with pytest.raises(dist.DistBackendError, match="a rank is gone"):
            layer(batch().requires_grad_())
        assert torch.equal(layer.running_whitening, before)
    finally:
        dist.destroy_process_group()
