"""Gradients of the layer: exact in training and in eval, twice differentiable, and made of little saved memory."""

from typing import Any

import pytest
import torch
from checks import correlated, peak_bytes, relative_error
from torch.autograd import gradcheck, gradgradcheck

import iternorm
from iternorm import functional, reference

SOLVERS = ("newton", "zca", "pca", "cholesky")
SHAPES = {"2-D": (14, 5), "1d": (6, 5, 3), "2d": (4, 5, 2, 2), "3d": (2, 5, 2, 2, 2)}

# Second derivatives are checked along random directions (fast_mode), which takes a fifth of the time; each of them is
# compared with the reference's below.


def normalize(x, solver, **kwargs):
    if solver == "newton":
        return functional.iter_norm(x, training=True, **kwargs)
    return functional.decorrelated_batch_norm(x, training=True, solver=solver, **kwargs)


def affine_inputs(shape):
    x = correlated(*shape).requires_grad_()
    weight, bias = torch.randn(2, shape[1], dtype=torch.float64)
    return x, weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_training_gradients_are_exact_and_differentiable(shape, solver):
    def function(x, weight, bias):
        return normalize(x, solver, weight=weight, bias=bias, group_size=3, eps=1e-2)

    assert gradcheck(function, affine_inputs(shape))
    assert gradgradcheck(function, affine_inputs(shape), fast_mode=True)


@pytest.mark.parametrize("num_iters", [0, 1, 2, 5])
@pytest.mark.parametrize("channels_last", [False, True])
def test_newton_gradients_for_every_number_of_steps_and_memory_format(num_iters, channels_last):
    x = correlated(4, 5, 2, 3)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()

    def function(x):
        return functional.iter_norm(x, training=True, group_size=3, num_iters=num_iters)

    assert gradcheck(function, x)
    assert gradgradcheck(function, x, fast_mode=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["whitening", "covariance"])
def test_eval_gradients_are_exact_and_differentiable(shape, kind):
    mean, matrix = torch.randn(5, dtype=torch.float64), torch.eye(3, dtype=torch.float64).expand(2, 3, 3)

    def function(x, weight, bias):
        running: dict[str, Any] = {f"running_{kind}": matrix}
        return functional.iter_norm(x, mean, weight=weight, bias=bias, group_size=3, **running)

    assert gradcheck(function, affine_inputs(shape))
    assert gradgradcheck(function, affine_inputs(shape), fast_mode=True)


@pytest.mark.parametrize("solver", SOLVERS)
def test_only_what_is_asked_for_gets_a_gradient(solver):
    shape = (8, 5, 2, 2)
    x, weight, bias = affine_inputs(shape)
    grad = torch.randn(shape, dtype=torch.float64)
    full = torch.autograd.grad(normalize(x, solver, weight=weight, bias=bias, group_size=3), (x, weight, bias), grad)
    for index in range(3):
        inputs = [t.detach().requires_grad_(i == index) for i, t in enumerate((x, weight, bias))]
        y = normalize(inputs[0], solver, weight=inputs[1], bias=inputs[2], group_size=3)
        (alone,) = torch.autograd.grad(y, inputs[index], grad)
        torch.testing.assert_close(alone, full[index])


