"""inverse_root and sqrt: against an eigendecomposition in fp64, at mixed scales, singular, differentiated, compiled."""

import itertools
import math

import pytest
import torch
from checks import covariance_with, relative_error

from iternorm.linalg import inverse_root, sqrt

METHODS = ("newton", "minimax", "eigh")
DTYPES = (torch.float32, torch.float64)


def with_condition(condition, size, *batch, dtype=torch.float64):
    return covariance_with(torch.logspace(-math.log10(condition), 0, size, dtype=torch.float64), *batch).to(dtype)


def exact(A, p):
    eigenvalues, vectors = torch.linalg.eigh(A.double())
    return (vectors * eigenvalues.pow(-1 / p)[..., None, :]) @ vectors.mT


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", [1, 10, 1e3, 1e5])
def test_the_root_is_exact_to_the_matrix_own_rounding(method, p, dtype, condition):
    A = with_condition(condition, 48, dtype=dtype)
    # Rounding A moves its smallest eigenvalue by eps of the largest. eigh loses several times that.
    budget = torch.finfo(dtype).eps * (16 + (8 if method == "eigh" else 1) * condition)
    if method == "minimax" and dtype == torch.float64:
        # Cancellation in the p-th power of a step: a digit or two for p = 3 and 4, three of sixteen for 8.
        budget += torch.finfo(dtype).eps * {3: 100, 4: 100, 8: 10_000}.get(p, 0)
    assert relative_error(inverse_root(A, p, method=method), exact(A, p)) < budget


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_each_matrix_of_a_batch_has_its_own_scale(method, p):
    A = with_condition(100, 16, 6, dtype=torch.float32) * torch.logspace(-12, 12, 6)[:, None, None]
    together = inverse_root(A, p, method=method)
    for matrix, root in zip(A, together, strict=True):
        # Each as exact as if it were alone.
        assert relative_error(root, exact(matrix, p)) < 2e-5
        torch.testing.assert_close(root, inverse_root(matrix, p, method=method), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_batch_dimensions_are_kept(method):
    A = with_condition(10, 5, 2, 3)
    assert inverse_root(A, 4, method=method).shape == (2, 3, 5, 5)
    assert inverse_root(A[:0], method=method).shape == (0, 3, 5, 5)
    torch.testing.assert_close(inverse_root(A[1, 2], method=method), exact(A[1, 2], 2))


@pytest.mark.parametrize("method", METHODS)
def test_eps_damps(method):
    A = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    expected = torch.tensor([5.0, 2.0, 1.0]).rsqrt()
    torch.testing.assert_close(inverse_root(A, eps=1.0, method=method).diagonal(), expected)
    each = torch.tensor([1.0, 5.0])
    batch = inverse_root(torch.stack([A, 10 * A]), eps=each, method=method)
    torch.testing.assert_close(batch[1].diagonal(), torch.tensor([45.0, 15.0, 5.0]).rsqrt())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1, 8, 31])
def test_a_singular_matrix_has_a_finite_root_that_is_exact_where_it_has_rank(method, p, dtype, rank):
    factor = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0][:, :rank]
    A = (factor @ factor.mT).to(dtype)
    root = inverse_root(A, p, method=method)
    assert root.isfinite().all()
    if rank:
        # In empty directions the eigenvalue counts as one or two roundings of the norm.
        assert root.abs().max() < 2 * torch.finfo(dtype).eps ** (-1 / p)
        # The root is large in those directions, and its rounding, and that of its square, is everywhere.
        error = factor.mT @ root.double() @ factor - torch.eye(rank, dtype=torch.float64)
        rounding = torch.finfo(dtype).eps
        assert error.norm() < 4 * (rounding * root.norm() + rounding**0.5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sqrt_squares_to_the_matrix(method, dtype):
    A = with_condition(100, 24, 3, dtype=dtype)
    root = sqrt(A, method=method)
    assert relative_error(root @ root, A) < 100 * torch.finfo(dtype).eps
    low = torch.randn(24, 3, dtype=dtype)
    low = low @ low.mT
    root = sqrt(low, method=method)
    # In the empty directions A^(-1/2) is eps^(-1/2), and so its rounding is eps^(1/2) everywhere, which A meets: once
    # for eigh, several times for an iteration. The largest of 40 draws were 1.6 for eigh, 4 for newton, 9 for minimax.
    roundings = 2 if method == "eigh" else 8
    assert relative_error(root @ root, low) < roundings * torch.finfo(dtype).eps ** 0.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gradients_are_exact_and_differentiable(method, p):
    A = with_condition(20, 4, 2)

    def root(matrix):
        return inverse_root((matrix + matrix.mT) / 2, p, method=method)

    A.requires_grad_()
    assert torch.autograd.gradcheck(root, (A,))
    assert torch.autograd.gradgradcheck(root, (A[:1].detach().requires_grad_(),))


@pytest.mark.parametrize("method", METHODS)
def test_a_backward_under_autocast_is_the_same(method):
    A = with_condition(20, 4, 2, dtype=torch.float32).requires_grad_()
    (expected,) = torch.autograd.grad(inverse_root(A, method=method).sum(), A)
    with torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(inverse_root(A, method=method).sum(), A)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [2, 8])
