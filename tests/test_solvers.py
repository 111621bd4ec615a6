"""Covariance -> whitening matrix: values, gradients and second gradients of each solver (math.md, sections 3 and 4)."""

from typing import Any

import pytest
import torch
from checks import covariance_with, relative_error

from iternorm import reference, solvers

EXACT = ("zca", "pca", "cholesky")


def solve(solver, covariance, num_iters=5):
    return solvers.newton(covariance, num_iters) if solver == "newton" else getattr(solvers, solver)(covariance)


def symmetric(matrix):
    return (matrix + matrix.mT) / 2


@pytest.mark.parametrize("num_iters", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_newton_is_the_papers_polynomial(num_iters, batch):
    covariance = covariance_with(torch.linspace(0.1, 4, 7, dtype=torch.float64), *batch)
    torch.testing.assert_close(solvers.newton(covariance, num_iters), reference.newton(covariance, num_iters))


@pytest.mark.parametrize("num_iters", [0, 1, 2, 5])
def test_a_trace_that_has_overflowed_gives_nan(num_iters):
    covariance = covariance_with(torch.linspace(0.1, 4, 7, dtype=torch.float64), 2)
    covariance[1, 3, 3] = torch.inf
    covariance.requires_grad_()
    whitening = solvers.newton(covariance, num_iters)
    whitening.sum().backward()
    assert covariance.grad is not None
    for result in (whitening, covariance.grad):
        assert result[0].isfinite().all()
        assert result[1].isnan().all()


def test_the_residual_is_the_covariance_of_the_output():
    # Eq. 9: after k steps Z_k Σ_N Z_k = R_k, which is what the next step uses.
    covariance = covariance_with(torch.linspace(0.1, 4, 5, dtype=torch.float64))
    trace = covariance.trace()
    residual, iterate, identity = covariance / trace, torch.eye(5).double(), torch.eye(5).double()
    for num_iters in range(6):
        torch.testing.assert_close(solvers.newton(covariance, num_iters) * trace.sqrt(), iterate)
        torch.testing.assert_close(iterate @ covariance @ iterate / trace, residual)
        step = (3 * identity - residual) / 2
        iterate, residual = iterate @ step, step @ residual @ step


@pytest.mark.parametrize("condition", [10, 1e3, 1e5])
def test_newton_stays_accurate_past_convergence(condition):
    # Rounding errors die out instead of growing: the P-form has left fp32's range here.
    covariance = covariance_with(torch.logspace(0, torch.tensor(condition).log10(), 64, dtype=torch.float64))
    whitening = solvers.newton(covariance.float(), 40)
    assert relative_error(whitening, reference.zca(covariance)) < 1e-6 * condition**0.75


@pytest.mark.parametrize("solver", EXACT)
def test_exact_solvers_are_the_references(solver):
    covariance = covariance_with(torch.linspace(0.1, 4, 7, dtype=torch.float64), 3)
    torch.testing.assert_close(solve(solver, covariance), getattr(reference, solver)(covariance))


def test_newton_of_one_channel_is_exact_for_every_number_of_steps():
    variance = torch.tensor([[[0.3]], [[7.0]]], dtype=torch.float64)
    for num_iters in (0, 1, 5):
        torch.testing.assert_close(solvers.newton(variance, num_iters), variance.rsqrt())


@pytest.mark.parametrize(
    ("solver", "num_iters"), [*(("newton", n) for n in (0, 1, 2, 5)), ("zca", 0), ("pca", 0), ("cholesky", 0)]
)
def test_gradients_are_exact(solver, num_iters):
    covariance = covariance_with(torch.linspace(0.3, 2, 4, dtype=torch.float64), 2).requires_grad_()
    # A gradient for a symmetric matrix is symmetric: perturbations must be too.
    assert torch.autograd.gradcheck(lambda c: solve(solver, symmetric(c), num_iters), covariance)
    assert torch.autograd.gradgradcheck(lambda c: solve(solver, symmetric(c), num_iters), covariance)


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_the_gradient_for_the_covariance_is_symmetric(solver):
    covariance = covariance_with(torch.linspace(0.3, 2, 5, dtype=torch.float64), 2).requires_grad_()
    (gradient,) = torch.autograd.grad(solve(solver, covariance), covariance, torch.randn(2, 5, 5).double())
    torch.testing.assert_close(gradient, gradient.mT)


@pytest.mark.parametrize("num_iters", [0, 1, 2, 3, 5, 9])
def test_newton_backward_equals_the_papers_equations_6_and_7(num_iters):
    covariance = covariance_with(torch.linspace(0.3, 2, 6, dtype=torch.float64))
    grad = torch.randn(6, 6, dtype=torch.float64)
    trace = covariance.trace()
    normalized = covariance / trace
    iterates = [torch.eye(6, dtype=torch.float64)]
    for _ in range(num_iters):
        iterates.append((3 * iterates[-1] - iterates[-1].matrix_power(3) @ normalized) / 2)
    d_iterate = grad / trace.sqrt()
    d_normalized = torch.zeros_like(grad)
    for P in reversed(iterates[:-1]):
        d_normalized -= P.matrix_power(3).T @ d_iterate / 2
        d_iterate = (
            1.5 * d_iterate
            - 0.5 * d_iterate @ (P @ P @ normalized).T
            - 0.5 * (P @ P).T @ d_iterate @ normalized.T
            - 0.5 * P.T @ d_iterate @ (P @ normalized).T
        )
    identity = torch.eye(6, dtype=torch.float64)
    expected = d_normalized / trace - (d_normalized.T @ covariance).trace() / trace**2 * identity
    expected = expected - (grad.T @ iterates[-1]).trace() / (2 * trace**1.5) * identity
    leaf = covariance.clone().requires_grad_()
    (actual,) = torch.autograd.grad(solvers.newton(leaf, num_iters), leaf, grad)
    torch.testing.assert_close(actual, symmetric(expected))


def test_the_derivative_of_newton_is_self_adjoint():
    # Eq. 10, for the iteration without its trace terms: <F, Df[E]> = <Df[F], E> for symmetric E and F.
    normalized = covariance_with(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    left, right = symmetric(torch.randn(2, 4, 4, dtype=torch.float64))

    def iterate(matrix):
        P = torch.eye(4, dtype=torch.float64)
        for _ in range(3):
            P = (3 * P - P @ P @ P @ matrix) / 2
        return P

    forward: list[Any] = [torch.autograd.functional.jvp(iterate, normalized, v)[1] for v in (left, right)]
    torch.testing.assert_close((forward[0] * right).sum(), (forward[1] * left).sum())


@pytest.mark.parametrize("solver", solvers.SOLVERS)
@pytest.mark.parametrize(
    "eigenvalues",
    [
        pytest.param([1.0] * 6, id="all equal"),
        pytest.param([2.0, 2.0, 2.0, 1.0, 1.0, 0.5], id="repeated"),
        pytest.param([2.0, 1.0, 1e-5, 1e-5, 1e-5, 1e-5], id="zero but for eps"),
        pytest.param([1e-5] * 6, id="all zero but for eps"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_and_zero_eigenvalues_give_finite_gradients(solver, eigenvalues, dtype):
    rotated = covariance_with(torch.tensor(eigenvalues, dtype=torch.float64)).to(dtype)
    for covariance in (rotated, torch.diag(torch.tensor(eigenvalues, dtype=dtype))):
        leaf = covariance.clone().requires_grad_()
        whitening = solve(solver, leaf)
        assert whitening.isfinite().all()
        (gradient,) = torch.autograd.grad(whitening, leaf, torch.randn(6, 6, dtype=dtype), create_graph=True)
        assert gradient.isfinite().all()
        if solver != "pca":
            # A second derivative through arbitrary axes has no meaning; the others' is finite.
            (second,) = torch.autograd.grad(gradient.square().sum(), leaf)
            assert second.isfinite().all()


@pytest.mark.parametrize("solver", ["zca", "cholesky"])
def test_the_gradient_at_repeated_eigenvalues_is_right(solver):
    covariance = covariance_with(torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5], dtype=torch.float64))
    for matrix in (covariance, torch.eye(6, dtype=torch.float64)):
        leaf = matrix.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda c: solve(solver, symmetric(c)), leaf)
        assert torch.autograd.gradgradcheck(lambda c: solve(solver, symmetric(c)), leaf)


def test_the_gradient_of_zca_at_repeated_eigenvalues_is_that_of_newton_at_convergence():
    covariance = covariance_with(torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5], dtype=torch.float64)).requires_grad_()
    grad = torch.randn(6, 6, dtype=torch.float64)
    (exact,) = torch.autograd.grad(solvers.zca(covariance), covariance, grad)
    (iterated,) = torch.autograd.grad(solvers.newton(covariance, 30), covariance, grad)
    torch.testing.assert_close(exact, iterated)


