"""The Triton kernels on the CPU, in Triton's interpreter: their arithmetic, masks and offsets, in fp32."""

import pytest
import torch
from checks import assert_same_state, correlated, relative_error, state_of, worst

from iternorm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
    functional,
    reference,
    solvers,
)

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

from iternorm.backends.triton import iteration, layout, plan, precision, runtime, tiling
from iternorm.whitening import dispatch, fused, settings

# Of an operator's arguments: no residual, and no running statistics.
NOT_ASKED = (None, None, None, None, None, False)
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
    pytest.param((3, 100, 6, 6), 72, 5, False, marks=pytest.mark.rare),
    pytest.param((3, 100, 6, 6), 72, 2, True, marks=pytest.mark.rare),
    pytest.param((3, 100, 6, 6), 72, 1, False, marks=pytest.mark.rare),
    pytest.param((3, 100, 6, 6), 72, 0, False, marks=pytest.mark.rare),
    ((2, 128, 8, 8), 128, 1, False),
    pytest.param((2, 128, 8, 8), 128, 3, True, marks=pytest.mark.rare),
    # In blocks of 64, the last of them not full, and a last group of one block.
    pytest.param((3, 150, 5, 7), 130, 2, False, marks=pytest.mark.rare),
    ((2, 150, 3, 5), 130, 1, True),
    pytest.param((150, 192), 192, 2, False, marks=pytest.mark.rare),
    ((5, 6, 30), 1, 5, False),
]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def layer_for(shape: tuple[int, ...], **arguments):
    rank = {2: IterNorm1d, 3: IterNorm1d, 4: IterNorm2d, 5: IterNorm3d}[len(shape)]
    layer = rank(shape[1], impl="triton", **arguments)
    if layer.affine:
        torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
        torch.nn.init.normal_(layer.bias)
    return layer


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
    pytest.param((3, 80, 6, 6), 72, False, marks=pytest.mark.rare),
    pytest.param((2, 140, 5, 5), 140, False, marks=pytest.mark.rare),
]


@pytest.mark.parametrize(("shape", "group_size", "last"), ACTIVATED)
def test_an_activation_in_passing_is_one_after_the_layer(shape, group_size, last, poisoned_memory):
    # The activation has no part in the iteration: two steps will do.
    arguments = {"group_size": group_size, "num_iters": 2}
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


@pytest.mark.parametrize(("shape", "group_size", "last"), [((6, 20, 5, 5), 16, True), ((30, 7, 4, 4), 3, False)])
def test_zca_by_the_iteration_equals_the_eigendecomposition(shape, group_size, last, poisoned_memory):
    layers = [
        DecorrelatedBatchNorm2d(shape[1], group_size=group_size, impl=impl).to(dtype)
        for impl, dtype in (("triton", torch.float32), ("torch", torch.float64))
    ]
    # Deviations over three decades, so variances over six.
    scales = torch.logspace(-2, 1, shape[1])[:, None, None]
    x = correlated(*shape, dtype=torch.float32) * scales[torch.randperm(shape[1])]
    x = channels_last(x) if last else x
    outputs, gradients = [], []
    grad = torch.randn(shape)
    for layer in layers:
        dtype = layer.weight.dtype
        values = x.detach().to(dtype).requires_grad_()
        y = layer(values)
        y.backward(grad.to(dtype))
        outputs.append(y)
        gradients.append((values.grad, layer.weight.grad, layer.bias.grad))
    # The covariance itself is rounded to 6e-8 of its largest entries, and the smallest variances feel it.
    assert relative_error(*outputs) < 1e-3
    for actual, expected in zip(*gradients, strict=True):
        assert relative_error(actual, expected) < 3e-3
    assert relative_error(layers[0].running_whitening, layers[1].running_whitening) < 1e-3


