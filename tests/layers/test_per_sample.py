"""Group whitening and instance whitening: each sample by itself, in the terms of the operation and of the paper."""

import pytest
import torch
from checks import correlated, relative_error
from torch import nn

import iternorm
from iternorm.functional import group_whitening, instance_whitening

SOLVERS = ("newton", "zca", "pca", "cholesky")


def group_paper(x, num_groups, num_iters, eps=0.0):
    """Huang et al., CVPR 2021, Eq. 6-8 with the Newton iteration, sample by sample."""
    result = []
    for sample in x:
        rows = sample.reshape(num_groups, -1)
        centered = rows - rows.mean(1, keepdim=True)
        identity = torch.eye(num_groups, dtype=x.dtype)
        covariance = centered @ centered.T / rows.shape[1] + eps * identity
        normalized = covariance / covariance.trace()
        root = identity
        for _ in range(num_iters):
            root = 1.5 * root - 0.5 * torch.linalg.matrix_power(root, 3) @ normalized
        result.append((root @ centered / covariance.trace().sqrt()).reshape(sample.shape))
    return torch.stack(result)


@pytest.mark.parametrize("shape", [(3, 12), (3, 12, 5), (3, 12, 4, 3), (2, 12, 2, 3, 2)])
@pytest.mark.parametrize("num_groups", [1, 3, 6])
def test_group_whitening_is_the_papers(shape, num_groups):
    x = correlated(*shape).requires_grad_()
    y, expected = group_whitening(x, num_groups, eps=1e-8), group_paper(x, num_groups, 5, 1e-8)
    assert relative_error(y, expected) < 1e-12
    grad = torch.randn_like(y)
    (ours,), (theirs,) = (torch.autograd.grad(t, x, grad) for t in (y, expected))
    assert relative_error(ours, theirs) < 1e-11


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("group_size", [4, 5, None])
def test_instance_whitening_is_the_batch_norm_of_each_sample_alone(solver, group_size):
    x = correlated(3, 12, 6, 5)
    weight, bias = torch.randn(2, 12, dtype=torch.float64)
    y = instance_whitening(x, weight, bias, group_size=group_size, solver=solver, activation="relu")
    words = {"weight": weight, "bias": bias, "training": True, "group_size": group_size, "activation": "relu"}
    for sample, result in zip(x.split(1), y.split(1), strict=True):
        if solver == "newton":
            alone = iternorm.functional.iter_norm(sample, **words)
        else:
            alone = iternorm.functional.decorrelated_batch_norm(sample, solver=solver, **words)
        torch.testing.assert_close(result, alone)


def test_one_channel_a_group_is_instance_whitening():
    x = correlated(3, 8, 5, 5)
    torch.testing.assert_close(group_whitening(x, 8), instance_whitening(x, group_size=None))


def test_group_size_one_is_instance_norm():
    x = correlated(3, 8, 5, 5)
    torch.testing.assert_close(instance_whitening(x, group_size=1), nn.functional.instance_norm(x))


def test_one_group_is_group_norm_with_one_group():
    x = correlated(3, 8, 5, 5)
    torch.testing.assert_close(group_whitening(x, 1), nn.functional.group_norm(x, 1))


LAYERS = {
    "group1d": (lambda **w: iternorm.GroupWhitening1d(12, num_groups=3, **w), (4, 12, 7)),
    "group1d flat": (lambda **w: iternorm.GroupWhitening1d(12, num_groups=3, **w), (4, 12)),
    "group2d": (lambda **w: iternorm.GroupWhitening2d(12, num_groups=4, **w), (4, 12, 4, 3)),
    "group3d": (lambda **w: iternorm.GroupWhitening3d(12, num_groups=4, **w), (4, 12, 2, 4, 3)),
    "instance1d": (lambda **w: iternorm.InstanceWhitening1d(12, group_size=5, **w), (4, 12, 30)),
    "instance2d": (lambda **w: iternorm.InstanceWhitening2d(12, group_size=6, **w), (4, 12, 6, 7)),
    "instance3d": (lambda **w: iternorm.InstanceWhitening3d(12, group_size=5, **w), (4, 12, 3, 4, 3)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    return LAYERS[request.param]


def randomized(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def test_training_and_eval_are_the_same_and_samples_do_not_meet(case):
    make, shape = case
    layer, x = randomized(make(dtype=torch.float64)), correlated(*shape)
    y = layer(x)
    assert y.shape == x.shape
    torch.testing.assert_close(layer.eval()(x), y, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[:1]), y[:1])
    assert not list(layer.buffers())


@pytest.mark.parametrize("solver", ["newton", "zca", "cholesky"])
def test_gradients_are_exact(case, solver):
    make, shape = case
    layer, x = randomized(make(dtype=torch.float64, solver=solver, eps=1e-2)), correlated(2, *shape[1:])
    parameters = dict(layer.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), x)

    inputs = [t.detach().requires_grad_() for t in (x, *parameters.values())]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_dtype_and_memory_format(case, dtype, channels_last):
    make, shape = case
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = channels_last and len(shape) in formats
    layer, x = randomized(make()), correlated(*shape).to(dtype)
    expected = randomized(make(dtype=torch.float64))
    expected.load_state_dict(layer.state_dict())
    if channels_last:
        x = x.contiguous(memory_format=formats[len(shape)])
    y = layer(x)
    assert y.dtype == dtype
    assert not channels_last or y.is_contiguous(memory_format=formats[len(shape)])
    # The scale of a group's output is a rounding of its own in half precision.
    assert relative_error(y, expected(x.double())) < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("words", [{"affine": False}, {"bias": False}, {"activation": "relu"}])
def test_batch_norms_arguments(case, words):
    make, shape = case
    layer = randomized(make(**words))
    assert (layer.weight is None, layer.bias is None) == ("affine" in words, "activation" not in words)
    x = correlated(*shape).float()
    y = layer(x)
    layer.activation = None
    torch.testing.assert_close(y, layer(x).relu() if "activation" in words else layer(x))
    layer.activation = words.get("activation")
    assert all(f"{name}={value!r}" in repr(layer) for name, value in words.items())


@pytest.mark.parametrize("name", ["group2d", "instance1d"])
def test_it_compiles_and_exports(name):
    make, shape = LAYERS[name]
    layer, x = randomized(make(dtype=torch.float64, eps=0.1, activation="relu")), correlated(*shape)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    # torch 2.6 on Python 3.13 refuses a batch without an upper bound if the last group is smaller (docs/deploying.md).
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({0: batch},))
    other = correlated(7, *shape[1:])
    torch.testing.assert_close(program.module()(other), layer(other))
    assert "iternorm" not in str(program.graph)


