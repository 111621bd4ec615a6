"""Synchronized layers in the kernels on a real GPU: several gloo ranks that share it, and a group that is only played.

A group of torch's "fake" backend gathers this rank's moments as those of all, and sums nothing.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import sync_kernels
from checks import relative_error, state_of
from equal_ranks import init_equal_ranks
from gpu_checks import BUDGETS, activation
from sync_checks import assert_equal_to_one_process, results_of, shared_results_of

from iternorm import (
    DecorrelatedBatchNorm2d,
    IterNorm2d,
    SyncDecorrelatedBatchNorm,
    SyncIterNorm,
)
from iternorm.whitening.processes import synchronized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared_results_of("kernels", tmp_path_factory)


@pytest.fixture
def played_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.fixture
def equal_ranks():
    """All ranks have the batch of this one, so that sums over them are multiples."""
    yield init_equal_ranks(RANKS)
    dist.destroy_process_group()


def in_torch(case):
    return replace(case, words={**case.words, "impl": "torch"})


# Products in three bfloat16 parts leave 2e-6 of the largest element in each: the bounds are those of a CPU's fp32.
FACTOR = 5


@pytest.mark.parametrize("name", sync_kernels.CASES)
def test_ranks_equal_one_process_on_the_concatenated_batch(ranks, name):
    case = in_torch(sync_kernels.CASES[name])
    assert_equal_to_one_process([rank[name] for rank in ranks], case, factor=FACTOR)


@pytest.mark.parametrize("name", sync_kernels.COMPILED)
def test_full_graph_compile_equals_one_process(ranks, name):
    case = in_torch(sync_kernels.CASES[name])
    assert_equal_to_one_process([rank["compiled", name] for rank in ranks], case, factor=FACTOR)


def test_large_groups_over_ranks_equal_one_process(tmp_path):
    found = results_of("large kernels", tmp_path)
    for name, case in sync_kernels.LARGE.items():
        assert_equal_to_one_process([rank[name] for rank in found], in_torch(case), factor=FACTOR)


def test_ranks_of_different_backends_understand_each_other(ranks):
    case = in_torch(sync_kernels.CASES["ragged groups"])
    assert_equal_to_one_process([rank["another backend"] for rank in ranks], case, factor=FACTOR)


def test_all_ranks_keep_nearly_the_same_statistics(ranks):
    # Kernels of other tiles may round in another order.
    for name in sync_kernels.CASES:
        for rank in ranks[1:]:
            for buffer, value in ranks[0][name][1].items():
                torch.testing.assert_close(rank[name][1][buffer], value, rtol=1e-6, atol=1e-6, msg=f"{name}, {buffer}")


def pair(shape, **words):
    """IterNorm, and SyncIterNorm with the same parameters."""
    alone = IterNorm2d(shape[1], device="cuda", impl="triton", **words)
    torch.nn.init.uniform_(alone.get_parameter("weight"), 0.5, 1.5)
    torch.nn.init.normal_(alone.get_parameter("bias"))
    together = SyncIterNorm(shape[1], device="cuda", impl="triton", **words)
    together.load_state_dict(alone.state_dict())
    return alone, together


def outcome(layer, x, grad, residual=None):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    z = None if residual is None else residual.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x) if z is None else layer(x, residual=z)
    y.backward(grad)
    assert y.stride() == x.grad.stride() == x.stride()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *([] if z is None else [z.grad])]


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("group_size", [16, 48, 64, 128, 192])
@pytest.mark.parametrize("kind", BUDGETS)
def test_ranks_with_the_same_batch_equal_one(kind, group_size, last, equal_ranks, precision):
    dtype, matmul, budget = BUDGETS[kind]
    precision(matmul)
    shape = (8, 192, 14, 14)
    x, grad = activation(shape, dtype, last, mean=2.0), activation(shape, dtype, last)
    alone, together = pair(shape, group_size=group_size)
    # The second step takes the short way of a batch like the last one.
    outcome(alone, x, grad)
    outcome(together, x, grad)
    for first, second in zip(outcome(together, x, grad), outcome(alone, x, grad), strict=True):
        assert relative_error(first, second) < budget
    wanted = state_of(alone)
    for name, value in state_of(together).items():
        torch.testing.assert_close(value, wanted[name], rtol=budget, atol=budget)


@pytest.mark.parametrize("activation_name", [None, "relu"])
def test_a_residual_and_an_activation(activation_name, equal_ranks):
    shape = (8, 64, 14, 14)
    tensors = (activation(shape, torch.float32, True) for _ in range(3))
    x, grad, residual = tensors
    alone, together = pair(shape, activation=activation_name)
    for first, second in zip(outcome(together, x, grad, residual), outcome(alone, x, grad, residual), strict=True):
        assert relative_error(first, second) < 2e-6


def test_zca(equal_ranks):
    alone = DecorrelatedBatchNorm2d(64, device="cuda", impl="triton")
    together = SyncDecorrelatedBatchNorm(64, device="cuda", impl="triton")
    x, grad = (activation((8, 64, 14, 14), torch.float32) for _ in range(2))
    for first, second in zip(outcome(together, x, grad), outcome(alone, x, grad), strict=True):
        assert relative_error(first, second) < 1e-5


@pytest.mark.parametrize("group_size", [64, 128])
def test_a_cuda_graph_replays_a_step(group_size, played_group):
    shape = (8, 128, 14, 14)
    eager, captured = (pair(shape, group_size=group_size, momentum=None)[1] for _ in range(2))
    captured.load_state_dict(eager.state_dict())
    batches = [(activation(shape, torch.float32, True), activation(shape, torch.float32, True)) for _ in range(4)]
    static, grad = (t.clone() for t in batches[0])
    static.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(captured(static), (static, *captured.parameters()), grad)
    torch.cuda.current_stream().wait_stream(stream)
    captured.load_state_dict(eager.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured(static)
        gradients = torch.autograd.grad(y, (static, *captured.parameters()), grad)
    for x, dy in batches:
        with torch.no_grad():
            static.copy_(x)
        grad.copy_(dy)
        graph.replay()
        for first, second in zip((y, *gradients), outcome(eager, x, dy), strict=True):
            assert torch.equal(first, second)
    wanted = state_of(eager)
    for name, value in state_of(captured).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("group_size", [64, 128])
def test_full_graph_compile(group_size, played_group):
    shape = (8, 128, 14, 14)
    eager, recorded = (pair(shape, group_size=group_size, activation="relu")[1] for _ in range(2))
    recorded.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    run = torch.compile(recorded, fullgraph=True)
    for batch in (8, 4):
        x, grad = (activation((batch, *shape[1:]), torch.float32, True) for _ in range(2))
        expected = outcome(eager, x, grad)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        recorded.zero_grad()
        y = run(leaf)
        y.backward(grad)
        actual = (y, leaf.grad, *(p.grad for p in recorded.parameters()))
        for first, second in zip(actual, expected, strict=True):
            assert relative_error(first, second) < 1e-6
    wanted = state_of(eager)
    for name, value in state_of(recorded).items():
        torch.testing.assert_close(value, wanted[name])


@pytest.mark.parametrize("group_size", [16, 128, 192])
def test_operators_keep_their_contracts(group_size):
    shape = (4, 192, 6, 6)
    x, grad, residual = (activation(shape, torch.float32, True) for _ in range(3))
    weight, bias = torch.rand(192, device="cuda"), torch.randn(192, device="cuda")
    check = torch.library.opcheck
    check(synchronized.moments_op, (x, group_size))
    sent = synchronized.moments_op(x, group_size)
    gathered = torch.cat([sent, sent])
    matrices = torch.zeros(-(-192 // group_size), group_size, group_size, device="cuda")
    running = (torch.zeros(192, device="cuda"), matrices, torch.tensor(0, device="cuda"))
    asked = (group_size, 5, 1e-5, False, True, 2)
    check(synchronized.whiten_op, (x, gathered, weight, bias, residual, *running, 0.1, False, *asked))
    y, state = synchronized.whiten_op(x, gathered, weight, bias, residual, *(None,) * 4, False, *asked)
    for needs_residual in (False, True):
        arguments = (grad, x, weight, state, y, group_size, 5, False, needs_residual, 2)
        check(synchronized.cross_moments_op, arguments)
    sent = synchronized.cross_moments_op(*arguments)[0]
    check(synchronized.input_gradient_op, (grad, x, weight, state, sent, y, group_size, 5, 1e-5, False, 2))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_auto_takes_the_kernels_and_the_step_waits_for_nothing(played_group):
    layer = SyncIterNorm(64, device="cuda")
    x = activation((8, 64, 14, 14), torch.bfloat16, True).requires_grad_()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = layer(x)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Launched from Python, or from C++ where that has been compiled.
    assert type(y.grad_fn).__name__ in ("_WhitenEagerBackward", "CppFunction")


def test_no_samples_on_a_gpu(played_group):
    layer = SyncIterNorm(64, device="cuda", impl="triton")
    before = state_of(layer)
    x = torch.empty(0, 64, 8, 8, device="cuda", requires_grad=True)
    y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert y.shape == grad.shape == x.shape
    y.sum().backward()
    weight, mean = layer.get_parameter("weight"), layer.get_buffer("running_mean")
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    # All ranks of this group are empty: the mean is zero, and the covariance too.
    assert torch.equal(mean, before["running_mean"])