@pytest.mark.rare
def test_zca_of_groups_above_64_is_the_iteration_run_to_convergence(monkeypatch, poisoned_memory):
    monkeypatch.setattr(dispatch, "_has_iteration", lambda settings, x: True)
    x, grad = correlated(40, 66, 4, dtype=torch.float32), torch.randn(40, 66, 4)
    found = []
    for dtype, impl in ((torch.float32, "auto"), (torch.float64, "torch")):
        leaf = x.to(dtype).requires_grad_()
        layer = DecorrelatedBatchNorm1d(66, affine=False, group_size=None, impl=impl, dtype=dtype)
        y = layer(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, grad.to(dtype))))
    assert worst(relative_error(a, b) for a, b in zip(*found, strict=True)) < 2e-5


def test_rounding_cannot_make_zca_diverge():
    # Covariances of rank 6 as two parts compute them: their zero eigenvalues come out negative.
    latent, mixing = torch.randn(6, 512), torch.randn(16, 6)
    x = 10 * mixing @ latent
    upper = x.bfloat16().float()
    lower = (x - upper).bfloat16().float()
    raw = (upper @ upper.T + upper @ lower.T + lower @ upper.T) / 512
    assert torch.linalg.eigvalsh(raw.double())[0] < -1e-6
    regularized = raw + 1e-5 * torch.eye(16)
    steps = settings.ZCA_STEPS

    def last_residual(matrix):
        # The solver would stop before it diverges; ZCA's kernel does not.
        residual = matrix / matrix.trace()
        for _ in range(steps - 1):
            residual = (9 * residual - 6 * residual @ residual + residual @ residual @ residual) / 4
        return residual

    # In exact arithmetic no entry of R is above 1.
    assert not last_residual(regularized).abs().max() < 1e9
    assert last_residual(regularized + precision.jitter(2) * torch.diag(raw.diagonal())).abs().max() < 1.001
    # And the kernels do add it, forward and backward.
    x = correlated(6, 16, 5, 5, dtype=torch.float32)
    for name in ("whiten", "whiten_backward"):
        for exact, expected in ((True, precision.jitter(0)), (False, 0.0)):
            found = plan.plan_for(x, None, None, 16, steps, None, exact).launches[name]
            assert expected == found.constants["NEWTON"].JITTER


def test_zca_is_twice_differentiable_as_the_torch_path():
    x = correlated(6, 4, 3, 3, dtype=torch.float32).requires_grad_()
    results = []
    for impl in ("triton", "torch"):
        layer = DecorrelatedBatchNorm2d(4, group_size=4, impl=impl)
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert relative_error(*results) < 1e-3


@pytest.mark.parametrize(
    ("count", "size", "num_iters"),
    [
        pytest.param(2, 72, 5, marks=pytest.mark.rare),
        pytest.param(1, 128, 2, marks=pytest.mark.rare),
        (3, 32, 3),
        (1, 33, 7),
        (2, 40, 1),
        (3, 9, 0),
        pytest.param(1, 40, 24, marks=pytest.mark.rare),
    ],
)
def test_the_iteration_in_launches_equals_the_solver(count, size, num_iters, poisoned_memory):
    factors = torch.randn(count, size, 4 * size, dtype=torch.float64)
    covariance = (factors @ factors.mT / (4 * size)).requires_grad_()
    expected = solvers.newton(covariance, num_iters)
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, covariance, grad)
    single = covariance.detach().float()
    whitening, kept = iteration.solve(single, num_iters)
    found = iteration.solve_backward(grad.float(), single, whitening, kept, num_iters)
    assert relative_error(whitening, expected) < 2e-6
    # Each step rounds: 24 of them leave 3e-6 in fp32, and 2e-2 where dR is not kept symmetric.
    assert relative_error(found, (wanted + wanted.mT) / 2) < (2e-6 if num_iters < 13 else 1e-5)