@pytest.mark.parametrize("solver", SOLVERS)
def test_backward_twice_with_retain_graph(solver):
    x, weight, bias = affine_inputs((8, 5, 2, 2))
    y = normalize(x, solver, weight=weight, bias=bias, group_size=3)
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
    third = torch.autograd.grad(y, (x, weight, bias), grad, create_graph=True)
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        # With a graph of the backward the forward is written out once more: the same numbers by another way.
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("solver", SOLVERS)
def test_second_gradients_equal_the_references(solver):
    results = []
    for function in (
        lambda *a: normalize(a[0], solver, weight=a[1], bias=a[2], group_size=3, eps=1e-3),
        lambda *a: normalize(a[0], solver, weight=a[1], bias=a[2], group_size=3, eps=1e-3, impl="reference"),
    ):
        torch.manual_seed(1)
        inputs = affine_inputs((8, 5, 2, 2))
        y = function(*inputs)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), inputs[0], create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), inputs, allow_unused=True))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_layers_backward_in_closed_form():
    # math.md, Eq. 21-24, written out for one group.
    x, grad = correlated(40, 4), torch.randn(40, 4, dtype=torch.float64)
    weight, bias = torch.randn(2, 4, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    functional.iter_norm(leaves[0], weight=leaves[1], bias=leaves[2], training=True).backward(grad)
    m, mean = len(x), x.mean(0)
    covariance = ((x - mean).T @ (x - mean) / m + 1e-5 * torch.eye(4)).requires_grad_()
    whitening = reference.newton(covariance, 5)
    s, S = grad.sum(0), grad.T @ (x - mean)
    (d_covariance,) = torch.autograd.grad(whitening, covariance, weight[:, None] * S)
    whitening = whitening.detach()
    A, B = weight[:, None] * whitening, (d_covariance + d_covariance.T) / m
    expected = grad @ A + x @ B.T + (-A.T @ s / m - B @ mean)
    torch.testing.assert_close(leaves[0].grad, expected)
    torch.testing.assert_close(leaves[1].grad, (S * whitening).sum(1))
    torch.testing.assert_close(leaves[2].grad, s)


def test_gradients_do_not_depend_on_the_memory_format_of_dy():
    x = correlated(6, 8, 4, 4)
    pooled = torch.randn(6, 8, 1, 1, dtype=torch.float64).expand(6, 8, 4, 4)
    for grad in (torch.randn(6, 8, 4, 4, dtype=torch.float64), pooled, torch.ones(()).double().expand(6, 8, 4, 4)):
        results = []
        for x_format in (torch.contiguous_format, torch.channels_last):
            for grad_format in (None, torch.contiguous_format, torch.channels_last):
                leaf = x.clone(memory_format=x_format).requires_grad_()
                given = grad if grad_format is None else grad.contiguous(memory_format=grad_format)
                functional.iter_norm(leaf, training=True, group_size=4).backward(given)
                assert leaf.grad.is_contiguous(memory_format=x_format)
                results.append(leaf.grad)
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_rounded_once(dtype):
    x, grad = correlated(32, 10, 5, 5, dtype=dtype), correlated(32, 10, 5, 5, dtype=dtype)
    results = []
    for compute in (dtype, torch.float64):
        leaf = x.to(compute, copy=True).requires_grad_()
        functional.iter_norm(leaf, training=True, group_size=4).backward(grad.to(compute))
        results.append(leaf.grad)
    assert results[0].dtype == dtype
    assert relative_error(*results) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_under_a_large_mean(channels_last):
    # What a mean of 1000 deviations costs in fp32 is of the order of rounding x itself, 6e-5 of a deviation. The
    # gradient for the weight is a sum over samples that cancels: it is measured against the sum without cancellation.
    x = torch.randn(64, 16, 24, 24) + 1000
    grad = torch.randn_like(x) + 1
    if channels_last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf, weight = x.to(dtype, copy=True).requires_grad_(), torch.ones(16, dtype=dtype, requires_grad=True)
        y = functional.iter_norm(leaf, weight=weight, training=True, group_size=16)
        y.backward(grad.to(dtype))
        results.append((leaf.grad, weight.grad, y.detach()))
    assert relative_error(results[0][0], results[1][0]) < 2e-4
    uncancelled = (grad.abs() * results[1][2].abs()).sum((0, 2, 3))
    assert ((results[0][1] - results[1][1]).abs() / uncancelled).max() < 2e-4


def saved_by(layer, x):
    """Sizes in elements of what the graph keeps, without the input and the parameters."""
    known = {t.data_ptr() for t in (x, *layer.parameters())}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    return sum(kept.values()), y


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [128, 160])
def test_saved_for_backward_are_the_input_and_small_matrices(channels, channels_last):
    x = torch.randn(32, channels, 16, 16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    layer = iternorm.IterNorm2d(channels)
    extra, _ = saved_by(layer, x)
    # The mean, the whitening matrices and the covariances, and the iterates that spare the backward their products.
    assert extra <= channels + (2 + 2 * (layer.num_iters - 1)) * layer.running_whitening.numel()
    layer = iternorm.DecorrelatedBatchNorm2d(channels)
    extra, _ = saved_by(layer, x)
    assert extra <= 2 * channels + 3 * layer.running_whitening.numel()


def test_iterates_are_not_kept_where_they_are_large_beside_the_activation():
    x = torch.randn(600, 256, requires_grad=True)
    layer = iternorm.IterNorm1d(256, group_size=None)
    extra, y = saved_by(layer, x)
    assert extra <= 256 + 2 * 256**2
    grad = torch.randn_like(y)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    (expected,) = torch.autograd.grad(
        reference.iter_norm(*inputs, group_size=None, num_iters=5), inputs[:1], grad.double()
    )
    assert relative_error(x.grad, expected) < 2e-6


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (64, 128, 32, 32), (32, 160, 32, 32)])
def test_peak_memory_above_input_output_and_gradients(shape, channels_last):
    x = torch.randn(shape)
    grad = torch.randn(shape)
    if channels_last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    x.requires_grad_()
    layer = iternorm.IterNorm2d(shape[1])

    def step():
        y = layer(x)
        y.backward(grad)
        return y

    activation = x.numel() * x.element_size()
    # The output and the gradient for x are allocated in the call.
    assert peak_bytes(step) - 2 * activation < 0.2 * activation
