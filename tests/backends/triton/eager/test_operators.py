"""The operators of compiled graphs and synchronized layers, launched from C++ as Python launches them, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import correlated
from equal_ranks import init_equal_ranks
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
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


@pytest.fixture
def group():
    """A function that makes a group of torch's fake ranks the default one."""
    yield lambda options=None: dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=2, pg_options=options
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def warm_layer(driver) -> Any:
    """A layer whose next step is launched from C++."""
    layer = SyncIterNorm(6, group_size=4, num_iters=1, impl="triton")
    for _ in range(2):
        layer(batch().requires_grad_()).sum().backward()
    assert len(driver.launched) == 8
    return layer


def test_cpp_asks_a_process_group_itself(driver, group, monkeypatch):
    group()
    layer = warm_layer(driver)
    for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce"):
        monkeypatch.delattr(dist, name, raising=False)
    layer(batch().requires_grad_()).sum().backward()
    assert len(driver.launched) == 16


def test_an_error_of_a_collective_reaches_the_caller(driver, group):
    kind: Any = FakeProcessGroup
    options = kind.Options()
    group(options)
    layer = warm_layer(driver)
    y = layer(batch().requires_grad_())
    before = layer.running_whitening.clone()
    options.error_on_collective = True
    # It names what failed.
    with pytest.raises(RuntimeError, match="collective operation error"):
        layer(batch().requires_grad_())
    with pytest.raises(RuntimeError, match="collective operation error"):
        y.sum().backward()
    assert torch.equal(layer.running_whitening, before)


def test_a_group_that_is_a_class_of_python_is_asked_in_python(driver, group):
    group()
    layer = warm_layer(driver)
    dist.destroy_process_group()
    # It has the name of the group before it.
    other = init_equal_ranks(2)
    x = batch().requires_grad_()
    driver.launched.clear()
    y = layer(x)
    (found,) = torch.autograd.grad(y.sin().sum(), x)
    assert len(driver.launched) == 8
    assert other.asked == ["gather", "sum"]
    # Twice the same batch is that batch.
    alone = IterNorm2d(6, group_size=4, num_iters=1, impl="torch").double()
    leaf = x.detach().double().requires_grad_()
    expected = alone(leaf)
    # Rounded in fp32.
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sin().sum(), leaf)[0].float(), rtol=1e-4, atol=1e-5)


def test_an_error_of_a_group_in_python_reaches_the_caller(driver, group, monkeypatch):
    group()
    layer = warm_layer(driver)
    dist.destroy_process_group()
    other = init_equal_ranks(2)

    def fail(*arguments):
        raise dist.DistBackendError("a rank is gone")

    for name in ("_allgather_base", "all_gather_single"):
        monkeypatch.setattr(other, name, fail, raising=False)
    before = layer.running_whitening.clone()
    with pytest.raises(dist.DistBackendError, match="a rank is gone"):
        layer(batch().requires_grad_())
    assert torch.equal(layer.running_whitening, before)


def test_a_step_after_the_end_of_its_group_says_so(driver, group):
    group()
    layer = warm_layer(driver)
    y = layer(batch().requires_grad_())
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="process group"):
        y.sum().backward()
