"""What only a real GPU shows of the Triton kernels: launches, graphs, streams, memory, another GPU's limits."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from checks import relative_error, worst
from gpu_checks import BUDGETS, activation, errors, layer_for

from iternorm.backends.triton import plan, runtime, tiling
from iternorm.whitening import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def smaller_gpu(monkeypatch):
    """As if this GPU had the shared memory of a card for games, and knew no dependent launch."""
    known = runtime.device_of(torch.device("cuda", 0))
    monkeypatch.setitem(runtime._known, 0, known._replace(capability=(8, 9)))
    monkeypatch.setattr(runtime, "_lacking", {})
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 101376)
    runtime._compiled.cache_clear()
    yield
    runtime._compiled.cache_clear()


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("last", [False, True])
def test_a_gpu_with_less_shared_memory_against_fp64(name, last, precision, smaller_gpu):
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    for shape, group_size in (
        ((33, 64, 64, 64), 64),
        ((16, 80, 16, 16), 48),
        ((8, 128, 9, 9), 128),
        ((8, 320, 9, 9), 256),
    ):
        x = activation(shape, dtype, last)
        found = errors(layer_for(shape, group_size=group_size), x, torch.randn_like(x))
        assert worst(found) < budget, (shape, found)
    made = next(iter(plan._plans.values()))
    if name == "fp32":
        # There was no room for the usual tiles.
        usual = tiling.tiles_for("whiten_backward", made.layout, made.key.split)
        assert made._chosen["whiten_backward"].stages < usual.stages


# How often each kernel is launched at T=5, forward and backward.
KERNELS = {
    64: (
        {"partial_moments": 1, "reduce_moments": 1, "whiten_forward": 1},
        {"partial_moments": 1, "reduce_moments": 1, "whiten_backward": 1},
    ),
    128: (
        {"partial_moments": 1, "reduce_moments": 1, "zero": 1, "iterate": 1, "blend": 1, "apply_forward": 1},
        {"partial_moments": 1, "reduce_moments": 1, "zero": 1, "iterate_backward": 1, "apply_backward": 1},
    ),
    192: (
        {
            "wide_moments": 1,
            "wide_reduce": 1,
            "zero": 1,
            "iterate": 1,
            "blend": 1,
            "forward_operands": 1,
            "wide_apply": 1,
        },
        {
            "wide_moments": 1,
            "wide_reduce": 1,
            "zero": 1,
            "iterate_backward": 1,
            "backward_operands": 1,
            "wide_apply_backward": 1,
        },
    ),
}


def _short(name: str) -> str:
    """A kernel's name; torch clears memory by a copy or by a kernel with a long one."""
    return "zero" if name.startswith("Memset") or "FillFunctor" in name else name


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("size", KERNELS)
def test_auto_chooses_the_kernels(size, precision):
    # Else maps of 128 channels are in blocks too. Wider groups are, and other layouts are copied for them.
    precision("high")
    x = activation((8, size, 8, 8), torch.float32, last=True).requires_grad_()
    grad = torch.randn_like(x)
    layer = layer_for(x.shape, impl="auto", group_size=size)

    def launches(call):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = call()
            torch.cuda.synchronize()
        # What is left beside the calls of the runtime are kernels.
        events = [e for e in profile.key_averages() if not e.key.startswith(("cu", "Activity"))]
        return result, {_short(event.key): event.count for event in events}

    def backward(y):
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    # Loading a kernel is an event of its own.
    backward(layer(x))
    y, forward_launches = launches(lambda: layer(x))
    _, backward_launches = launches(lambda: backward(y))
    assert (forward_launches, backward_launches) == KERNELS[size]


