"""The kernels of inverse_root in Triton's interpreter: against fp64, at ragged sizes, mixed scales and without rank."""

import math

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

from checks import covariance_with, relative_error

from iternorm.linalg import inverse_root
from iternorm.linalg.roots import root_op
from iternorm.whitening import dispatch

ROUNDING = torch.finfo(torch.float32).eps


def with_condition(condition, size, *batch):
    return covariance_with(torch.logspace(-math.log10(condition), 0, size, dtype=torch.float64), *batch)


def exact(A, p):
    eigenvalues, vectors = torch.linalg.eigh(A.double())
    return (vectors * eigenvalues.pow(-1 / p)[..., None, :]) @ vectors.mT


@pytest.mark.parametrize(("size", "p"), [(1, 2), (64, 2), (7, 3), (20, 4), (20, 5), (64, 8)])
def test_the_root_is_exact_to_the_matrix_own_rounding(size, p, poisoned_memory):
    for condition in (10, 1e5):
        A = with_condition(condition, size, 2).float() * torch.tensor([1e-12, 1e12])[:, None, None]
        root = root_op(A, p)
        # Rounding A moves its smallest eigenvalue by eps of the largest. A root whose damping is not taken back is off
        # by 0.34 (p = 4) to 1.4 (p = 2) of that, these by 0.01 to 0.15.
        budget = ROUNDING * (16 + 0.3 * condition)
        assert torch.equal(root, root.mT)
        for matrix, found in zip(A, root, strict=True):
            assert relative_error(found, exact(matrix, p)) < budget, (condition, matrix.abs().max())


@pytest.mark.rare
@pytest.mark.parametrize("p", [2, 4])
def test_matrices_of_many_tiles(p, poisoned_memory):
    A = with_condition(100, 130, 1).float()
    assert relative_error(root_op(A, p), exact(A, p)) < 64 * ROUNDING


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("rank", [0, 1, 31])
def test_a_singular_matrix_has_a_finite_root_that_is_exact_where_it_has_rank(p, rank):
    factor = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0][:, :rank]
    root = root_op((factor @ factor.mT).float()[None], p)[0]
    assert root.isfinite().all()
    if rank:
        assert root.abs().max() < 2 * ROUNDING ** (-1 / p)
        error = factor.mT @ root.double() @ factor - torch.eye(rank, dtype=torch.float64)
        assert error.norm() < 4 * (ROUNDING * root.norm() + ROUNDING**0.5)


def test_only_the_symmetric_part_counts():
    A = with_condition(10, 9, 2).float()
    skew = torch.randn(2, 9, 9)
    torch.testing.assert_close(root_op(A + skew - skew.mT, 2), root_op(A, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_matrix(value):
    A = with_condition(10, 9, 3).float()
    expected = root_op(A, 2)
    A[1, 4, 2] = A[1, 2, 4] = value
    found = root_op(A, 2)
    assert found[1].isnan().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_there_may_be_no_matrix():
    assert root_op(torch.ones(0, 3, 3), 2).shape == (0, 3, 3)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "has_root_kernels", lambda matrices, p: matrices.dtype == torch.float32)


def test_inverse_root_goes_through_the_kernels_and_its_gradient_is_exact(as_on_a_gpu):
    A = with_condition(20, 6, 2).float()
    skew = torch.randn(2, 6, 6)
    # The kernels take the symmetric part themselves, of a gradient that is not symmetric too.
    leaf = (A + skew - skew.mT).requires_grad_()
    root = inverse_root(leaf, 4, eps=0.1, method="minimax", check=False)
    assert torch.equal(root.detach(), root_op(leaf.detach() + 0.1 * torch.eye(6), 4))
    grad = torch.randn(2, 6, 6)
    (found,) = torch.autograd.grad(root, leaf, grad, retain_graph=True)
    double = A.double().requires_grad_()
    (wanted,) = torch.autograd.grad(inverse_root(double, 4, eps=0.1, method="eigh"), double, grad.double())
    assert relative_error(found, wanted) < 1e-5
    (again,) = torch.autograd.grad(root, leaf, grad, create_graph=True)
    torch.autograd.grad(again.square().sum(), leaf)


def test_it_compiles_to_one_graph_with_the_kernels_in_it(as_on_a_gpu):
    A = with_condition(10, 8, 2).float().requires_grad_()
    compiled = torch.compile(lambda a: inverse_root(a, 2, method="minimax"), fullgraph=True, backend="aot_eager")
    y, eager = compiled(A), inverse_root(A, 2, method="minimax")
    assert torch.equal(y, eager)
    grads = [torch.autograd.grad(root.square().sum(), A)[0] for root in (y, eager)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_the_operator_is_what_it_says():
    torch.library.opcheck(root_op, (with_condition(10, 5, 2).float(), 2))
