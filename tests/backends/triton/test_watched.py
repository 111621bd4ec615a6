"""Many steps in the kernels, in Triton's interpreter: the iteration stops where a trace falls, forward and backward."""

# A checker takes the language of the kernels for Python.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
import pytest
import torch
from checks import covariance_with, relative_error

from iternorm import IterNorm1d, solvers

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_many_steps.py", allow_module_level=True)

import triton
import triton.language as tl

from iternorm.backends.triton import plan, precision
from iternorm.backends.triton.device import newton
from iternorm.backends.triton.launches import iteration
from iternorm.whitening import settings


def indefinite(size):
    """Two covariances: the iteration of the first stops after thirteen steps, the second has nothing to stop it."""
    eigenvalues = torch.linspace(0.2, 0.5, size, dtype=torch.float64) / size
    good = covariance_with(eigenvalues)
    eigenvalues[0] = -2e-5 * eigenvalues.sum()
    return torch.stack([covariance_with(eigenvalues), good])


@triton.jit
def _solve(
    covariance_ptr,
    grad_ptr,
    kept_ptr,
    whitening_ptr,
    result_ptr,
    BD: tl.constexpr,
    NEWTON: tl.constexpr,
):
    group = tl.program_id(0)
    i = tl.arange(0, BD)[:, None]
    j = tl.arange(0, BD)[None, :]
    place = group * BD * BD + i * BD + j
    kept_ptr += group * NEWTON.STRIDE
    identity = tl.where(i == j, 1.0, 0.0)
    covariance = tl.load(covariance_ptr + place)
    gradient = tl.load(grad_ptr + place)
    trace = newton.total(covariance * identity)
    z = newton.iterate(covariance, trace, identity, kept_ptr, True, BD, NEWTON)
    whitening = z * tl.rsqrt(trace)
    tl.store(whitening_ptr + place, whitening)
    through_trace = 0.5 * newton.total(gradient * whitening)
    result = newton.differentiate(gradient, covariance, trace, through_trace, identity, kept_ptr, BD, NEWTON)
    tl.store(result_ptr + place, result / trace)


def on_chip(covariance, grad, num_iters):
    whitening, result = torch.empty_like(covariance), torch.empty_like(covariance)
    kept = covariance.new_empty(2 * num_iters * covariance.numel())
    size = covariance.shape[-1]
    watched = precision.is_watched(num_iters)
    steps = newton.Newton(T=num_iters, PARTS=0, WATCHED=watched, STRIDE=2 * num_iters * size**2, JITTER=0.0)
    _solve[(2,)](covariance, grad, kept, whitening, result, BD=size, NEWTON=steps)
    return whitening, result


def by_launches(covariance, grad, num_iters):
    whitening, kept = iteration.solve(covariance, num_iters)
    return whitening, iteration.solve_backward(grad, covariance, whitening, kept, num_iters)


@pytest.mark.parametrize(
    ("solve", "size", "num_iters"),
    [
        (on_chip, 16, 20),
        (on_chip, 32, 15),
        (by_launches, 20, 18),
        pytest.param(by_launches, 33, 15, marks=pytest.mark.slow),
    ],
)
def test_it_stops_where_the_solver_stops(solve, size, num_iters, poisoned_memory):
    covariance = indefinite(size).requires_grad_()
    grad = torch.randn(2, size, size, dtype=torch.float64)
    grad = grad + grad.mT
    expected = solvers.newton(covariance, num_iters)
    (wanted,) = torch.autograd.grad(expected, covariance, grad)
    assert relative_error(expected[0], solvers.newton(covariance[0], 13)) == 0
    found = solve(covariance.detach().float(), grad.float(), num_iters)
    for actual, exact in zip(found, (expected, wanted), strict=True):
        for group in range(2):
            # The smallest eigenvalue has itself an error of fp32's rounding.
            assert relative_error(actual[group], exact[group]) < 0.02


def test_a_covariance_that_is_symmetric_up_to_rounding():
    # As the sum of products in parts is. Above 64 channels the steps take matrices for symmetric.
    size, rank = 64, 6
    mixing = torch.randn(size, rank, dtype=torch.float64)
    x = 30 * mixing @ torch.randn(rank, 500, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    covariance = x @ x.T / x.shape[1] + 1e-5 * torch.eye(size)
    noise = 1e-8 * covariance.diagonal().max() * torch.randn(size, size, dtype=torch.float64)
    whitening, _ = iteration.solve((covariance + noise - noise.T).float()[None], 24)
    assert torch.equal(whitening, whitening.mT)
    span = mixing @ torch.linalg.pinv(mixing)
    assert relative_error(span @ whitening[0].double() @ x, span @ solvers.zca(covariance) @ x) < 0.001


@pytest.mark.parametrize(("channels", "samples", "rank"), [(64, 48, 64), (16, 100, 3)])
def test_dependent_channels(channels, samples, rank):
    x = 30 * torch.randn(samples, rank) @ torch.randn(rank, channels)
    x = x.requires_grad_()
    layer = IterNorm1d(channels, num_iters=50, impl="triton")
    y = layer(x)
    y.backward(torch.randn_like(y))
    for tensor in (y, x.grad, layer.weight.grad, layer.running_whitening):
        assert tensor.isfinite().all()
    with torch.no_grad():
        centred = x.double() - x.double().mean(0)
        whitening = solvers.zca(centred.T @ centred / samples + 1e-5 * torch.eye(channels))
        assert relative_error(y, centred @ whitening) < 0.01


def test_zca_and_few_steps_are_not_watched():
    x = torch.randn(6, 16, 5, 5)
    for num_iters, exact, watched in ((12, False, False), (13, False, True), (24, True, False)):
        found = plan.plan_for(x, None, None, 16, num_iters, None, exact)
        for name in ("whiten", "whiten_backward"):
            assert watched == found.launches[name].constants["NEWTON"].WATCHED
    assert settings.Settings(16, "newton", 1000, 1e-5).steps == settings.ZCA_STEPS == 24
    assert [precision.matrix_precision(2, steps) for steps in (12, 13)] == [precision.HALF, "tf32x3"]