# float16 is a dtype that the interpreter multiplies; bfloat16, of which the other parts are, it does not.
@pytest.mark.parametrize(("parts", "budget"), [(1, 1e-3), (2, 2e-6)])
@pytest.mark.parametrize(
    ("shape", "group_size", "num_iters", "size"),
    [((6, 7, 3, 4), 3, 5, 1.0), ((40, 20), 16, 5, 1e-15), ((3, 24, 5, 5), 24, 7, 1e15), ((9, 5, 2, 2, 2), 5, 2, 1e6)],
)
def test_the_iteration_in_float16_parts(
    parts, budget, shape, group_size, num_iters, size, monkeypatch, poisoned_memory
):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "newton_split", lambda split, exact, steps: precision.NewtonSplit(parts))
    layer = layer_for(shape, group_size=group_size, num_iters=num_iters)
    x = correlated(*shape, dtype=torch.float32).requires_grad_()
    y = layer(x)
    grad = size * torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, group_size=group_size, num_iters=num_iters)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    found = [relative_error(a, b) for a, b in zip((y, x.grad, layer.weight.grad), (expected, *wanted), strict=False)]
    assert worst(found) < budget, found


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_of_any_size(size):
    x = correlated(6, 12, 4, 4, dtype=torch.float32).requires_grad_()
    y = layer_for(x.shape, group_size=8)(x)
    grad = torch.randn_like(y)
    (plain,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (scaled,) = torch.autograd.grad(y, x, size * grad)
    assert relative_error(scaled.double() / size, plain) < 1e-6


def test_a_gradient_of_zeros_is_zero():
    x = correlated(6, 12, 4, 4, dtype=torch.float32).requires_grad_()
    y = layer_for(x.shape, group_size=8)(x)
    assert not torch.autograd.grad(y, x, torch.zeros_like(y))[0].any()


def test_many_steps_stay_accurate():
    x = correlated(8, 16, 6, 6, dtype=torch.float32)
    outputs = [
        IterNorm2d(16, num_iters=25, impl=impl)(x.to(dtype))
        for impl, dtype in (("triton", torch.float32), ("torch", torch.float64))
    ]
    assert relative_error(*outputs) < 1e-5


@pytest.mark.parametrize("last", [False, True])
def test_a_mean_of_a_thousand_deviations_costs_no_more_than_rounding_the_input(last):
    x = torch.randn(4, 20, 8, 8) + 1000
    x = channels_last(x) if last else x
    y = layer_for(x.shape, group_size=8, affine=False)(x)
    assert relative_error(y, reference.iter_norm(x.double(), group_size=8)) < 1e-4


@pytest.mark.parametrize(("channels", "group_size"), [(20, 8), (130, 130)])
def test_runs_of_samples_with_means_of_their_own_are_joined(channels, group_size, monkeypatch):
    # Enough programs that each block of a wide group is shared by four.
    monkeypatch.setattr(runtime, "_INTERPRETER", runtime._INTERPRETER._replace(num_sms=24))
    monkeypatch.setattr(plan, "_plans", {})
    x = torch.randn(400, channels) + 0.05 * torch.arange(400.0)[:, None] * torch.randn(channels)
    layer = layer_for(x.shape, group_size=group_size, num_iters=1)
    x.requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, group_size=group_size, num_iters=1)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    shared = [made.share_of(name).programs for made in plan._plans.values() for name in ("moments", "cross_moments")]
    assert min(shared) > 1
    actual = (y, x.grad, layer.weight.grad, layer.bias.grad)
    assert worst(relative_error(a, b) for a, b in zip(actual, (expected, *wanted), strict=True)) < 2e-6
    assert relative_error(layer.running_mean, 0.1 * x.detach().double().mean(0)) < 2e-6


# What is averaged, momentum, group size, number of steps.
AVERAGES = [
    *((running, momentum, 8, 5) for running in ("whitening", "covariance") for momentum in (0.1, None)),
    pytest.param("whitening", 0.1, 72, 2, marks=pytest.mark.rare),
    pytest.param("covariance", None, 72, 2, marks=pytest.mark.rare),
    pytest.param("whitening", None, 72, 1, marks=pytest.mark.rare),
    pytest.param("covariance", 0.1, 72, 0, marks=pytest.mark.rare),
]