def test_second_derivatives_keep_their_digits(method, p, dtype):
    A = with_condition(5, 4)
    weights, direction = (matrix + matrix.mT for matrix in torch.randn(2, 4, 4, dtype=torch.float64))

    def by_eigh(matrix):
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        return (vectors * eigenvalues.pow(-1 / p)) @ vectors.mT

    def second(root, dtype):
        matrix = A.to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad((root(matrix) * weights.to(dtype)).sum(), matrix, create_graph=True)
        return torch.autograd.grad((grad * direction.to(dtype)).sum(), matrix)[0]

    def loss(matrix):
        return (inverse_root(matrix, p, method=method) * weights.to(dtype)).sum()

    expected = second(by_eigh, torch.float64)
    tolerance = 100 * torch.finfo(dtype).eps
    assert relative_error(second(lambda matrix: inverse_root(matrix, p, method=method), dtype), expected) < tolerance
    transformed = torch.func.jvp(torch.func.grad(loss), (A.to(dtype),), (direction.to(dtype),))[1]
    assert relative_error(transformed, expected) < tolerance


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_does_not_see_the_scale_or_equal_eigenvalues(method):
    A = (
        torch.eye(3, dtype=torch.float64) * torch.tensor([1e-6, 1e6], dtype=torch.float64)[:, None, None]
    ).requires_grad_()
    inverse_root(A, method=method).diagonal(dim1=-2, dim2=-1).sum().backward()
    expected = -0.5 * torch.tensor([1e9, 1e-9], dtype=torch.float64)[:, None, None] * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(A.grad, expected, rtol=1e-9, atol=1e-20)


def test_the_gradient_of_sqrt_solves_its_sylvester_equation():
    A = with_condition(50, 6).requires_grad_()
    grad = torch.randn(6, 6, dtype=torch.float64)
    grad = grad + grad.mT
    for method in METHODS:
        (result,) = torch.autograd.grad(sqrt(A, method=method), A, grad)
        root = sqrt(A.detach())
        result = (result + result.mT) / 2
        torch.testing.assert_close(root @ result + result @ root, grad)


@pytest.mark.parametrize("method", METHODS)
def test_function_transforms_take_it_apart(method):
    A = with_condition(10, 4, 3)
    torch.testing.assert_close(torch.func.vmap(lambda a: inverse_root(a, 4, method=method))(A), exact(A, 4))
    direction = torch.eye(4, dtype=torch.float64)
    tangent = torch.func.jvp(lambda a: inverse_root(a, 1, method=method), (A,), (direction.expand_as(A),))[1]
    torch.testing.assert_close(tangent, -exact(A, 1) @ exact(A, 1))


