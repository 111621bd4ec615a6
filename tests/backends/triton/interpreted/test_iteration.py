"""Newton's iteration and ZCA in the Triton kernels, in Triton's interpreter: every precision, any size of gradient."""

import pytest
import torch
from checks import channels_last, correlated, layer_for, relative_error, worst

from iternorm import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, IterNorm2d, reference, solvers

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from iternorm.backends.triton import plan, precision, tiling
from iternorm.backends.triton.launches import iteration
from iternorm.whitening import dispatch, settings


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


@pytest.fixture
def large_blocks(monkeypatch):
    """Few tiles for the iteration above 64 channels: what takes the interpreter long is their number."""
    monkeypatch.setattr(tiling, "blocks_for", lambda *_: tiling.Blocks(64, 64, 2, 4))
    iteration._chain_for.cache_clear()
    yield
    iteration._chain_for.cache_clear()


@pytest.mark.rare
def test_zca_of_groups_above_64_is_the_iteration_run_to_convergence(monkeypatch, large_blocks, poisoned_memory):
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
        pytest.param(2, 72, 2, marks=pytest.mark.rare),
        pytest.param(1, 128, 2, marks=pytest.mark.rare),
        (3, 32, 3),
        (1, 33, 7),
        (2, 40, 1),
        (3, 9, 0),
        pytest.param(1, 20, 24, marks=pytest.mark.rare),
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
    # Each step rounds: 24 of them leave 3e-6 in fp32.
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