@pytest.mark.parametrize(("running", "momentum", "group_size", "num_iters"), AVERAGES)
def test_running_statistics_equal_those_of_the_torch_path(running, momentum, group_size, num_iters, poisoned_memory):
    channels = 20 if group_size == 8 else 80
    shape = (4, channels, 4, 4)
    layers = [
        IterNorm2d(channels, group_size=group_size, num_iters=num_iters, momentum=momentum, running=running, impl=impl)
        for impl in ("triton", "torch")
    ]
    for _ in range(3):
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
    pytest.param(torch.nan, "whitening", 72, 2, marks=pytest.mark.rare),
    (torch.inf, "covariance", 72, 1),
]


@pytest.mark.parametrize(("value", "running", "group_size", "num_iters"), NOT_FINITE)
def test_a_batch_that_is_not_finite_leaves_the_running_statistics(value, running, group_size, num_iters):
    channels = 20 if group_size == 8 else 80
    arguments = {"group_size": group_size, "num_iters": num_iters, "running": running}
    layer = layer_for((4, channels, 4, 4), momentum=None, **arguments)
    layer(correlated(4, channels, 4, 4, dtype=torch.float32))
    before = state_of(layer)
    x = correlated(4, channels, 4, 4, dtype=torch.float32)
    x[1, channels - 1, 2, 1] = value
    layer(x)
    assert_same_state(layer, before)


@pytest.mark.parametrize(("channels", "group_size", "num_iters"), [(20, 8, 5), (100, 72, 0), (100, 72, 2)])
def test_without_affine_and_without_running_statistics(channels, group_size, num_iters, poisoned_memory):
    # An eps that shows.
    arguments = {"group_size": group_size, "num_iters": num_iters, "eps": 0.1}
    layer = layer_for((6, channels, 5, 5), affine=False, track_running_stats=False, **arguments)
    x = correlated(6, channels, 5, 5, dtype=torch.float32).requires_grad_()
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
    arguments = {"group_size": group_size, "num_iters": 2}
    layer = layer_for((6, channels, 5, 5), **arguments)
    x = correlated(6, channels, 5, 5, dtype=torch.float32)
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


