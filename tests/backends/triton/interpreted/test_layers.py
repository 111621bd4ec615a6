"""Layers in the Triton kernels, on the CPU in Triton's interpreter: arithmetic, masks and offsets, in fp32."""

import pytest
import torch
from checks import assert_same_state, channels_last, correlated, layer_for, relative_error, state_of, worst

from iternorm import (
    IterNorm2d,
    reference,
)

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from iternorm.backends.triton import plan, runtime, tiling

# Shape, group size, number of steps, channels_last.
CASES = [
    ((6, 7, 3, 4), 3, 5, False),
    ((6, 7, 3, 4), 3, 5, True),
    ((40, 20), 8, 3, False),
    ((3, 40, 5), 32, 2, False),
    ((9, 5, 2, 2, 2), 4, 1, False),
    ((9, 5, 2, 2, 2), 5, 2, True),
    ((2, 6, 20, 20), 4, 0, True),
    ((2, 64, 9, 9), 64, 5, False),
    ((2, 64, 9, 9), 64, 5, True),
    # Above 64 channels; a second group, which is smaller, takes as long as the first.
    pytest.param((3, 66, 5, 5), 66, 5, False, marks=pytest.mark.rare),
    pytest.param((3, 100, 5, 5), 72, 2, True, marks=pytest.mark.rare),
    pytest.param((3, 100, 5, 5), 72, 1, False, marks=pytest.mark.rare),
    pytest.param((3, 66, 5, 5), 66, 0, False, marks=pytest.mark.rare),
    ((2, 128, 8, 8), 128, 1, False),
    pytest.param((2, 128, 8, 8), 128, 3, True, marks=pytest.mark.rare),
    # In blocks of 64, the last of them not full, and a last group of one block: rows, planes, and short planes, which
    # are copied.
    ((2, 150, 3, 5), 130, 1, True),
    ((2, 150, 8, 8), 130, 1, False),
    pytest.param((3, 130, 5, 7), 130, 2, False, marks=pytest.mark.rare),
    pytest.param((150, 192), 192, 2, False, marks=pytest.mark.rare),
    ((5, 6, 30), 1, 5, False),
]


@pytest.mark.parametrize(("shape", "group_size", "num_iters", "last"), CASES)
def test_output_and_gradients_equal_the_reference(shape, group_size, num_iters, last, poisoned_memory):
    layer = layer_for(shape, group_size=group_size, num_iters=num_iters)
    x = correlated(*shape, dtype=torch.float32)
    x = (channels_last(x) if last else x).requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, group_size=group_size, num_iters=num_iters)
    gradients = torch.autograd.grad(expected, inputs, grad.double())
    assert relative_error(y, expected) < 2e-6
    for actual, wanted in zip((x.grad, layer.weight.grad, layer.bias.grad), gradients, strict=True):
        assert relative_error(actual, wanted) < 2e-6
    assert y.stride() == x.stride()
    assert x.grad is not None
    assert x.grad.stride() == x.stride()


# Whole and ragged groups, both layouts, the batched iteration above 64 channels.
ACTIVATED = [((6, 7, 3, 4), 3, False), ((6, 7, 3, 4), 3, True), ((2, 32, 9, 9), 16, True)]
ACTIVATED += [
    pytest.param((3, 66, 5, 5), 66, False, marks=pytest.mark.rare),
    pytest.param((2, 140, 5, 5), 140, False, marks=pytest.mark.rare),
]