def test_it_is_one_node_of_a_traced_graph(case):
    make, shape = case
    model = nn.Sequential(make(), nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    x = correlated(*shape).float()
    torch.testing.assert_close(graph(x), model(x))


def test_functions_are_traced_and_mapped():
    x = correlated(3, 8, 4, 4)
    graph = torch.fx.symbolic_trace(lambda x: group_whitening(x, 4) + instance_whitening(x))
    torch.testing.assert_close(graph(x), group_whitening(x, 4) + instance_whitening(x))
    batches = correlated(6, 8, 4, 4).view(2, 3, 8, 4, 4)
    mapped = torch.func.vmap(lambda x: group_whitening(x, 4))(batches)
    torch.testing.assert_close(mapped[1], group_whitening(batches[1], 4))


def test_a_constant_sample_is_zero_and_an_empty_batch_empty(case):
    make, shape = case
    layer = make()
    x = correlated(*shape).float()
    x[1] = 3
    x.requires_grad_()
    y = layer(x)
    assert y.isfinite().all()
    assert y[1].abs().max() < 1e-3
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    empty = x.detach()[:0].requires_grad_()
    layer(empty).sum().backward()
    assert layer(empty).shape == (0, *shape[1:])


def test_the_authors_checkpoints_load():
    state = {"weight": torch.randn(1, 12, 1, 1), "bias": torch.randn(1, 12, 1, 1)}
    layer = iternorm.GroupWhitening2d(12, num_groups=4)
    layer.load_state_dict(state)
    torch.testing.assert_close(layer.weight.detach(), state["weight"].flatten())


BAD = [
    (
        lambda: iternorm.GroupWhitening2d(12, num_groups=5),
        ValueError,
        "num_groups=5 must divide the number of channels, 12",
    ),
    (lambda: iternorm.GroupWhitening2d(12, num_groups=2.0), TypeError, "num_groups=2.0 is not an integer"),  # pyright: ignore[reportArgumentType]
    (lambda: iternorm.GroupWhitening2d(0), ValueError, "num_features=0 must be at least 1"),
    (lambda: iternorm.InstanceWhitening2d(4, group_size=0), ValueError, "group_size=0 must be at least 1"),
    (lambda: iternorm.InstanceWhitening2d(4, solver="svd"), ValueError, "solver='svd' is not known"),
    (lambda: iternorm.InstanceWhitening2d(4, activation="gelu"), ValueError, "activation='gelu' is not known"),
    (lambda: iternorm.InstanceWhitening2d(4, impl="cuda"), ValueError, "impl='cuda' is not known"),
    (lambda: iternorm.InstanceWhitening2d(4)(torch.randn(2, 4, 3)), ValueError, "expected 4D input"),
    (lambda: iternorm.InstanceWhitening2d(4)(torch.randn(2, 5, 3, 3)), ValueError, "expected an input of 4 channels"),
    (lambda: iternorm.InstanceWhitening1d(4)(torch.randn(2, 4)), ValueError, "only one value per channel"),
    (
        lambda: iternorm.GroupWhitening1d(4, num_groups=4)(torch.randn(2, 4)),
        ValueError,
        "only one value in each",
    ),
    (lambda: iternorm.GroupWhitening2d(4, num_groups=2)(torch.ones(2, 4, 3, 3).int()), TypeError, "dtype torch.int32"),
    (lambda: group_whitening(torch.randn(2, 4, 3), 2, torch.ones(3)), ValueError, r"weight has shape \[3\]"),
    (lambda: group_whitening(torch.randn(2, 4, 3), 3), ValueError, "num_groups=3 must divide"),
    (lambda: torch.jit.script(iternorm.InstanceWhitening2d(4)), TypeError, "torch.jit.script cannot compile Instance"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
