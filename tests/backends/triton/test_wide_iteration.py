"""The iteration above 64 channels on float16 matrices, in Triton's interpreter: against the solver in fp64."""

import pytest
import torch
from checks import correlated, relative_error, worst

from iternorm import IterNorm2d, reference, solvers

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

from iternorm.backends.triton import plan, precision, tiling
from iternorm.backends.triton.launches import iteration


@pytest.fixture(params=[False, True], ids=["apart", "joined"])
def in_half(request, monkeypatch):
    """Products of float16, as where TF32 is allowed; S and Z are computed apart or in one pass.

    Small matrices are in tiles of 16, to have several, and those from 64 rows on as on a GPU.
    """

    def blocks_for(size, precision):
        return tiling.Blocks(*((16, 32) if size < 64 else (32, 64)), 2, 4, request.param)

    monkeypatch.setattr(tiling, "blocks_for", blocks_for)
    for module in (iteration, plan):
        monkeypatch.setattr(module, "matrix_precision", lambda split, num_iters: precision.HALF)
    monkeypatch.setattr(plan, "_plans", {})
    iteration._chain_for.cache_clear()
    yield
    iteration._chain_for.cache_clear()


def solved(covariance, grad, num_iters):
    """The whitening matrices and the gradient for the covariances: by the kernels, and of the solver in fp64."""
    covariance.requires_grad_()
    expected = solvers.newton(covariance, num_iters)
    (wanted,) = torch.autograd.grad(expected, covariance, grad)
    single = covariance.detach().float()
    whitening, kept = iteration.solve(single, num_iters)
    found = iteration.solve_backward(grad.float(), single, whitening, kept, num_iters)
    return (whitening, found), (expected.detach(), (wanted + wanted.mT) / 2)


def covariances(count, size):
    factors = torch.randn(count, size, 4 * size, dtype=torch.float64)
    return factors @ factors.mT / (4 * size)


@pytest.mark.parametrize(
    ("count", "size", "num_iters", "magnitude"),
    [
        (2, 20, 5, 1.0),
        (1, 32, 2, 1e-30),
        (1, 17, 4, 1e25),
        pytest.param(1, 33, 7, 1.0, marks=pytest.mark.rare),
        pytest.param(1, 64, 12, 1.0, marks=pytest.mark.rare),
    ],
)
def test_float16_leaves_what_tf32_leaves(count, size, num_iters, magnitude, in_half, poisoned_memory):
    grad = magnitude * torch.randn(count, size, size, dtype=torch.float64)
    found, expected = solved(covariances(count, size), grad, num_iters)
    # A float16 has eleven bits, and twelve steps enlarge what it drops.
    budget = 3e-4 if num_iters < 8 else 5e-3
    assert relative_error(found[0], expected[0]) < budget
    assert relative_error(found[1].double() / magnitude, expected[1] / magnitude) < budget
    # It is float16 that was tested.
    assert relative_error(found[0], expected[0]) > 1e-6
    for matrix in found:
        assert torch.equal(matrix, matrix.mT)


def test_each_group_has_its_own_scale(in_half, poisoned_memory):
    grad = torch.randn(2, 20, 20, dtype=torch.float64) * torch.tensor([1e-12, 1e12])[:, None, None]
    found, expected = solved(covariances(2, 20), grad, 3)
    assert worst(relative_error(a, b) for a, b in zip(found[1], expected[1], strict=True)) < 3e-4


def test_a_small_channel_beside_a_large_one_is_as_exact(in_half, poisoned_memory):
    size = torch.ones(20, dtype=torch.float64).index_fill(0, torch.arange(0, 20, 2), 1e-6)
    found, expected = solved(covariances(1, 20) * size * size[:, None], torch.randn(1, 20, 20).double(), 3)
    # What small channels take of the large ones.
    assert relative_error(found[0][0, ::2, 1::2], expected[0][0, ::2, 1::2]) < 3e-4


def test_a_gradient_of_zeros_is_zero(in_half):
    found, _ = solved(covariances(1, 20), torch.zeros(1, 20, 20, dtype=torch.float64), 3)
    assert not found[1].any()


@pytest.mark.rare
@pytest.mark.parametrize(("shape", "group_size", "num_iters"), [((3, 100, 5, 5), 72, 3), ((2, 130, 5, 5), 130, 2)])
def test_a_layer_in_float16_equals_the_reference(shape, group_size, num_iters, in_half, poisoned_memory):
    layer = IterNorm2d(shape[1], group_size=group_size, num_iters=num_iters, impl="triton")
    weight, bias = layer.weight, layer.bias
    assert weight is not None
    assert bias is not None
    torch.nn.init.uniform_(weight, 0.5, 1.5)
    x = correlated(*shape, dtype=torch.float32).requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = reference.iter_norm(*inputs, group_size=group_size, num_iters=num_iters)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    found = (y, x.grad, weight.grad, bias.grad)
    assert worst(relative_error(a, b) for a, b in zip(found, (expected, *wanted), strict=True)) < 3e-4
