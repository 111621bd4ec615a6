"""The Triton kernels on a real GPU, against fp64: every dtype, layout and precision, and what only a GPU shows."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("triton")

from checks import assert_same_state, relative_error, state_of, worst
from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, IterNorm3d, fused, reference
from iternorm.kernels import devices, launcher, plan, shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Error budgets against fp64: output, gradients. fp32 and TF32 are the project's own targets. For half precision the
# budget is a small multiple of one rounding of the output (2^-9 and 2^-12).
BUDGETS = {
    "fp32": (torch.float32, "highest", 2e-6),
    "tf32": (torch.float32, "high", 2e-3),
    "bf16": (torch.bfloat16, "highest", 5e-3),
    "fp16": (torch.float16, "highest", 2e-3),
}
SHAPES = [
    ((16, 128, 16, 16), 64),
    ((8, 80, 7, 9), 48),
    ((8, 160, 8, 8), 64),
    ((16, 128, 16, 16), 128),
    ((16, 200, 9, 9), 100),
    ((16, 12, 8, 8), 1),
    ((16, 30, 5, 5), 8),
    ((512, 96), 32),
    ((16, 64, 33), 16),
    ((4, 24, 4, 6, 5), 24),
    # Many samples are other tiles, and other kernels.
    ((33, 70, 64, 64), 64),
]


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def activation(shape, dtype, last=False, mean=0.0):
    """Correlated channels of moderate condition, with means of their own."""
    channels = shape[1]
    mixing = torch.eye(channels, device="cuda", dtype=torch.float64)
    mixing += 0.5 * torch.randn_like(mixing) / channels**0.5
    x = torch.einsum("ij,nj...->ni...", mixing, torch.randn(shape, device="cuda", dtype=torch.float64))
    x = (x + mean + torch.randn(channels, device="cuda").view(1, -1, *(1,) * (len(shape) - 2))).to(dtype).contiguous()
    if last:
        x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x


def layer_for(shape, **arguments):
    rank = {2: IterNorm1d, 3: IterNorm1d, 4: IterNorm2d, 5: IterNorm3d}[len(shape)]
    layer = rank(shape[1], device="cuda", **{"impl": "triton", **arguments})
    torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    torch.nn.init.normal_(layer.bias)
    return layer


def errors(layer, x, grad):
    """Relative errors of the output and of the three gradients."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, layer.group_size, layer.num_iters)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    assert y.stride() == x.stride() == x.grad.stride()
    actual = (y, x.grad, layer.weight.grad, layer.bias.grad)
    return [relative_error(a, b) for a, b in zip(actual, (expected, *wanted), strict=True)]


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(("shape", "group_size"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_output_and_gradients_against_fp64(name, shape, group_size, last, precision, poisoned_memory):
    if last and len(shape) < 4:
        pytest.skip("channels_last has four or five dimensions")
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation(shape, dtype, last)
    # Other numbers of steps are other kernels to compile: two shapes will do.
    for num_iters in (0, 1, 5) if shape[1] in (80, 128) else (5,):
        found = errors(layer_for(shape, group_size=group_size, num_iters=num_iters), x, torch.randn_like(x))
        assert worst(found) < budget, (num_iters, found)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [
        ((32, 320, 14, 14), 256),
        ((16, 160, 20, 20), None),
        ((4000, 130), 130),
        ((16, 192, 30), 192),
        ((9, 600, 13, 17), 512),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_groups_in_blocks_against_fp64(name, shape, group_size, last, precision, poisoned_memory):
    if last and len(shape) < 4:
        pytest.skip("channels_last has four or five dimensions")
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation(shape, dtype, last)
    found = errors(layer_for(shape, group_size=group_size), x, torch.randn_like(x))
    assert worst(found) < budget, found


@pytest.mark.parametrize("name", BUDGETS)
def test_groups_that_are_left_to_cublas_against_fp64(name, precision):
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation((4000, 1100), dtype)
    # Their iteration runs in kernels unless torch is asked for.
    assert not fused.are_kernels_best(x, 1100, "newton")
    assert fused.has_large_newton(x, 1100, "newton", 5)
    found = errors(layer_for(x.shape, group_size=None, impl="auto"), x, torch.randn_like(x))
    assert worst(found) < budget, found


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [
        ((16, 128, 16, 16), 64),
        ((8, 80, 7, 9), 48),
        ((8, 128, 9, 9), 128),
        ((33, 64, 64, 64), 64),
        ((8, 192, 9, 9), 192),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_an_activation_in_passing_is_one_after_the_layer(name, shape, group_size, last, precision, poisoned_memory):
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    x = activation(shape, dtype, last)
    grad = torch.randn_like(x)
    layers = [layer_for(shape, group_size=group_size, activation=kind) for kind in ("relu", None)]
    layers[1].load_state_dict(layers[0].state_dict())
    results = []
    for layer in layers:
        values = x.detach().clone().requires_grad_()
        y = layer(values) if layer.activation else layer(values).relu()
        y.backward(grad)
        with torch.no_grad():
            inferred = layer.eval()(x) if layer.activation else layer.eval()(x).relu()
        results.append((y, inferred, values.grad, layer.weight.grad, layer.bias.grad))
    # The same kernels but for their tiles, so sums differ in their order. An element of 16 bits that lies at the edge
    # of two roundings may then fall to the other side: that is 4e-3 of it in bfloat16, and few do.
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < (1e-5 if actual.dtype == torch.float32 else 5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_zca_by_the_iteration_equals_the_eigendecomposition(dtype, last, precision):
    # TF32 may be allowed: the iteration's products keep fp32's accuracy.
    precision("high")
    x = activation((16, 40, 12, 12), dtype, last)
    layers = [
        DecorrelatedBatchNorm2d(40, group_size=16, impl=impl, device="cuda").to(kind)
        for impl, kind in (("triton", torch.float32), ("torch", torch.float64))
    ]
    grad = torch.randn_like(x)
    results = []
    for layer in layers:
        values = x.detach().to(dtype if layer is layers[0] else torch.float64).requires_grad_()
        y = layer(values)
        y.backward(grad.to(y.dtype))
        results.append((y, values.grad, layer.weight.grad, layer.running_whitening))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < (2e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_zca_of_channels_that_depend_on_each_other_is_finite(name, scale, precision):
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    latent = torch.randn(16, 6, 12, 12, device="cuda")
    x = scale * torch.einsum("cd,ndhw->nchw", torch.randn(32, 6, device="cuda"), latent)
    layer = DecorrelatedBatchNorm2d(32, group_size=16, device="cuda", impl="triton")
    x = x.to(dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [64, 192])
def test_a_mean_of_a_thousand_deviations(setting, last, channels, precision):
    precision(setting)
    x = activation((16, channels, 16, 16), torch.float32, last, mean=1000.0)
    found = errors(layer_for(x.shape, group_size=None), x, torch.randn_like(x))
    # The input's own rounding is 6e-5 of a deviation.
    assert worst(found) < (1e-4 if setting == "highest" else 2e-3), found


# From 8 and from 13 steps on the iteration's products are in other parts.
@pytest.mark.parametrize(
    ("num_iters", "setting"), [(7, "highest"), (10, "highest"), (12, "high"), (20, "high"), (20, "highest")]
)
def test_many_steps_stay_accurate(num_iters, setting, precision):
    precision(setting)
    x = activation((16, 64, 16, 16), torch.float32)
    assert worst(errors_against_torch(x, num_iters)) < (1e-4 if setting == "highest" else 5e-3)


def errors_against_torch(x, num_iters):
    """Against the torch path in fp64: past convergence the paper's own form is not accurate."""
    layers = [layer_for(x.shape, num_iters=num_iters), None]
    layers[1] = copy.deepcopy(layers[0]).double()
    layers[1].impl = "torch"
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    outputs = [layer(i) for layer, i in zip(layers, inputs, strict=True)]
    grad = torch.randn_like(x)
    outputs[0].backward(grad)
    outputs[1].backward(grad.double())
    return relative_error(*outputs), relative_error(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("group_size", [48, 100, 120, 150])
def test_running_statistics_and_eval(dtype, running, momentum, group_size):
    arguments = {"group_size": group_size, "running": running, "momentum": momentum, "device": "cuda"}
    layers = [IterNorm2d(200, impl=impl, **arguments) for impl in ("triton", "torch")]
    for _ in range(3):
        x = activation((8, 200, 9, 9), dtype)
        for layer in layers:
            layer(x)
    budget = 1e-5 if dtype == torch.float32 else 5e-3
    for name, expected in layers[1].state_dict().items():
        assert relative_error(layers[0].state_dict()[name], expected) < budget, name
    bad = x.clone()
    bad[3, 150, 2, 2] = torch.inf
    before = state_of(layers[0])
    layers[0](bad)
    assert_same_state(layers[0], before)
    with torch.no_grad():
        outputs = [layer.eval()(x) for layer in layers]
    # The torch path's convolution may use TF32, as cuDNN does by default.
    assert relative_error(*outputs) < 5e-3


@pytest.mark.parametrize(("group_size", "setting"), [(64, "highest"), (128, "high"), (256, "high")])
def test_two_runs_give_the_same_bits(group_size, setting, precision):
    precision(setting)
    for dtype, last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x = activation((32, max(128, group_size), 28, 28), dtype, last)
        grad = torch.randn_like(x)
        layer = layer_for(x.shape, group_size=group_size)
        runs = []
        for _ in range(3):
            y = layer(x.requires_grad_())
            runs.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)))
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("size", [1e-15, 1e-6, 1e6, 1e15])
def test_gradients_of_any_size(name, size, precision):
    # The iteration's backward computes in float16, whose range is small.
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation((16, 64, 16, 16), dtype, True)
    assert worst(errors(layer_for(x.shape), x, size * torch.randn_like(x))) < budget


@pytest.mark.parametrize("name", BUDGETS)
def test_a_nan_stays_at_its_sample_in_eval(name, precision):
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    for last in (False, True):
        x = activation((4, 64, 8, 8), dtype, last)
        x[1, 3, 2, 5] = float("nan")
        with torch.no_grad():
            y = layer_for(x.shape).eval()(x)
        expected = torch.zeros(4, 8, 8, dtype=torch.bool, device="cuda")
        expected[1, 2, 5] = True
        assert torch.equal(y.isnan().all(1), expected)
        assert torch.equal(y.isnan().any(1), expected)


@pytest.mark.parametrize("last", [False, True])
def test_tf32_errs_on_both_sides(last, precision):
    """Tensor cores cut off what TF32 has no room for: unless that is made up for, all is too small by 3e-4."""
    precision("high")
    x = activation((64, 64, 32, 32), torch.float32, last)
    layer = layer_for(x.shape)
    expected = reference.iter_norm(x.double(), layer.weight.double(), layer.bias.double(), 64, 5).detach()
    centred = expected - layer.bias.detach().double().view(1, -1, 1, 1)
    error = ((layer(x).double() - expected) * centred.sign()).mean() / centred.abs().mean()
    assert error.abs() < 5e-5


@pytest.fixture
def smaller_gpu(monkeypatch):
    """As if this GPU had the shared memory of a card for games, and knew no dependent launch."""
    known = devices.device_of(torch.device("cuda", 0))
    monkeypatch.setitem(devices._known, 0, known._replace(capability=(8, 9)))
    monkeypatch.setattr(devices, "_lacking", {})
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 101376)
    launcher._compiled.cache_clear()
    yield
    launcher._compiled.cache_clear()


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
        usual = shapes.tiles_for("whiten_backward", made.shape, made.key.split)
        assert made._chosen["whiten_backward"].stages < usual.stages


# How often each kernel is launched at T=5, forward and backward.
KERNELS = {
    64: (
        {"partial_moments": 1, "reduce_moments": 1, "whiten_forward": 1},
        {"partial_moments": 1, "reduce_moments": 1, "whiten_backward": 1},
    ),
    128: (
        {"partial_moments": 1, "reduce_moments": 1, "start": 1, "combine": 12, "blend": 1, "apply_forward": 1},
        {
            "partial_moments": 1,
            "reduce_moments": 1,
            "prepare": 1,
            "combine": 8,
            "differentiate": 4,
            "finish": 1,
            "apply_backward": 1,
        },
    ),
    192: (
        {"wide_moments": 1, "wide_reduce": 1, "start": 1, "combine": 12, "blend": 1, "wide_apply": 1},
        {
            "wide_moments": 1,
            "wide_reduce": 1,
            "prepare": 1,
            "combine": 8,
            "differentiate": 4,
            "finish": 1,
            "wide_apply_backward": 1,
        },
    ),
}


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
        return result, {event.key: event.count for event in events}

    def backward(y):
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    # Loading a kernel is an event of its own.
    backward(layer(x))
    y, forward_launches = launches(lambda: layer(x))
    _, backward_launches = launches(lambda: backward(y))
    assert (forward_launches, backward_launches) == KERNELS[size]


def test_compiled_with_a_dynamic_batch_equals_eager():
    layer = layer_for((8, 80, 9, 9), group_size=64)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True)
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


@pytest.mark.parametrize(("group_size", "setting"), [(64, "highest"), (128, "high"), (192, "high")])
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
@pytest.mark.parametrize("group_size", [64, 128, 192])
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
    torch.library.opcheck(fused._fused_forward_op, (x, weight, bias, 64, 5, 1e-5, False, False))
    y, state = fused._fused_forward_op(x, weight, bias, 64, 5, 1e-5, False, True)
    torch.library.opcheck(
        fused._fused_backward_op, (torch.randn_like(x), x, weight, state, y, 64, 5, 1e-5, False, True)
    )


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