@pytest.mark.parametrize(("shape", "group_size", "last"), ACTIVATED)
def test_an_activation_in_passing_is_one_after_the_layer(shape, group_size, last, poisoned_memory):
    # The activation has no part in the iteration: few steps will do.
    arguments = {"group_size": group_size, "num_iters": 2 if group_size <= 64 else 1}
    layers = [layer_for(shape, activation=activation, **arguments) for activation in ("relu", None)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = correlated(*shape, dtype=torch.float32)
    x = channels_last(x) if last else x
    grad = torch.randn(shape)
    outputs, gradients = [], []
    for layer in layers:
        values = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(values)
        y = y if layer.activation else y.relu()
        y.backward(grad)
        outputs.append(y)
        gradients.append((values.grad, layer.weight.grad, layer.bias.grad))
    assert (outputs[0] == 0).any()
    assert relative_error(*outputs) < 1e-6
    for actual, expected in zip(*gradients, strict=True):
        assert relative_error(actual, expected) < 2e-6
    with torch.no_grad():
        inferred = [layer.eval()(x) for layer in layers]
    assert relative_error(inferred[0], inferred[1].relu()) < 1e-6


def test_a_nan_goes_through_the_activation():
    x = correlated(4, 8, 3, 3, dtype=torch.float32)
    x[0, 0, 0, 0] = torch.nan
    y = layer_for(x.shape, group_size=8, activation="relu")(x)
    assert y.isnan().all()


def test_a_fused_activation_is_twice_differentiable():
    x = correlated(6, 4, 3, 3, dtype=torch.float32).requires_grad_()
    results = []
    for activation in ("relu", None):
        layer = IterNorm2d(4, group_size=4, impl="triton", activation=activation)
        y = layer(x) if activation else layer(x).relu()
        (first,) = torch.autograd.grad((y + 1).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert relative_error(*results) < 1e-5


@pytest.mark.parametrize("last", [False, True])
def test_a_mean_of_a_thousand_deviations_costs_no_more_than_rounding_the_input(last):
    x = torch.randn(4, 20, 8, 8) + 1000
    x = channels_last(x) if last else x
    y = layer_for(x.shape, group_size=8, affine=False)(x)
    assert relative_error(y, reference.iter_norm(x.double(), group_size=8)) < 1e-4


def test_the_gradient_of_deviations_near_the_end_of_the_range():
    # The trace times the samples is beyond it.
    x = 2.0**58 * correlated(8, 16, 6, 6, dtype=torch.float32)
    layer, grad = layer_for(x.shape, group_size=16, num_iters=3, affine=False), torch.randn_like(x)
    values, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    layer(values).backward(grad)
    reference.iter_norm(exact, group_size=16, num_iters=3).backward(grad.double())
    assert values.grad is not None
    assert exact.grad is not None
    assert relative_error(2.0**58 * values.grad, 2.0**58 * exact.grad) < 2e-6


# Groups of 230 channels and of 30, which fill no block of 64 or 128, and 240 samples, which do not fill their tiles.
@pytest.mark.parametrize(
    ("variant", "last"),
    [
        ({"block": 128, "depth": 32}, True),
        ({"block": 128, "depth": 64}, False),
        ({"block": 64, "depth": 32, "as_rows": True}, False),
        ({"block": 128, "depth": 64, "as_rows": True}, False),
    ],
)
def test_wide_groups_in_other_blocks_equal_the_reference(variant, last, monkeypatch, poisoned_memory):
    def other(kernel, *rest):
        tiles = tiling.tiles_for(kernel, *rest)._replace(**variant)
        return tiles._replace(as_rows=False) if kernel.endswith("moments") else tiles

    monkeypatch.setattr(plan, "tiles_for", other)
    monkeypatch.setattr(plan, "_plans", {})
    shape = (3, 260, 8, 10)
    layer = layer_for(shape, group_size=230, num_iters=1, activation="relu")
    x, residual = correlated(*shape, dtype=torch.float32), torch.randn(shape)
    x, residual = (channels_last(t) if last else t for t in (x, residual))
    inputs = [x.requires_grad_(), residual.requires_grad_(), layer.weight, layer.bias]
    y = layer(x, residual=residual)
    grad = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, inputs, grad))
    x, residual, weight, bias = exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = (reference.iter_norm(x, weight, bias, group_size=230, num_iters=1) + residual).relu()
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    assert worst(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < 2e-6
    used = [made.launches["apply"].constants["TILE"] for made in plan._plans.values()]
    assert {(tile.BC, tile.DEPTH, tile.PLANES) for tile in used} == {
        (variant["block"], variant["depth"], variant.get("as_rows", False))
    }


# 24 multiprocessors: enough programs that each block of a wide group is shared by four. 6: two programs of a group,
# both with several of its seven tiles, the last of which is not full.
@pytest.mark.parametrize(
    ("channels", "group_size", "num_sms", "length", "last"),
    [(20, 8, 24, 1, True), (130, 130, 24, 1, True), (20, 8, 6, 20, False), (20, 8, 6, 20, True)],
)
def test_samples_with_means_of_their_own_are_joined(channels, group_size, num_sms, length, last, monkeypatch):
    monkeypatch.setattr(runtime, "_INTERPRETER", runtime._INTERPRETER._replace(num_sms=num_sms))
    monkeypatch.setattr(plan, "_plans", {})
    drift = 0.05 * torch.arange(400.0)[:, None] * torch.randn(channels)
    x = torch.randn(400, channels) + drift
    if length > 1:
        x = x.view(-1, 4, 5, channels).permute(0, 3, 1, 2)
        x = x if last else x.contiguous()
    layer = layer_for(x.shape, group_size=group_size, num_iters=1)
    x.requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, group_size=group_size, num_iters=1)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    shared = [made.num_programs(name) for made in plan._plans.values() for name in ("moments", "cross_moments")]
    assert min(shared) > 1
    actual = (y, x.grad, layer.weight.grad, layer.bias.grad)
    assert worst(relative_error(a, b) for a, b in zip(actual, (expected, *wanted), strict=True)) < 2e-6
    mean = x.detach().double().transpose(0, 1).flatten(1).mean(1)
    assert relative_error(layer.running_mean, 0.1 * mean) < 2e-6