@pytest.mark.parametrize(("channels", "group_size"), [(20, 16), pytest.param(72, 72, marks=pytest.mark.rare)])
def test_two_runs_give_the_same_bits(channels, group_size):
    x = correlated(6, channels, 5, 5, dtype=torch.float32).requires_grad_()
    layer = layer_for(x.shape, group_size=group_size, num_iters=2)
    runs = []
    for _ in range(2):
        y = layer(x)
        runs.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), torch.ones_like(y).cumsum(1))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_kernels_that_cannot_run_say_why():
    with pytest.raises(ValueError, match=r'impl="triton" cannot run: they take .* not torch.float64; use impl="auto"'):
        layer_for((4, 8, 2, 2), group_size=4, dtype=torch.float64)(torch.randn(4, 8, 2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="groups of up to 1024 channels for 'newton', not 1025"):
        layer_for((4, 1025), group_size=None)(torch.randn(4, 1025))
    with pytest.raises(ValueError, match="up to 65535 groups, not 65536"):
        layer_for((4, 65536), group_size=1)(torch.randn(4, 65536))
    with pytest.raises(ValueError, match="not 'pca'"):
        functional.decorrelated_batch_norm(torch.randn(4, 8, 2, 2), training=True, solver="pca", impl="triton")
    with pytest.raises(ValueError, match="groups of up to 64 channels for 'zca', not 65"):
        functional.decorrelated_batch_norm(torch.randn(4, 65), training=True, group_size=65, impl="triton")


def test_a_tensor_that_outlives_a_transform_is_normalized():
    x, left = torch.randn(6, 8, 3, 3), []

    def keep(t):
        left.append(t)
        return t.sum()

    torch.func.grad(keep)(x)
    layer = layer_for(x.shape, group_size=4, affine=False)
    assert torch.equal(layer(left[0]), layer(x))


def test_a_transform_is_computed_by_ordinary_operators():
    layer = layer_for((6, 8, 3, 3), group_size=4)
    x = torch.randn(6, 8, 3, 3)
    layer(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).sin().sum().backward()
    transformed = torch.func.grad(lambda t: layer(t).sin().sum())(x)
    torch.testing.assert_close(transformed, leaf.grad, rtol=1e-4, atol=1e-5)


def test_the_operators_keep_their_contracts():
    x, weight, bias = correlated(4, 12, 3, 3, dtype=torch.float32), torch.ones(12), torch.zeros(12)
    torch.library.opcheck(fused.forward_op, (x, weight, bias, *NOT_ASKED, 8, 3, 1e-5, False, False))
    running = (torch.zeros(12), torch.eye(8).repeat(2, 1, 1), torch.tensor(0), None, True)
    arguments = (channels_last(x), None, None, channels_last(x).cos(), *running, 8, 0, 1e-5, True, True)
    torch.library.opcheck(fused.forward_op, arguments)
    y, state = fused.forward_op(x, weight, bias, *NOT_ASKED, 8, 3, 1e-5, False, True)
    grad = torch.randn_like(x)
    torch.library.opcheck(fused.backward_op, (grad, None, x, weight, state, y, 8, 3, 1e-5, False, True, False))
    torch.library.opcheck(fused.backward_op, (grad, None, x, weight, state, y, 8, 3, 1e-5, False, True, True))
    torch.library.opcheck(fused.backward_op, (grad, None, x, None, state, None, 8, 3, 1e-5, True, False, False))


def test_the_operators_keep_their_contracts_in_wide_groups():
    # Planes, which are turned for the kernels and must come back.
    x, grad, weight = *torch.randn(2, 4, 130, 3, 3).unbind(), torch.ones(130)
    # Of the tests that there are, those that do not trace: each run takes seconds here.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.forward_op, (x, weight, None, *NOT_ASKED, 130, 1, 1e-5, False, True), test_utils=checks)
    y, state = fused.forward_op(x, weight, None, *NOT_ASKED, 130, 1, 1e-5, False, True)
    arguments = (grad, None, x, weight, state, y, 130, 1, 1e-5, False, True, False)
    torch.library.opcheck(fused.backward_op, arguments, test_utils=checks)


def test_a_plan_is_made_once_and_depends_on_all_it_must():
    x = correlated(4, 12, 3, 3, dtype=torch.float32)
    first = plan.plan_for(x, None, None, 8, 3, None)
    assert plan.plan_for(x.clone(), None, None, 8, 3, None) is first
    for other in (
        plan.plan_for(x[:3], None, None, 8, 3, None),
        plan.plan_for(channels_last(x), None, None, 8, 3, None),
        plan.plan_for(x, torch.ones(12), None, 8, 3, None),
        plan.plan_for(x, None, None, 4, 3, None),
        plan.plan_for(x, None, None, 8, 4, None),
    ):
        assert other is not first


@pytest.mark.parametrize(("samples", "num_groups"), [(1, 1), (100, 3), (65536, 1), (65536, 8), (3211264, 1), (999, 40)])
@pytest.mark.parametrize("others", [0, 1])
def test_programs_cover_all_tiles_and_none_is_empty(samples, num_groups, others):
    shape = layout.Layout(samples, 64 * num_groups, 1, True, 64, 64, num_groups, False, True)
    tiles = tiling.Tiles(64, 4, 3, 2)
    count, each = tiling.programs(shape, tiles, 132, others)
    total = -(-samples // tiles.samples)
    assert (count - 1) * each < total <= count * each
    assert (count + others) * num_groups <= max(132 * tiles.per_sm, (1 + others) * num_groups)