def test_pca_has_no_gaps_in_the_gradient_of_what_does_not_turn_the_axes():
    # tr(W Wᵀ) = Σ 1/λ depends on the eigenvalues alone: its gradient -Σ^{-2} exists where they are equal (Eq. 17).
    covariance = covariance_with(torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(solvers.pca(covariance).square().sum(), covariance)
    torch.testing.assert_close(gradient, -torch.linalg.matrix_power(covariance.detach(), -2))


def test_eigenvalues_below_rounding_are_kept_away_from_zero():
    rank_one = torch.ones(4, 4).requires_grad_()
    for solver in ("zca", "pca"):
        whitening = solve(solver, rank_one)
        (gradient,) = torch.autograd.grad(whitening.sum(), rank_one)
        assert whitening.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_a_matrix_with_nan_gives_nan_and_leaves_the_others(solver):
    covariance = covariance_with(torch.tensor([2.0, 1.5, 1.0, 0.5]), 3)
    good = solve(solver, covariance)
    for bad in (torch.nan, torch.inf):
        spoiled = covariance.clone()
        spoiled[1, 2, 2] = bad
        whitening = solve(solver, spoiled)
        assert not whitening[1].isfinite().all()
        torch.testing.assert_close(whitening[[0, 2]], good[[0, 2]])


def test_cholesky_of_an_indefinite_matrix_is_nan_and_leaves_the_others():
    covariance = torch.diag_embed(torch.tensor([[1.0, 1.0], [1.0, -1.0], [4.0, 1.0]]))
    whitening = solvers.cholesky(covariance)
    assert whitening[1].isnan().all()
    torch.testing.assert_close(whitening[2], torch.diag(torch.tensor([0.5, 1.0])))


@pytest.mark.parametrize("solver", solvers.SOLVERS)
@pytest.mark.parametrize("deviation", [1e-9, 1e15])
def test_gradients_for_deviations_far_from_one(solver, deviation):
    # The product of three large ones is infinite.
    covariance = covariance_with(torch.linspace(1, 4, 5, dtype=torch.float64)) * deviation**2
    weights = torch.randn(5, 5, dtype=torch.float64) * deviation
    gradients = []
    for dtype in (torch.float32, torch.float64):
        values = covariance.to(dtype).requires_grad_()
        gradients += torch.autograd.grad(solve(solver, values), values, weights.to(dtype))
    assert relative_error(*gradients) < 1e-5


def test_second_divided_difference_of_the_inverse_root():
    # Eq. 15 against its definition f[a, b, c] = (f[a, b] - f[b, c]) / (a - c).
    a, b, c = 0.7, 1.9, 3.1
    first = lambda p, q: (p**-0.5 - q**-0.5) / (p - q)  # noqa: E731
    i, j, k = a**0.5, b**0.5, c**0.5
    closed = (i + j + k) / (i * j * k * (i + j) * (j + k) * (i + k))
    assert closed == pytest.approx((first(a, b) - first(b, c)) / (a - c))
