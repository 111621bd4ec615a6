"""Residuals in the kernels on a real GPU: every precision against fp64, compiled networks, CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from checks import relative_error
from gpu_checks import BUDGETS, activation, layer_for

from iternorm import IterNorm2d, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Whole tiles, a ragged group, groups above 64, wide groups.
CASES = [
    ((16, 128, 16, 16), 64),
    ((8, 80, 7, 9), 48),
    ((8, 128, 9, 9), 128),
    ((8, 200, 9, 9), 192),
]


def step(layer, x, z, grad):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, z)]
    y = layer(leaves[0], residual=leaves[1])
    return y, torch.autograd.grad(y, (*leaves, layer.weight, layer.bias), grad)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(("shape", "group_size"), CASES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [None, "relu"])
def test_output_and_all_gradients_against_fp64(name, shape, group_size, last, kind, precision, poisoned_memory):
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x, z = activation(shape, dtype, last), activation(shape, dtype, last)
    grad = torch.randn_like(x)
    layer = layer_for(shape, group_size=group_size, activation=kind)
    y, gradients = step(layer, x, z, grad)
    assert y.stride() == x.stride() == gradients[0].stride()
    exact = [t.detach().double().requires_grad_() for t in (x, z, layer.weight, layer.bias)]
    sums = reference.iter_norm(exact[0], *exact[2:], group_size=group_size, num_iters=layer.num_iters) + exact[1]
    assert relative_error(y, sums.relu() if kind else sums) < budget
    # Where an output is rounding itself, so is the sign that decides its gradient: take the layer's own.
    passed = torch.where(y > 0, grad.double(), 0.0) if kind else grad.double()
    for label, actual, expected in zip(
        ("x", "residual", "weight", "bias"), gradients, torch.autograd.grad(sums, exact, passed), strict=True
    ):
        assert relative_error(actual, expected) < budget, label


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(dtype):
    shape = (64, 128, 16, 16)
    x, z, grad = (activation(shape, dtype, True) for _ in range(3))
    layer = layer_for(shape, group_size=64, activation="relu")
    first, second = step(layer, x, z, grad), step(layer, x, z, grad)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_in_eval_it_is_one_launch_more_exact():
    shape = (16, 128, 8, 8)
    x, z = activation(shape, torch.bfloat16, True), activation(shape, torch.bfloat16, True)
    layer = layer_for(shape, group_size=64, activation="relu").eval()
    plain = layer_for(shape, group_size=64).eval()
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert relative_error(layer(x, residual=z), (plain(x).float() + z.float()).relu()) < 5e-3


class Block(nn.Module):
    def __init__(self, shortcut: bool):
        super().__init__()
        self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(IterNorm2d(64, impl="triton") for _ in range(3 if shortcut else 2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        out += self.norms[2](x) if len(self.norms) > 2 else x
        return self.relu(out)


# Both come from torch itself: a deprecated class in its graphs' memory pools, and the empty graph that makes a pool.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("last", [False, True])
def test_a_compiled_residual_network_gives_the_eager_numbers(mode, last):
    torch.manual_seed(0)
    model = nn.Sequential(Block(False), Block(True), Block(False)).cuda()
    if last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    eager = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(4):
        x = activation((16, 64, 8, 8), torch.float32, last)
        results = []
        for network, call in ((model, compiled), (eager, eager)):
            leaf = x.detach().clone().requires_grad_()
            y = call(leaf)
            gradients = torch.autograd.grad(y.sin().sum(), (leaf, *network.parameters()))
            results.append([t.detach().clone() for t in (y, *gradients, *network.buffers())])
        for actual, expected in zip(*results, strict=True):
            assert relative_error(actual.float(), expected.float()) < 2e-2


def test_a_step_with_a_residual_is_captured_in_a_graph():
    shape = (16, 64, 8, 8)
    x, z, grad = (activation(shape, torch.bfloat16, True) for _ in range(3))
    x.requires_grad_()
    z.requires_grad_()
    layer = layer_for(shape, group_size=64, activation="relu")

    def run():
        return torch.autograd.grad(layer(x, residual=z), (x, z, layer.weight), grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(activation(shape, torch.bfloat16, True))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))