@pytest.mark.parametrize(("method", "p"), [("newton", 2), ("minimax", 4), ("eigh", 2)])
def test_it_compiles_to_one_graph(method, p):
    A = with_condition(10, 8, 2, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(lambda a: inverse_root(a, p, eps=1e-3, method=method), fullgraph=True, backend="aot_eager")
    y = compiled(A)
    (grad,) = torch.autograd.grad(y.square().sum(), A)
    eager = inverse_root(A, p, eps=1e-3, method=method)
    torch.testing.assert_close(y, eager)
    torch.testing.assert_close(grad, torch.autograd.grad(eager.square().sum(), A)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    A = with_condition(10, 8, dtype=dtype)
    for method in METHODS:
        root = inverse_root(A, method=method)
        assert root.dtype == dtype
        assert relative_error(root, exact((A + A.mT) / 2, 2)) < 2 * torch.finfo(dtype).eps


def test_autocast_does_not_reach_the_iteration():
    A = with_condition(10, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for method in METHODS:
            assert relative_error(inverse_root(A, method=method), exact(A, 2)) < 1e-5
            assert relative_error(sqrt(A, method=method) @ inverse_root(A).float(), torch.eye(16)) < 1e-2


BAD = [
    (torch.ones(2, 3), {}, ValueError, r"A has shape \[2, 3\]; expected square matrices"),
    (torch.ones(3), {}, ValueError, r"A has shape \[3\]"),
    (torch.eye(3).long(), {}, TypeError, "A has dtype torch.int64"),
    ([[1.0]], {}, TypeError, "A must be a tensor, got list"),
    (torch.eye(3), {"p": 0}, ValueError, "p=0 must be at least 1"),
    (torch.eye(3), {"p": 2.0}, TypeError, r"p=2.0 is not an integer"),
    (torch.eye(3), {"method": "svd"}, ValueError, "method='svd' is not known"),
    (torch.eye(3), {"eps": -1.0}, ValueError, "eps=-1.0 must be from 0 on"),
    (torch.eye(3), {"eps": torch.ones(3)}, ValueError, r"eps has shape \[3\]"),
    (torch.eye(3) + torch.ones(3, 3).triu(1), {}, ValueError, r"A is not symmetric \(shape \[3, 3\]\)"),
    (torch.diag(torch.tensor([1.0, -0.1])), {}, ValueError, "A has a negative eigenvalue"),
    (torch.eye(2) * torch.nan, {}, ValueError, "A contains NaN or infinity"),
    (torch.stack([torch.eye(2), -torch.eye(2)]), {}, ValueError, r"matrix \[1\] of shape \[2, 2, 2\]"),
]


@pytest.mark.parametrize(("A", "words", "error", "text"), BAD)
def test_bad_input_is_named(A, words, error, text):
    with pytest.raises(error, match=text):
        inverse_root(A, **words)


def test_an_indefinite_matrix_may_be_damped_and_checks_may_be_left_out():
    A = torch.diag(torch.tensor([1.0, -0.1]))
    torch.testing.assert_close(inverse_root(A, eps=0.2).diagonal(), torch.tensor([1.2, 0.1]).rsqrt())
    assert inverse_root(A, check=False, method="eigh").isfinite().all()


# Cases of the Shampoo optimizer's NewtonRootInverseTest (facebookresearch/optimizers), at its tolerances.
PAIRS = [(a, b) for a, b in itertools.product((0.001, 0.01, 0.1, 1.0, 10.0, 100.0), repeat=2) if 2 * b <= a]


def shampoo_error(A, root, p):
    back = torch.linalg.matrix_power(root, -p)
    return torch.dist(back, A, p=torch.inf) / torch.linalg.norm(A, ord=torch.inf).clamp(min=1)


def tridiagonal(size, alpha, beta, ends):
    diagonal = torch.full((size,), alpha)
    diagonal[0] += ends[0] * beta
    diagonal[-1] += ends[1] * beta
    off = torch.full((size - 1,), beta)
    return torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [10, 100])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_shampoos_identity(method, size, p):
    A = torch.eye(size)
    assert shampoo_error(A, inverse_root(A, p, method=method), p) <= 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [10, 100])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_shampoos_tridiagonal_matrices(method, size, p):
    for (alpha, beta), ends in itertools.product(PAIRS, ((1, 1), (-1, 0))):
        A = tridiagonal(size, alpha, beta, ends)
        assert shampoo_error(A, inverse_root(A, p, method=method), p) <= 1e-4, (alpha, beta, ends)


# Cases of Emerging-Optimizers' matrix root tests (NVIDIA), at their tolerances.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 8), (16, 16), (2, 8, 8), (3, 16, 16)])
def test_emerging_optimizers_toeplitz_matrices(method, shape):
    A = tridiagonal(shape[-1], 2.0, 0.25, (0, 0))
    if len(shape) == 3:
        A = A * torch.arange(1.0, shape[0] + 1)[:, None, None]
    root = inverse_root(A, method=method)
    torch.testing.assert_close(root @ A @ root, torch.eye(shape[-1]).expand_as(A), atol=2e-4, rtol=0)
    inverse = torch.linalg.inv(root)
    torch.testing.assert_close(inverse @ inverse, A, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [8, 16, 32])
def test_emerging_optimizers_random_matrices(method, size):
    x = torch.randn(size, size)
    A = 0.5 * x @ x.mT + 1e-3 * torch.eye(size)
    root = inverse_root(A, method=method)
    torch.testing.assert_close(root @ A @ root, torch.eye(size), atol=1e-3, rtol=0)