# What is averaged, momentum, group size, number of steps.
AVERAGES = [
    *((running, momentum, 8, 5) for running in ("whitening", "covariance") for momentum in (0.1, None)),
    pytest.param("whitening", 0.1, 72, 2, marks=pytest.mark.rare),
    pytest.param("covariance", None, 72, 0, marks=pytest.mark.rare),
    pytest.param("whitening", None, 72, 1, marks=pytest.mark.rare),
]


@pytest.mark.parametrize(("running", "momentum", "group_size", "num_iters"), AVERAGES)
def test_running_statistics_equal_those_of_the_torch_path(running, momentum, group_size, num_iters, poisoned_memory):
    channels = 20 if group_size == 8 else 80
    shape = (4, channels, 4, 4)
    layers = [
        IterNorm2d(channels, group_size=group_size, num_iters=num_iters, momentum=momentum, running=running, impl=impl)
        for impl in ("triton", "torch")
    ]
    for _ in range(3 if group_size == 8 else 2):
        x = correlated(*shape, dtype=torch.float32)
        for layer in layers:
            layer(x)
    for name, expected in layers[1].state_dict().items():
        assert relative_error(layers[0].state_dict()[name], expected) < 2e-6, name
    x = correlated(*shape, dtype=torch.float32)
    with torch.no_grad():
        outputs = [layer.eval()(x) for layer in layers]
    assert relative_error(outputs[0], outputs[1]) < 2e-6


NOT_FINITE = [
    (torch.nan, "whitening", 8, 5),
    (torch.inf, "covariance", 8, 5),
    pytest.param(torch.nan, "whitening", 66, 2, marks=pytest.mark.rare),
    (torch.inf, "covariance", 72, 1),
]


@pytest.mark.parametrize(("value", "running", "group_size", "num_iters"), NOT_FINITE)
def test_a_batch_that_is_not_finite_leaves_the_running_statistics(value, running, group_size, num_iters):
    channels = {8: 20, 66: 66, 72: 80}[group_size]
    arguments = {"group_size": group_size, "num_iters": num_iters, "running": running}
    layer = layer_for((4, channels, 4, 4), momentum=None, **arguments)
    layer(correlated(4, channels, 4, 4, dtype=torch.float32))
    before = state_of(layer)
    x = correlated(4, channels, 4, 4, dtype=torch.float32)
    x[1, channels - 1, 2, 1] = value
    layer(x)
    assert_same_state(layer, before)


