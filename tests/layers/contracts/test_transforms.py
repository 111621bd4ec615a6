"""Function transforms in training: torch.func, forward-mode differentiation, batched gradients."""

from typing import Any

import pytest
import torch
from checks import correlated, covariance_with
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from iternorm import DecorrelatedBatchNorm1d, IterNorm1d, IterNorm2d, IterNorm3d, functional, solvers

IMPLS = ("auto", "torch", "native", "reference")
LAYERS = {
    "newton": lambda **words: IterNorm1d(5, group_size=3, **words),
    "zca": lambda **words: DecorrelatedBatchNorm1d(5, group_size=3, solver="zca", **words),
    "pca": lambda **words: DecorrelatedBatchNorm1d(5, group_size=3, solver="pca", running="covariance", **words),
    "cholesky": lambda **words: DecorrelatedBatchNorm1d(5, group_size=3, solver="cholesky", **words),
}
CASES = [(solver, "auto") for solver in LAYERS] + [("newton", impl) for impl in IMPLS[1:]] + [("zca", "reference")]


@pytest.fixture(params=CASES, ids="-".join)
def layer(request):
    solver, impl = request.param
    made = LAYERS[solver](impl=impl, dtype=torch.float64)
    with torch.no_grad():
        made.weight.uniform_(0.5, 1.5)
        made.bias.normal_()
    return made


def state(layer):
    return dict(layer.named_parameters()), {name: buffer.clone() for name, buffer in layer.named_buffers()}


def loss_of(layer):
    def loss(parameters, buffers, x):
        return functional_call(layer, (parameters, buffers), (x,)).sin().sum()

    return loss


