"""inverse_root on a real GPU: against fp64 at the sizes that optimizers have, singular, differentiated, compiled."""

import math

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from checks import relative_error

from iternorm.linalg import inverse_root, sqrt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROUNDING = torch.finfo(torch.float32).eps
SHAPES = [(64, 256, 256), (16, 1024, 1024), (3, 130, 130), (2, 600, 600), (300, 33, 33), (1, 1, 1), (2, 3, 17, 17)]


def with_condition(condition, shape):
    vectors = torch.linalg.qr(torch.randn(shape, device="cuda", dtype=torch.float64))[0]
    eigenvalues = torch.logspace(-math.log10(condition), 0, shape[-1], device="cuda", dtype=torch.float64)
    matrix = (vectors * eigenvalues) @ vectors.mT
    return ((matrix + matrix.mT) / 2).float()


def exact(A, p):
    eigenvalues, vectors = torch.linalg.eigh(A.double())
    return (vectors * eigenvalues.pow(-1 / p)[..., None, :]) @ vectors.mT


# `exact` takes seconds of the largest, so of the odd roots there are two shapes, and of what is allowed two more.
COMBINATIONS = [(shape, p, "highest") for shape in SHAPES for p in (2, 4)]
COMBINATIONS += [(shape, p, "highest") for shape in ((3, 130, 130), (300, 33, 33)) for p in (3, 8)]
COMBINATIONS += [(shape, p, "high") for shape in ((64, 256, 256), (2, 600, 600)) for p in (2, 4)]


@pytest.mark.parametrize(("shape", "p", "setting"), COMBINATIONS)
def test_the_root_is_exact_to_the_matrix_own_rounding(shape, p, setting, precision, poisoned_memory):
    precision(setting)
    for condition in (10, 1e3, 1e5):
        A = with_condition(condition, shape)
        root = inverse_root(A, p)
        # As in Triton's interpreter, and for the tensor cores, which truncate sums, a rounding for every sixteen rows.
        assert relative_error(root, exact(A, p)) < ROUNDING * (16 + shape[-1] / 16 + 0.5 * condition), condition
        assert torch.equal(root, root.mT)


@pytest.mark.parametrize("p", [2, 4])
def test_each_matrix_of_a_batch_has_its_own_scale(p):
    A = with_condition(100, (6, 64, 64)) * torch.logspace(-12, 12, 6, device="cuda")[:, None, None]
    for matrix, root in zip(A, inverse_root(A, p), strict=True):
        assert relative_error(root, exact(matrix, p)) < 2e-5


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("rank", [0, 1, 8, 255])
def test_a_singular_matrix_has_a_finite_root_that_is_exact_where_it_has_rank(p, rank):
    factor = torch.linalg.qr(torch.randn(256, 256, device="cuda", dtype=torch.float64))[0][:, :rank]
    root = inverse_root((factor @ factor.mT).float(), p)
    assert root.isfinite().all()
    if rank:
        assert root.abs().max() < 2 * ROUNDING ** (-1 / p)
        error = factor.mT @ root.double() @ factor - torch.eye(rank, device="cuda", dtype=torch.float64)
        assert error.norm() < 4 * (ROUNDING * root.norm() + ROUNDING**0.5)


@pytest.mark.parametrize("p", [2, 4])
def test_the_gradient_is_that_of_eigh_in_double_precision(p):
    A = with_condition(100, (3, 130, 130))
    grad = torch.randn_like(A)
    leaf = A.clone().requires_grad_()
    inverse_root(leaf, p, eps=1e-3).backward(grad)
    double = A.double().requires_grad_()
    inverse_root(double, p, eps=1e-3, method="eigh").backward(grad.double())
    # A derivative loses the condition number once more than the root does.
    assert relative_error(leaf.grad, double.grad) < 1e-3


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_it_compiles_to_one_graph_with_the_kernels_in_it():
    A = with_condition(100, (4, 100, 100)).requires_grad_()
    compiled = torch.compile(lambda a: inverse_root(a, 4, eps=1e-3), fullgraph=True)
    y = compiled(A)
    eager = inverse_root(A, 4, eps=1e-3)
    torch.testing.assert_close(y, eager, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(root.square().sum(), A)[0] for root in (y, eager)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_it_is_captured_in_a_cuda_graph():
    A = with_condition(100, (4, 100, 100))
    inverse_root(A)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        root = inverse_root(A)
    A.copy_(with_condition(10, (4, 100, 100)))
    graph.replay()
    assert relative_error(root, exact(A, 2)) < 64 * ROUNDING


def test_a_registered_operator_is_what_it_says():
    from iternorm.linalg.roots import root_op

    torch.library.opcheck(root_op, (with_condition(10, (2, 20, 20)), 2))


def test_function_transforms_and_other_methods_take_no_kernels():
    A = with_condition(10, (3, 20, 20))
    mapped = torch.func.vmap(lambda a: inverse_root(a, 4))(A)
    for root in (mapped, inverse_root(A, 4, method="newton"), inverse_root(A, 4, method="eigh")):
        assert relative_error(root, exact(A, 4)) < 64 * ROUNDING
    double = inverse_root(A.double(), 4)
    assert double.dtype == torch.float64
    assert relative_error(double, exact(A, 4)) < 1e-12


def test_half_precision_and_sqrt_go_through_the_kernels():
    A = with_condition(10, (3, 40, 40))
    for dtype in (torch.float16, torch.bfloat16):
        half = A.to(dtype)
        assert relative_error(inverse_root(half), exact((half + half.mT) / 2, 2)) < 2 * torch.finfo(dtype).eps
    root = sqrt(A)
    assert relative_error(root @ root, A) < 100 * ROUNDING
