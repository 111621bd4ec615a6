"""Past convergence on channels that depend on each other: finite in every precision, and ZCA where it can be told."""

import pytest
import torch
from checks import covariance_with, relative_error, state_of

from iternorm import IterNorm1d, IterNorm2d, reference, solvers

# What makes a covariance singular: (channels, samples, rank).
SINGULAR = [(64, 48, 64), (64, 400, 6), (16, 400, 1), (4, 100, 2), (130, 100, 130)]
IMPLS = ("torch", "native", "reference")


def dependent(channels, samples, rank, scale=30.0):
    """``[N, C]`` of a rank below C: eps is less than the rounding of such variances."""
    return scale * torch.randn(samples, rank).double() @ torch.randn(rank, channels).double() / rank**0.5


def whitened(x, eps=1e-5):
    """ZCA by the eigendecomposition in fp64."""
    centred = x.double() - x.double().mean(0)
    eigenvalues, vectors = torch.linalg.eigh(centred.T @ centred / len(x))
    return centred @ (vectors * (eigenvalues.clamp(min=0) + eps).rsqrt()) @ vectors.T


def is_finite(*tensors):
    return all(t.isfinite().all() for t in tensors)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("num_iters", [15, 50])
@pytest.mark.parametrize(("channels", "samples", "rank"), SINGULAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_channels_stay_finite(impl, num_iters, channels, samples, rank, dtype):
    # In fp64 eps is above rounding up to variances of about 1e10.
    scale = 30.0 if dtype == torch.float32 else 1e6
    x = dependent(channels, samples, rank, scale).to(dtype).requires_grad_()
    layer = IterNorm1d(channels, group_size=None, num_iters=num_iters, impl=impl, dtype=dtype)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert is_finite(y, x.grad, layer.weight.grad, layer.running_whitening)
    if num_iters > 15:
        assert relative_error(y, whitened(x)) < 0.02


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_iters", [20, 50])
def test_fewer_samples_than_channels(impl, num_iters):
    x = 30 * torch.randn(48, 64)
    y = IterNorm1d(64, num_iters=num_iters, impl=impl)(x)
    assert relative_error(y, whitened(x)) < 0.005


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_iters", [15, 24, 50])
def test_half_precision_stays_finite(dtype, num_iters):
    x = dependent(64, 48, 64).to(dtype).requires_grad_()
    layer = IterNorm1d(64, num_iters=num_iters)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert is_finite(y, x.grad, layer.running_whitening)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_channel_twice_and_a_constant_one_stay_finite(impl):
    # Here eigenvalues are zero without any rounding: only the number of steps bounds what they are multiplied by.
    x = 30 * torch.randn(8, 4, 5, 5)
    x = torch.cat([x, x, torch.full((8, 1, 5, 5), 1000.0)], 1).requires_grad_()
    layer = IterNorm2d(9, num_iters=300, impl=impl)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert is_finite(y, x.grad, layer.running_whitening)
    assert layer.running_whitening.abs().max() < 1e4


@pytest.mark.parametrize("num_iters", [24, 300])
def test_a_transform_takes_no_more_steps_either(num_iters):
    # A channel and its copy: without any rounding an eigenvalue is zero.
    x = 30 * torch.randn(8, 4, 5, 5)
    x = torch.cat([x, x], 1)
    layer = IterNorm2d(8, affine=False, track_running_stats=False, num_iters=num_iters)
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    y = layer(leaf)
    (expected,) = torch.autograd.grad(y, leaf, grad)
    assert relative_error(torch.func.vmap(layer)(x[None])[0], y) < 1e-3
    assert relative_error(torch.func.grad(lambda x: (layer(x) * grad).sum())(x), expected) < 1e-3


def test_running_covariance_in_eval():
    layer = IterNorm1d(64, num_iters=50, running="covariance", momentum=1.0)
    x = 30 * torch.randn(48, 64)
    layer(x)
    assert is_finite(layer.eval()(x), layer.whitening_matrix())


@pytest.mark.parametrize("mean", [0.0, 2.0, 1000.0])
def test_a_mean_that_makes_the_covariance_less_exact(mean):
    x = dependent(64, 200, 8).float()
    x = x + mean * x.std(0)
    layer = IterNorm1d(64, num_iters=50)
    y = layer(x)
    assert is_finite(y, layer.running_whitening)
    if mean < 1000:
        # Above, the rounding of the input itself is whitened with it.
        assert relative_error(y, whitened(x)) < 0.02


def test_the_groups_that_stop_leave_the_others():
    good = covariance_with(torch.linspace(0.1, 4, 8, dtype=torch.float64), 3)
    bad = covariance_with(torch.tensor([4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5, -1e-6]).double())
    together = torch.stack([good[0], bad, *good[1:]]).requires_grad_()
    grad = torch.randn(4, 8, 8, dtype=torch.float64)
    whitening = solvers.newton(together, 40)
    (gradient,) = torch.autograd.grad(whitening, together, grad)
    assert is_finite(whitening, gradient)
    torch.testing.assert_close(whitening[[0, 2, 3]], solvers.zca(good))
    alone = good.clone().requires_grad_()
    (expected,) = torch.autograd.grad(solvers.newton(alone, 40), alone, grad[[0, 2, 3]])
    torch.testing.assert_close(gradient[[0, 2, 3]], expected)


def indefinite(size=4):
    """Where the iteration stops at its thirteenth step."""
    eigenvalues = torch.linspace(0.2, 0.5, size, dtype=torch.float64)
    eigenvalues[0] = -3e-5
    return covariance_with(eigenvalues)


@pytest.mark.parametrize("newton", [solvers.newton, reference.newton])
def test_what_stops_is_the_polynomial_of_the_steps_before(newton):
    covariance = indefinite()
    stopped = newton(covariance, 40)
    assert any(torch.allclose(stopped, newton(covariance, k), rtol=1e-12) for k in range(11, 15))
    assert not torch.allclose(stopped, newton(covariance, 10))


@pytest.mark.parametrize("newton", [solvers.newton, reference.newton])
def test_gradients_are_exact_where_it_stops(newton):
    def solve(matrix):
        return newton((matrix + matrix.mT) / 2, 20)

    covariance = indefinite().requires_grad_()
    # The derivative changes by its own size over the eigenvalue that is next to zero: smaller steps than usual.
    assert torch.autograd.gradcheck(solve, covariance, eps=1e-9, atol=1e-3, rtol=1e-4)
    assert torch.autograd.gradgradcheck(solve, covariance, eps=1e-9, atol=10, rtol=1e-3)


def test_the_gradient_where_it_stops_needs_no_iterates():
    # Kept or computed once more, they are the same.
    covariance, grad = indefinite(), torch.randn(4, 4, dtype=torch.float64)
    whitening, saved = solvers.solve(covariance[None], "newton", 20, keep=True)
    results = [
        solvers.solve_backward(grad[None], covariance[None], whitening, kept, "newton", 20) for kept in (saved, ())
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_step_never_lowers_the_trace():
    # math.md, "Many steps": eigenvalues in [0, 1] rise, by at most 0.28, and negative ones fall.
    r = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    rise = r * (3 - r) ** 2 / 4 - r
    assert (rise[r >= 0] >= -1e-15).all()
    assert 0.28 < rise.max() < 0.283
    assert (rise[r < 0] <= 1.25 * r[r < 0]).all()


def test_a_compiled_iteration_stops_too():
    covariance = torch.stack([indefinite(), covariance_with(torch.linspace(0.2, 0.5, 4).double())]).requires_grad_()
    results = []
    for newton in (solvers.newton, torch.compile(solvers.newton, fullgraph=True, backend="aot_eager")):
        whitening = newton(covariance, 60)
        results.append((whitening, *torch.autograd.grad(whitening.square().sum(), covariance)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_steps_past_convergence_are_not_taken():
    for dtype, most in ((torch.float32, 24), (torch.float64, 49)):
        assert solvers.most_steps(dtype) == most
        covariance = covariance_with(torch.linspace(0.1, 4, 6, dtype=torch.float64)).to(dtype)
        kept = solvers.solve(covariance, "newton", 1000, keep=True)[1]
        assert len(kept) == 2 * most - 2
        torch.testing.assert_close(solvers.newton(covariance, 1000), solvers.zca(covariance))


def test_the_reference_stays_accurate_past_convergence():
    covariance = covariance_with(torch.logspace(0, 3, 64, dtype=torch.float64))
    for num_iters in (11, 14, 20, 40):
        torch.testing.assert_close(reference.newton(covariance, num_iters), solvers.newton(covariance, num_iters))
    torch.testing.assert_close(reference.newton(covariance, 40), reference.zca(covariance))


def test_the_statistics_do_not_take_part_where_values_overflow():
    # Squares of 1e20 leave fp32: the output is NaN, and the running statistics and the counter stay.
    for impl in IMPLS:
        layer = IterNorm2d(6, group_size=3, impl=impl)
        layer(torch.randn(4, 6, 5, 5))
        before = state_of(layer)
        y = layer(1e20 * torch.randn(4, 6, 5, 5))
        assert y.isnan().all()
        for name, value in state_of(layer).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [1e-15, 1e15, 1e17])
def test_values_far_from_one(impl, scale):
    x = torch.randn(16, 6, 5, 5).double()
    eps = 1e-5 * min(scale, 1.0) ** 2
    layer = IterNorm2d(6, num_iters=24, eps=eps, impl=impl)
    values = (scale * x).float().requires_grad_()
    y = layer(values)
    y.backward(torch.randn_like(y))
    assert is_finite(y, values.grad, layer.running_whitening)
    rows = x.transpose(0, 1).flatten(1).T
    assert relative_error(y.transpose(0, 1).flatten(1).T, whitened(rows, 1e-5 if scale < 1 else 0)) < 1e-4