def backward_of(layer, x):
    """Gradients for the parameters and x by a plain backward, and the buffers after the step."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    layer(leaf).sin().sum().backward()
    return {n: p.grad.clone() for n, p in layer.named_parameters()}, leaf.grad, dict(layer.named_buffers())


def test_grad_is_backward_and_updates_the_buffers(layer):
    x = correlated(16, 5)
    parameters, buffers = state(layer)
    for_parameters, for_x = grad(loss_of(layer), (0, 2))(parameters, buffers, x)
    expected_parameters, expected_x, expected_buffers = backward_of(layer, x)
    torch.testing.assert_close(for_parameters, expected_parameters)
    torch.testing.assert_close(for_x, expected_x)
    torch.testing.assert_close(buffers, expected_buffers)


def test_jvp_is_the_transpose_of_vjp(layer):
    x, tangent, cotangent = correlated(16, 5), torch.randn(16, 5).double(), torch.randn(16, 5).double()
    layer.track_running_stats = False
    output, pushed, *_ = jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(output, layer(x))
    pulled = vjp(layer, x)[1](cotangent)[0]
    torch.testing.assert_close((pushed * cotangent).sum(), (pulled * tangent).sum())


def test_forward_mode_is_a_finite_difference_and_leaves_plain_buffers(layer):
    x, tangent = correlated(16, 5), torch.randn(16, 5).double()
    with forward_ad.dual_level():
        pushed = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        assert all(forward_ad.unpack_dual(buffer).tangent is None for buffer in layer.buffers())
    assert layer.num_batches_tracked == 1
    step = 1e-6
    with torch.no_grad():
        expected = (layer(x + step * tangent) - layer(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(pushed, expected, rtol=1e-5, atol=1e-7)


def test_jacobians_agree(layer):
    x = correlated(8, 5)
    layer.track_running_stats = False
    reverse = jacrev(layer)(x)
    torch.testing.assert_close(jacfwd(layer)(x), reverse)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x), reverse)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x, vectorize=True), reverse)


def test_batched_gradients_are_each_gradient(layer):
    leaf = correlated(8, 5).requires_grad_()
    y = layer(leaf)
    cotangents = torch.randn(3, 8, 5).double()
    inputs = (leaf, layer.weight, layer.bias)
    batched = torch.autograd.grad(y, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, inputs, c, retain_graph=True) for c in cotangents]
    for actual, expected in zip(batched, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected))


@pytest.mark.parametrize("solver", ["newton", "zca", "cholesky"])
def test_batched_gradients_of_gradients(solver):
    layer = LAYERS[solver](track_running_stats=False, dtype=torch.float64)
    inputs = (correlated(8, 5).requires_grad_(), layer.weight, layer.bias)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x).sin(), inputs, check_batched_grad=True)


def test_an_ensemble_is_each_of_its_layers(layer):
    layers = [LAYERS[layer.solver](impl=layer.impl, dtype=torch.float64) for _ in range(3)]
    for one in layers:
        nn.init.normal_(one.weight)
    parameters, buffers = stack_module_state(layers)
    x = torch.stack([correlated(16, 5) for _ in layers])
    gradients = vmap(grad(loss_of(layers[0])))(parameters, buffers, x)
    for i, one in enumerate(layers):
        expected, _, expected_buffers = backward_of(one, x[i])
        torch.testing.assert_close({name: g[i] for name, g in gradients.items()}, expected)
        torch.testing.assert_close({name: b[i] for name, b in buffers.items()}, expected_buffers)


def test_gradients_through_an_ensemble_update_its_buffers():
    layers = [IterNorm1d(5, group_size=3, momentum=None, dtype=torch.float64) for _ in range(2)]
    parameters, buffers = stack_module_state(layers)
    x = torch.stack([correlated(16, 5) for _ in layers])

    def loss(parameters, buffers, x):
        return vmap(loss_of(layers[0]))(parameters, buffers, x).sum()

    gradients = grad(loss)(parameters, buffers, x)
    for i, one in enumerate(layers):
        expected, _, expected_buffers = backward_of(one, x[i])
        torch.testing.assert_close({name: g[i] for name, g in gradients.items()}, expected)
        torch.testing.assert_close({name: b[i] for name, b in buffers.items()}, expected_buffers)


def test_vmap_with_one_set_of_running_statistics_is_refused():
    layer = IterNorm1d(5)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        vmap(layer)(torch.randn(3, 8, 5))
    torch.testing.assert_close(dict(layer.state_dict()), before)


def test_vmap_without_running_statistics_is_each_batch():
    layer = IterNorm2d(6, group_size=4, track_running_stats=False, activation="relu", dtype=torch.float64)
    x = torch.stack([correlated(4, 6, 3, 3) for _ in range(3)])
    torch.testing.assert_close(vmap(layer)(x), torch.stack([layer(each) for each in x]))


def test_vmap_in_eval_maps_inputs():
    layer = IterNorm2d(6, group_size=4, dtype=torch.float64)
    layer(correlated(4, 6, 3, 3))
    x = torch.randn(3, 4, 6, 3, 3).double()
    torch.testing.assert_close(vmap(layer.eval())(x), layer(x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_vmap_asks_no_memory_format(impl, training, channels):
    # What vmap hands out after a convolution is contiguous in no order, and cannot be asked for channels_last.
    layer = IterNorm3d(4, group_size=3, impl=impl, dtype=torch.float64)
    layer(correlated(16, 4, 2, 2, 2))
    layer.track_running_stats = False
    layer.train(training)
    x = correlated(6, 4, 3, 2, 2, 2)
    x = x.movedim(2, 0) if channels == "first" else x.movedim(2, 0).movedim(2, -1).contiguous().movedim(-1, 2)
    torch.testing.assert_close(vmap(layer)(x), torch.stack([layer(each.contiguous()) for each in x]))


@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_forward_mode_reaches_running_statistics_in_eval(running):
    # BatchNorm raises here.
    x, mean, matrix = correlated(6, 4), torch.randn(4).double(), covariance_with(torch.rand(4).double() + 0.5)[None]

    def function(x, mean, matrix):
        return functional.iter_norm(x, mean, **{f"running_{running}": matrix})

    symmetric = torch.rand(1, 4, 4).double()
    tangents = torch.rand(6, 4).double(), torch.rand(4).double(), symmetric + symmetric.mT
    pushed = jvp(function, (x, mean, matrix), tangents)[1]
    ahead, behind = (
        function(*(t + step * d for t, d in zip((x, mean, matrix), tangents, strict=True))) for step in (1e-6, -1e-6)
    )
    torch.testing.assert_close(pushed, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("solver", ["newton", "zca", "cholesky"])
def test_hessian_is_symmetric_and_that_of_double_backward(solver):
    solve = {"newton": lambda c: solvers.newton(c, 4), "zca": solvers.zca, "cholesky": solvers.cholesky}[solver]
    base = covariance_with(torch.tensor([1.0, 1.0, 3.0, 0.2], dtype=torch.float64))
    weights = torch.randn(4, 4).double()

    def function(direction):
        # Repeated eigenvalues at the base, where a derivative that divides by their difference is NaN.
        return (solve(base + direction + direction.mT) * weights).sum().sin()

    zero = torch.zeros(4, 4).double()
    expected: Any = torch.autograd.functional.hessian(function, zero)
    assert expected.isfinite().all()
    torch.testing.assert_close(hessian(function)(zero), expected)
    torch.testing.assert_close(jacrev(jacrev(function))(zero), expected)


def test_compiled_transforms_are_the_eager_ones():
    layer = IterNorm1d(5, group_size=3, track_running_stats=False)
    x = correlated(16, 5, dtype=torch.float32)

    def loss(x):
        return layer(x).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: grad(loss)(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), grad(loss)(x))


def test_the_functions_transform_too():
    x = correlated(12, 4)
    pushed = jvp(lambda x: functional.iter_norm(x, training=True, group_size=2, eps=1e-12), (x,), (x,))[1]
    # Whitening does not see the scale of its input, but for eps.
    assert pushed.abs().max() < 1e-9
