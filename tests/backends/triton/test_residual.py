"""Residuals in the Triton kernels, in Triton's interpreter: added and masked in passing, exactly."""

import pytest
import torch
from checks import correlated, relative_error

from iternorm import IterNorm1d, IterNorm2d, reference

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_residual.py", allow_module_level=True)

from iternorm.whitening import fused

# Shape, group size, channels_last: one tile, a ragged group, more channels than one program iterates, wide groups.
CASES = [
    ((6, 7, 3, 4), 3, False),
    ((6, 7, 3, 4), 4, True),
    ((20, 72), 72, False),
    pytest.param((3, 132, 2, 3), 130, True, marks=pytest.mark.rare),
    pytest.param((2, 132, 8, 8), 130, False, marks=pytest.mark.rare),
]


def in_format(x, last):
    return x.to(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("shape", "group_size", "last"), CASES)
def test_output_and_all_gradients_against_fp64(shape, group_size, last, activation):
    torch.manual_seed(0)
    x, z, grad = (in_format(t, last) for t in (correlated(*shape), torch.randn(shape), torch.randn(shape).double()))
    make = IterNorm1d if len(shape) == 2 else IterNorm2d
    layer = make(shape[1], group_size=group_size, num_iters=2, activation=activation, impl="triton")
    weight, bias = layer.parameters()
    torch.nn.init.uniform_(weight)
    exact = [t.detach().double().requires_grad_() for t in (x, z, weight, bias)]
    whitened = reference.whiten(exact[0], lambda c: reference.newton(c, 2), group_size, layer.eps)[0]
    expected = reference.scale_and_shift(whitened, *exact[2:]) + exact[1]
    if activation:
        expected = expected.relu()
    inputs = (x.float().requires_grad_(), z.float().requires_grad_(), weight, bias)
    y = layer(inputs[0], residual=inputs[1])
    assert y.stride() == x.stride()
    assert relative_error(y, expected) < 1e-5
    found = torch.autograd.grad(y, inputs, grad.float())
    wanted = torch.autograd.grad(expected, exact, grad)
    # A sign that rounding decides differently would show as an error of the size of an entry.
    for name, one, other in zip(("x", "residual", "weight", "bias"), found, wanted, strict=True):
        assert relative_error(one, other) < 1e-5, name


@pytest.mark.parametrize("training", [True, False])
def test_a_residual_in_another_memory_format_is_copied(training):
    layer = IterNorm2d(6, group_size=3, activation="relu", impl="triton").train(training)
    x, z = torch.randn(2, 5, 6, 4, 3).unbind()
    with torch.no_grad():
        expected = layer(x, residual=z)
        assert torch.equal(layer(x, residual=in_format(z, True)), expected)
        strided = torch.empty(5, 6, 4, 6)[..., ::2].copy_(z)
        assert torch.equal(layer(x, residual=strided), expected)


@pytest.mark.parametrize(("channels", "group_size"), [(6, 4), pytest.param(130, 130, marks=pytest.mark.rare)])
def test_a_gradient_in_two_parts_is_added_up(channels, group_size):
    x, steps = torch.randn(4, channels, 2, 2), 2 if group_size == 4 else 1
    added = (x.cos(), None, None, None, None, False)
    y, state = fused.forward_op(x, None, None, *added, group_size, steps, 1e-5, False, True)
    first, second = torch.randn(2, *x.shape).unbind()
    settings = (x, None, state, y, group_size, steps, 1e-5, False, True, True)
    together = fused.backward_op(first + second, None, *settings)
    apart = fused.backward_op(first, second, *settings)
    for one, other in zip(apart, together, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(apart[3], torch.where(y > 0, first + second, 0))