def test_compiled_with_a_dynamic_batch_equals_eager():
    layer = layer_for((8, 80, 9, 9), group_size=64)
    compiled: Any = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True)
    for samples in (8, 12, 20):
        x = activation((samples, 80, 9, 9), torch.float32)
        grad = torch.randn_like(x)
        results = []
        for run in (layer, compiled):
            z = x.clone().requires_grad_()
            y = run(z)
            results.append((y, *torch.autograd.grad(y, (z, *run.parameters()), grad)))
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(*results, strict=True))
    for a, b in zip(layer.state_dict().values(), compiled._orig_mod.state_dict().values(), strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize(("group_size", "setting"), [(1, "highest"), (64, "highest"), (128, "high"), (192, "high")])
def test_a_cuda_graph_replays_training_steps(group_size, setting, precision):
    precision(setting)
    shape = (16, max(128, group_size), 16, 16)
    layer = layer_for(shape, group_size=group_size)
    eager = copy.deepcopy(layer)
    static, grad = activation(shape, torch.float32).requires_grad_(), torch.randn(shape).cuda()

    def step(module, x):
        y = module(x)
        return (y, *torch.autograd.grad(y, (x, module.weight, module.bias), grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, static)
    torch.cuda.current_stream().wait_stream(stream)
    step(eager, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, static)
    for _ in range(3):
        x = activation(shape, torch.float32)
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        expected = step(eager, x.requires_grad_())
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    for a, b in zip(layer.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("group_size", [1, 64, 128, 192])
def test_no_synchronization_in_a_step(group_size):
    shape = (16, max(128, group_size), 16, 16)
    layer = layer_for(shape, group_size=group_size, momentum=None)
    x = activation(shape, torch.float32).requires_grad_()
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        layer.eval()(x.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_operators_keep_their_contracts():
    x, weight, bias = activation((8, 80, 9, 9), torch.float32), torch.rand(80).cuda(), torch.rand(80).cuda()
    nothing = (None, None, None, None, None, False)
    torch.library.opcheck(fused.forward_op, (x, weight, bias, *nothing, 64, 5, 1e-5, False, False))
    running = (torch.zeros(80), torch.eye(64).repeat(2, 1, 1), torch.tensor(0))
    arguments = (x, weight, bias, x.cos(), *(t.cuda() for t in running), 0.1, False, 64, 5, 1e-5, False, True)
    torch.library.opcheck(fused.forward_op, arguments)
    y, state = fused.forward_op(x, weight, bias, *nothing, 64, 5, 1e-5, False, True)
    for needs_residual in (False, True):
        arguments = (torch.randn_like(x), None, x, weight, state, y, 64, 5, 1e-5, False, True, needs_residual)
        torch.library.opcheck(fused.backward_op, arguments)


@pytest.mark.parametrize("last", [False, True])
def test_more_than_two_to_the_31_elements(last):
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of GPU memory")
    # The same 64 images again and again have the moments of one set of them, and so must the last be as the first.
    base = activation((64, 64, 256, 256), torch.bfloat16, last)
    repeats = 2**31 // base.numel() + 1
    x = torch.empty((64 * repeats, *base.shape[1:]), dtype=base.dtype, device="cuda")
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    for i in range(repeats):
        x[64 * i : 64 * (i + 1)] = base
    assert x.numel() > 2**31
    layer = layer_for(x.shape)
    x.requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for result in (y, dx):
        assert torch.equal(result[:64], result[-64:])
    z = base.clone().requires_grad_()
    small = layer(z)
    (dz,) = torch.autograd.grad(small, z, base)
    assert relative_error(y[-64:], small) < 5e-3
    assert relative_error(dx[-64:], dz) < 2e-2


def test_a_layer_keeps_no_memory_after_its_last_tensor_is_gone():
    layer = layer_for((32, 128, 28, 28))
    x = activation((32, 128, 28, 28), torch.float32)
    before = torch.cuda.memory_allocated()
    y = layer(x.requires_grad_())
    y.sum().backward()
    del y
    x.grad = layer.weight.grad = layer.bias.grad = None
    assert torch.cuda.memory_allocated() == before


def test_other_streams_do_not_share_a_workspace():
    layer = layer_for((32, 128, 28, 28))
    inputs = [activation((32, 128, 28, 28), torch.float32) for _ in range(4)]
    expected = [layer(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        outputs = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_view_that_is_not_aligned_is_normalized_too():
    whole = torch.randn(16 * 64 * 64 + 1, device="cuda")
    x = whole[1:].view(16, 64, 8, 8)
    assert x.data_ptr() % 16
    assert worst(errors(layer_for(x.shape), x, torch.randn_like(x))) < 2e-6
    y = layer_for(x.shape, affine=True)(x)
    assert y.isfinite().all()


def test_a_layer_that_was_used_may_move_and_change_its_dtype(precision):
    layer, x = layer_for((16, 64, 8, 8), impl="auto"), activation((16, 64, 8, 8), torch.float32)
    precision("high")
    expected = layer(x).cpu()
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)):
        layer.to(device, dtype)
        y = [layer(x.to(device)) for _ in range(2)][-1]
        assert y.device.type == device
        # bfloat16 has rounded the weight and the bias for good.
        assert relative_error(y.cpu(), expected) < 1e-2
    precision("highest")
    assert not torch.equal(layer(x), y)