# Groups that share a tile, that have one each, a last one that is smaller, and above 64 channels.
@pytest.mark.parametrize(("channels", "group_size", "num_iters"), [(20, 3, 5), (40, 16, 2), (80, 72, 1)])
@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_a_group_without_variance_leaves_the_running_whitening(channels, group_size, num_iters, running):
    shape, options = (4, channels, 5, 5), {"group_size": group_size, "num_iters": num_iters, "running": running}
    layers = [layer_for(shape, eps=0.0, momentum=None, impl=impl, **options) for impl in ("triton", "torch")]
    for constant in (False, True, False):
        x = correlated(*shape, dtype=torch.float32)
        if constant:
            x[:, -(channels % group_size) :] = 7.0
        for layer in layers:
            layer(x)
    found, expected = (state_of(layer) for layer in layers)
    assert found["num_batches_tracked"] == expected["num_batches_tracked"] == (2 if running == "whitening" else 3)
    for name in ("running_mean", f"running_{running}"):
        assert relative_error(found[name], expected[name]) < 2e-5, name


@pytest.mark.parametrize(("channels", "group_size", "num_iters"), [(20, 8, 5), (66, 66, 0), (100, 72, 2)])
def test_without_affine_and_without_running_statistics(channels, group_size, num_iters, poisoned_memory):
    # An eps that shows.
    arguments = {"group_size": group_size, "num_iters": num_iters, "eps": 0.1}
    layer = layer_for((4, channels, 5, 5), affine=False, track_running_stats=False, **arguments)
    x = correlated(4, channels, 5, 5, dtype=torch.float32).requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum() + y.sum(), x)
    z = x.detach().double().requires_grad_()
    expected = reference.iter_norm(z, **arguments)
    (wanted,) = torch.autograd.grad(expected.square().sum() + expected.sum(), z)
    assert relative_error(y, expected) < 2e-6
    # The gradient of Σ y² is what whitening leaves of it: small differences of large terms.
    assert (gradient - wanted).abs().max() < 1e-5 * wanted.abs().max() + 1e-5


@pytest.mark.parametrize(("channels", "group_size"), [(20, 8), (100, 72)])
def test_gradients_for_the_parameters_alone(channels, group_size, poisoned_memory):
    arguments = {"group_size": group_size, "num_iters": 2 if group_size == 8 else 1}
    layer = layer_for((4, channels, 5, 5), **arguments)
    x = correlated(4, channels, 5, 5, dtype=torch.float32)
    grad = torch.randn_like(x)
    layer(x).backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (layer.weight, layer.bias)]
    gradients = torch.autograd.grad(reference.iter_norm(x.double(), *inputs, **arguments), inputs, grad.double())
    assert relative_error(layer.weight.grad, gradients[0]) < 2e-6
    assert relative_error(layer.bias.grad, gradients[1]) < 2e-6


def test_a_second_backward_is_that_of_the_torch_path():
    x = correlated(4, 6, 3, 3, dtype=torch.float32).requires_grad_()
    gradients = []
    for impl in ("triton", "torch"):
        layer = IterNorm2d(6, group_size=4, impl=impl)
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert relative_error(gradients[0], gradients[1]) < 1e-5


def test_an_input_and_a_gradient_in_other_memory_are_copied():
    layer = layer_for((6, 10, 4, 4), group_size=8)
    x = correlated(6, 4, 10, 4, dtype=torch.float32).permute(0, 2, 1, 3).requires_grad_()
    assert not x.is_contiguous()
    y = layer(x)
    y.sum().backward()
    expected = reference.iter_norm(x.double(), layer.weight.double(), layer.bias.double(), 8)
    assert relative_error(y, expected) < 2e-6
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-4


@pytest.mark.parametrize(("channels", "group_size"), [(20, 16), pytest.param(66, 66, marks=pytest.mark.rare)])
def test_two_runs_give_the_same_bits(channels, group_size):
    x = correlated(4, channels, 5, 5, dtype=torch.float32).requires_grad_()
    layer = layer_for(x.shape, group_size=group_size, num_iters=2)
    runs = []
    for _ in range(2):
        y = layer(x)
        runs.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), torch.ones_like(y).cumsum(1))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
