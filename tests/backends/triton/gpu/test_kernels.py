"""The Triton kernels on a real GPU, against fp64: every dtype, layout and precision."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("triton")

from checks import assert_same_state, relative_error, state_of, worst
from gpu_checks import BUDGETS, activation, errors, layer_for

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, reference
from iternorm.backends.triton import plan, tiling
from iternorm.whitening import dispatch
from iternorm.whitening.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    ((16, 128, 16, 16), 64),
    ((8, 80, 7, 9), 48),
    ((8, 160, 8, 8), 64),
    ((16, 128, 16, 16), 128),
    ((16, 200, 9, 9), 100),
    # Groups that share tiles, of which there are three in the last one.
    ((16, 12, 8, 8), 1),
    ((16, 30, 5, 5), 8),
    ((16, 134, 9, 9), 4),
    ((512, 96), 32),
    ((16, 64, 33), 16),
    ((4, 24, 4, 6, 5), 24),
    # Many samples are other tiles, and other kernels.
    ((33, 70, 64, 64), 64),
]


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


def assert_within_budget(name, shape, group_size, last, precision):
    """Output and gradients of a layer, at the budget of this name."""
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation(shape, dtype, last)
    found = errors(layer_for(shape, group_size=group_size), x, torch.randn_like(x))
    assert worst(found) < budget, found


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [
        ((32, 320, 14, 14), 256),
        # Planes that are read in place; the others of contiguous memory are copied.
        ((16, 160, 20, 20), None),
        ((9, 600, 8, 8), 512),
        ((4000, 130), 130),
        ((16, 192, 30), 192),
        ((9, 600, 13, 17), 512),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_groups_in_blocks_against_fp64(name, shape, group_size, last, precision, poisoned_memory):
    if last and len(shape) < 4:
        pytest.skip("channels_last has four or five dimensions")
    assert_within_budget(name, shape, group_size, last, precision)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("shape", "group_size"), [((5, 600, 8, 14), 512), ((5, 192, 8, 14), 192), ((5, 250, 9, 9), 125)]
)
@pytest.mark.parametrize("last", [False, True])
def test_tiles_of_large_activations_against_fp64(
    name, shape, group_size, last, precision, poisoned_memory, monkeypatch
):
    def tiles_for(kernel, layout, *rest):
        return tiling.tiles_for(kernel, layout._replace(samples=2**20), *rest)

    monkeypatch.setattr(plan, "tiles_for", tiles_for)
    monkeypatch.setattr(plan, "_plans", {})
    assert_within_budget(name, shape, group_size, last, precision)


@pytest.mark.parametrize("name", BUDGETS)
def test_groups_above_1024_channels_against_fp64(name, precision):
    dtype, setting, budget = BUDGETS[name]
    precision(setting)
    x = activation((4000, 1100), dtype)
    # Their iteration runs in kernels unless torch is asked for.
    assert dispatch.choose(Settings(1100), x) is dispatch.Backend.TRITON_ITERATION
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
    batches = [activation((8, 200, 9, 9), dtype) for _ in range(3)]
    for x in batches:
        for layer in layers:
            layer(x)
    budget = 1e-5 if dtype == torch.float32 else 5e-3
    for name, expected in layers[1].state_dict().items():
        assert relative_error(layers[0].state_dict()[name], expected) < budget, name
    bad = batches[-1].clone()
    bad[3, 150, 2, 2] = torch.inf
    before = state_of(layers[0])
    layers[0](bad)
    assert_same_state(layers[0], before)
    with torch.no_grad():
        outputs = [layer.eval()(batches[-1]) for layer in layers]
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
