"""Whitening of each sample on a real GPU, against the same layer in fp64 on the CPU: outputs and gradients."""

import copy

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from checks import correlated, relative_error, worst

from iternorm import GroupWhitening2d, InstanceWhitening2d
from iternorm.backends.triton import items
from iternorm.backends.triton.run import parts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# As for the layers over a batch. bfloat16's is larger: the scaled gradient is rounded once more for its product.
BUDGETS = {
    "fp32": (torch.float32, "highest", 5e-6),
    "tf32": (torch.float32, "high", 2e-3),
    "bf16": (torch.bfloat16, "highest", 1e-2),
    "fp16": (torch.float16, "highest", 2e-3),
}
CASES = [
    (GroupWhitening2d, {"num_groups": 32}, (8, 64, 16, 16)),
    (GroupWhitening2d, {"num_groups": 8, "activation": "relu"}, (4, 24, 7, 9)),
    (GroupWhitening2d, {"num_groups": 64}, (3, 64, 12, 12)),
    # Few rows of all channels in one tile, and an odd number of them.
    (GroupWhitening2d, {"num_groups": 4}, (5, 64, 9, 7)),
    (GroupWhitening2d, {"num_groups": 11, "activation": "relu"}, (3, 44, 8, 9)),
    # Items that share a program, that share a multiprocessor, and one that many programs share.
    (GroupWhitening2d, {"num_groups": 32}, (300, 64, 8, 8)),
    (GroupWhitening2d, {"num_groups": 32}, (64, 256, 14, 14)),
    (GroupWhitening2d, {"num_groups": 32}, (1, 128, 65, 65)),
    # Rows of more channels than a tile takes, and of an odd number.
    (GroupWhitening2d, {"num_groups": 32}, (16, 2048, 7, 7)),
    (GroupWhitening2d, {"num_groups": 16, "affine": False}, (8, 48, 17, 17)),
    (InstanceWhitening2d, {"group_size": 64}, (16, 256, 28, 28)),
    (InstanceWhitening2d, {"group_size": 16}, (4, 48, 16, 16)),
    (InstanceWhitening2d, {"group_size": 20, "activation": "relu"}, (4, 50, 9, 9)),
]


# What is in two parts has the loops of three: two cases of it. Each compiles six kernels.
COMBINATIONS = [(*case, name) for case in CASES for name in ("fp32", "bf16")]
COMBINATIONS += [(*case, name) for case in (CASES[0], CASES[10]) for name in ("tf32", "fp16")]


@pytest.mark.parametrize(("kind", "words", "shape", "name"), COMBINATIONS)
@pytest.mark.parametrize("last", [False, True])
def test_output_and_gradients_against_fp64(kind, words, shape, name, last, precision, poisoned_memory):
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    layer = kind(shape[1], **words)
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    x, grad = correlated(*shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    found = []
    for device, compute in (("cuda", dtype), ("cpu", torch.float64)):
        own = copy.deepcopy(layer).to(device, torch.float64 if device == "cpu" else torch.float32)
        given = x.to(device, compute)
        if last:
            given = given.contiguous(memory_format=torch.channels_last)
        given.requires_grad_()
        y = own(given)
        assert y.stride() == given.stride()
        gradients = torch.autograd.grad(y, (given, *own.parameters()), grad.to(y))
        found.append([y.detach(), *gradients])
    # A ReLU passes other values where rounding has moved one across zero: few, and small in the norm.
    errors = [float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    assert worst(errors) < budget * (10 if "activation" in words else 1), errors


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [GroupWhitening2d, InstanceWhitening2d])
def test_the_launches_are_those_of_a_layer_over_a_batch_and_a_sum(kind, last):
    layer, x = kind(64, device="cuda"), torch.randn(8, 64, 16, 16, device="cuda")
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    grad = torch.randn_like(x)

    def step():
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

    # Loading a kernel is an event of its own.
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    # What is left beside the calls of the runtime are kernels.
    counts = {e.key: e.count for e in profile.key_averages() if not e.key.startswith(("cu", "Activity"))}
    once = ("item_moments", "whiten_forward", "item_cross_moments", "whiten_backward", "sum_parts")
    assert counts == {**dict.fromkeys(once, 1), "reduce_moments": 2}


@pytest.mark.parametrize("last", [False, True])
def test_two_runs_and_a_graph_give_the_same_bits(last):
    layer, x = GroupWhitening2d(64, device="cuda"), torch.randn(70, 64, 9, 9, device="cuda")
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn_like(x)
    first = torch.autograd.grad(layer(x), inputs, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(layer(x), inputs, grad)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(first, captured, strict=True):
        assert torch.equal(a, b)


def test_items_of_a_batch_past_2_31_values_are_read_right():
    x = torch.randn(520, 64, 256, 256, device="cuda", dtype=torch.bfloat16)
    layer = GroupWhitening2d(64, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    with torch.no_grad():
        # Of the batch one program adds up an item, and of the item alone many: sums that differ in their last place
        # round an output or an entry of the matrix to another bfloat16. So each is compared with fp64, not with the
        # other. Wrong memory would be an error of 1.
        expected = copy.deepcopy(layer).double()(x[-1:].double())
        for y in (layer(x)[-1:], layer(x[-1:].clone())):
            assert relative_error(y, expected) < BUDGETS["bf16"][2]


def test_sums_of_a_long_item_are_not_truncated():
    x = torch.randn(300, 32, 256, 256, device="cuda", dtype=torch.bfloat16)
    _, state, plan = items.forward(x, None, None, 32, 32, 5, 1e-5, False, False)
    variance = parts_of(state, plan)[1][: 300 * 32].view(300, 32)
    error = variance.double() / x.double().var((2, 3), correction=0) - 1
    # One program adds up 65536 samples. Rounded to bfloat16 about one pilot they leave 2e-4 in each variance, of either
    # sign, and 5e-6 in the mean of these. Where tensor cores truncate each sum, all are 3e-4 too small. In simulation.
    assert error.mean().abs() < 5e-5
