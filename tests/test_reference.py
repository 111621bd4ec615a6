"""The oracle is checked against torch's own functions and against closed forms."""

import pytest
import torch
from checks import correlated, covariance_of, covariance_with, relative_error, samples_of
from torch.nn import functional as F

from iternorm import reference


def test_newton_steps_are_those_of_algorithm_1_on_a_diagonal():
    eigenvalues = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    normalized = eigenvalues / eigenvalues.sum()
    p = torch.ones_like(normalized)
    for num_iters in range(6):
        expected = torch.diag(p / eigenvalues.sum().sqrt())
        torch.testing.assert_close(reference.newton(torch.diag(eigenvalues), num_iters), expected)
        p = (3 * p - p**3 * normalized) / 2


@pytest.mark.parametrize("solver", ["zca", "pca", "cholesky"])
def test_exact_solvers_whiten(solver):
    covariance = covariance_with(torch.linspace(0.1, 3, 6, dtype=torch.float64), 2)
    whitening = getattr(reference, solver)(covariance)
    identity = torch.eye(6, dtype=torch.float64).expand_as(covariance)
    torch.testing.assert_close(whitening @ covariance @ whitening.mT, identity)


def test_forms_of_the_exact_solvers():
    covariance = covariance_with(torch.linspace(0.1, 3, 6, dtype=torch.float64))
    symmetric = reference.zca(covariance)
    torch.testing.assert_close(symmetric, symmetric.mT)
    lower = reference.cholesky(covariance)
    torch.testing.assert_close(lower, lower.tril())
    rows = reference.pca(covariance)
    # Rows are orthogonal principal axes, the largest variance first.
    torch.testing.assert_close(rows @ rows.mT, torch.diag((rows @ rows.mT).diagonal()), atol=1e-12, rtol=0)
    assert (rows.norm(dim=1).diff() > 0).all()
    assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("shape", [(16, 5), (8, 5, 3), (4, 5, 3, 2), (4, 5, 2, 2, 2)])
def test_batch_norm_is_torchs(shape):
    x = correlated(*shape)
    weight, bias = torch.randn(2, shape[1], dtype=torch.float64)
    expected = F.batch_norm(x, None, None, weight, bias, training=True)
    torch.testing.assert_close(reference.batch_norm(x, weight, bias), expected)


def test_whitened_groups_have_unit_covariance_and_means_are_returned():
    x = correlated(64, 7, 5)
    whitened, mean, matrices = reference.whiten(x, reference.zca, 3, eps=1e-12)
    torch.testing.assert_close(mean, samples_of(x).mean(1))
    assert [len(m) for m in matrices] == [3, 3, 1]
    for group in whitened.split(3, dim=1):
        covariance = covariance_of(group)
        assert relative_error(covariance, torch.eye(len(covariance))) < 1e-10


def test_eps_is_on_the_diagonal_of_the_covariance():
    x = torch.zeros(4, 3, dtype=torch.float64)
    _, _, (matrix,) = reference.whiten(x, reference.zca, None, eps=0.25)
    torch.testing.assert_close(matrix, 2 * torch.eye(3, dtype=torch.float64))


def test_functions_compose_solver_and_affine():
    x = correlated(12, 6, 3)
    weight, bias = torch.randn(2, 6, dtype=torch.float64)
    for solver in ("zca", "pca", "cholesky"):
        whitened, _, _ = reference.whiten(x, getattr(reference, solver), 4, 1e-5)
        actual = reference.decorrelated_batch_norm(x, weight, bias, group_size=4, solver=solver)
        torch.testing.assert_close(actual, whitened * weight[:, None] + bias[:, None])
    whitened, _, _ = reference.whiten(x, lambda c: reference.newton(c, 3), 4, 1e-5)
    torch.testing.assert_close(reference.iter_norm(x, None, None, 4, 3), whitened)
