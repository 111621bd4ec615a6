"""The layers keep BatchNorm's contract, and whiten."""

import copy
import inspect
from typing import Any

import pytest
import torch
from checks import assert_same_state, correlated, covariance_of, relative_error, state_of
from torch import nn

import iternorm
from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, reference
from iternorm.whitening import groups

LAYERS = [
    (iternorm.IterNorm1d, nn.BatchNorm1d, (9,)),
    (iternorm.IterNorm2d, nn.BatchNorm2d, (3, 3)),
    (iternorm.IterNorm3d, nn.BatchNorm3d, (2, 3, 2)),
    (iternorm.DecorrelatedBatchNorm1d, nn.BatchNorm1d, (9,)),
    (iternorm.DecorrelatedBatchNorm2d, nn.BatchNorm2d, (3, 3)),
    (iternorm.DecorrelatedBatchNorm3d, nn.BatchNorm3d, (2, 3, 2)),
]
SOLVERS = ("newton", "zca", "pca", "cholesky")


def layer_2d(solver, *args, **kwargs):
    if solver == "newton":
        return IterNorm2d(*args, **kwargs)
    return DecorrelatedBatchNorm2d(*args, solver=solver, **kwargs)


def train_pair(layer, batch_norm, x, grad):
    """The output and gradients of two layers with the same affine parameters."""
    results = []
    for module in (layer, batch_norm):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        results.append((y.detach(), leaf.grad, module.weight.grad, module.bias.grad))
    return results


@pytest.mark.parametrize("num_iters", [0, 1, 5])
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_size_one_equals_batch_norm(num_iters, channels_last):
    x, grad = correlated(8, 6, 5, 5), correlated(8, 6, 5, 5)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    layer = IterNorm2d(6, group_size=1, num_iters=num_iters, dtype=torch.float64)
    batch_norm = nn.BatchNorm2d(6, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight", "bias"):
            value = torch.randn(6, dtype=torch.float64)
            getattr(layer, name).copy_(value)
            getattr(batch_norm, name).copy_(value)
    for actual, expected in zip(*train_pair(layer, batch_norm, x, grad), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(layer.running_mean, batch_norm.running_mean)
    assert layer.num_batches_tracked == batch_norm.num_batches_tracked == 1
    # The paper averages 1/σ of the biased variance, from 1; BatchNorm averages the unbiased variance.
    deviation = (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(layer.running_whitening, (0.9 + 0.1 * deviation)[:, None, None])


@pytest.mark.parametrize("solver", ["zca", "pca", "cholesky"])
def test_group_size_one_equals_batch_norm_for_exact_solvers(solver):
    x, grad = correlated(8, 6, 5, 5), correlated(8, 6, 5, 5)
    layer = DecorrelatedBatchNorm2d(6, group_size=1, solver=solver, dtype=torch.float64)
    for actual, expected in zip(*train_pair(layer, nn.BatchNorm2d(6).double(), x, grad), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("running", "share"), [("whitening", 5 / 4), ("covariance", 1 / 2)])
def test_group_size_one_in_eval_differs_from_batch_norm_as_the_documents_say(running, share):
    num_samples = 64
    layer = IterNorm1d(256, momentum=None, group_size=1, running=running, dtype=torch.float64)
    batch_norm = nn.BatchNorm1d(256, momentum=None, dtype=torch.float64)
    for _ in range(100):
        x = torch.randn(num_samples, 256, dtype=torch.float64)
        layer(x)
        batch_norm(x)
    ratio = layer.whitening_matrix().flatten() * (batch_norm.running_var + batch_norm.eps).sqrt()
    # The formula is of first order: 2.01 % where it says 1.95 %, and 0.79 % for 0.78 %.
    assert float(ratio.mean() - 1) == pytest.approx(share / num_samples, rel=0.1)


@pytest.mark.parametrize(("kind", "batch_norm", "shape"), LAYERS)
def test_arguments_begin_as_batch_norms_do(kind, batch_norm, shape):
    ours = list(inspect.signature(kind).parameters.values())
    theirs = list(inspect.signature(batch_norm).parameters.values())
    positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    # torch 2.13 has added a `bias` of its own after the arguments that every version has.
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs[: len(positional)]]
    assert {"group_size", "running", "impl"} <= {p.name for p in ours if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(("kind", "batch_norm", "shape"), LAYERS)
@pytest.mark.parametrize("group_size", [1, 3, 4, None])
def test_ragged_groups_equal_separate_layers(kind, batch_norm, shape, group_size):
    x, grad = correlated(16, 10, *shape), correlated(16, 10, *shape)
    layer = kind(10, group_size=group_size, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    later = layer.eval()(x)
    start = 0
    for index in range(groups.num_groups(10, group_size)):
        size = min(group_size or 10, 10 - start)
        own = slice(start, start + size)
        separate = kind(size, group_size=None, dtype=torch.float64)
        with torch.no_grad():
            separate.weight.copy_(layer.weight[own])
            separate.bias.copy_(layer.bias[own])
        part = x[:, own].clone().requires_grad_()
        expected = separate(part)
        expected.backward(grad[:, own])
        torch.testing.assert_close(y[:, own], expected)
        torch.testing.assert_close(leaf.grad[:, own], part.grad)
        torch.testing.assert_close(layer.weight.grad[own], separate.weight.grad)
        torch.testing.assert_close(layer.bias.grad[own], separate.bias.grad)
        torch.testing.assert_close(layer.running_mean[own], separate.running_mean)
        torch.testing.assert_close(layer.running_whitening[index, :size, :size], separate.running_whitening[0])
        torch.testing.assert_close(later[:, own], separate.eval()(part))
        # What a smaller last group leaves free stays zero.
        assert layer.running_whitening[index, size:].count_nonzero() == 0
        start += size
    assert start == 10


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_eval_uses_the_running_statistics(solver, running):
    layer = layer_2d(solver, 10, momentum=1.0, group_size=4, running=running, dtype=torch.float64)
    x = correlated(32, 10, 3, 3)
    trained = layer(x)
    # With momentum 1 the running statistics are those of the last batch, and eval repeats training.
    torch.testing.assert_close(layer.eval()(x), trained)
    other = correlated(4, 10, 3, 3)
    whitening = layer.whitening_matrix()
    blocks = torch.block_diag(whitening[0], whitening[1], whitening[2, :2, :2])
    expected = torch.einsum("ij,njhw->nihw", blocks, other - layer.running_mean[:, None, None])
    torch.testing.assert_close(layer(other), expected)


@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize("kind", [IterNorm2d, DecorrelatedBatchNorm2d])
def test_no_momentum_is_the_plain_average(running, kind):
    layer = kind(6, momentum=None, group_size=4, running=running, dtype=torch.float64)
    means, matrices = [], []
    for step in range(4):
        x = (step + 1) * correlated(16, 6, 3, 3)
        layer(x)
        once = kind(6, momentum=1.0, group_size=4, running=running, dtype=torch.float64)
        once(x)
        means.append(once.running_mean)
        matrices.append(once.running_matrix)
        assert layer.num_batches_tracked == step + 1
        torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))
        torch.testing.assert_close(layer.running_matrix, torch.stack(matrices).mean(0))


def test_running_covariance_is_that_of_the_data_and_is_whitened_in_eval():
    layer = IterNorm2d(6, momentum=0.25, group_size=None, running="covariance", num_iters=7, dtype=torch.float64)
    assert layer.running_whitening is None
    x = correlated(16, 6, 3, 3)
    layer(x)
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(layer.running_covariance[0], 0.75 * identity + 0.25 * covariance_of(x))
    expected = reference.newton(layer.running_covariance + layer.eps * identity, 7)
    torch.testing.assert_close(layer.whitening_matrix(), expected)


@pytest.mark.parametrize("kind", [IterNorm2d, DecorrelatedBatchNorm2d])
def test_without_running_statistics_eval_uses_the_batch(kind):
    layer = kind(6, track_running_stats=False, group_size=4)
    assert layer.running_mean is None
    assert layer.running_whitening is None
    assert layer.num_batches_tracked is None
    x = correlated(8, 6, 3, 3, dtype=torch.float32)
    torch.testing.assert_close(layer.eval()(x), layer.train()(x))
    layer.reset_running_stats()
    with pytest.raises(ValueError, match="track_running_stats=True"):
        layer.whitening_matrix()


def test_tracking_switched_off_later_is_as_in_batch_norm():
    # BatchNorm then leaves its statistics alone in training and goes on using them in eval.
    layer = IterNorm2d(4)
    x = correlated(8, 4, 3, 3, dtype=torch.float32)
    layer(x)
    layer.track_running_stats = False
    before = state_of(layer)
    layer(x)
    assert_same_state(layer, before)
    centred = x - before["running_mean"][:, None, None]
    expected = torch.einsum("ij,njhw->nihw", before["running_whitening"][0], centred)
    torch.testing.assert_close(layer.eval()(x), expected)


def test_the_plain_average_without_a_counter_is_as_in_batch_norm():
    # BatchNorm then leaves its statistics alone.
    for layer in (IterNorm2d(4, momentum=None), nn.BatchNorm2d(4, momentum=None)):
        layer.num_batches_tracked = None
        layer(correlated(8, 4, 3, 3, dtype=torch.float32) + 1)
        assert not layer.running_mean.any()


@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize(
    ("solver", "name", "value"),
    [
        ("newton", "eps", 0.5),
        ("newton", "num_iters", 1),
        ("newton", "correction", 1),
        ("newton", "shrinkage", 0.5),
        ("newton", "activation", "relu"),
        ("zca", "solver", "cholesky"),
    ],
)
def test_an_attribute_that_is_set_later_counts_from_then_on(solver, name, value, running):
    words = {"momentum": 1.0, "group_size": 4, "running": running, "dtype": torch.float64}
    layer = layer_2d(solver, 6, **words)
    other = layer_2d(value, 6, **words) if name == "solver" else layer_2d(solver, 6, **words, **{name: value})
    x = correlated(8, 6, 3, 3)
    before = layer(x)
    setattr(layer, name, value)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.whitening_matrix(), other.whitening_matrix())
    y = layer(x)
    torch.testing.assert_close(y, other(x))
    assert relative_error(y, before) > 1e-3
    torch.testing.assert_close(layer.eval()(x), other.eval()(x))


@pytest.mark.parametrize("affine", [True, False])
def test_reset(affine):
    layer = IterNorm2d(10, group_size=4, affine=affine)
    fresh = state_of(layer)
    assert layer.running_whitening[2].diagonal().tolist() == [1, 1, 0, 0]
    layer(correlated(8, 10, 3, 3, dtype=torch.float32))
    if affine:
        layer.weight.data.normal_()
        layer.bias.data.normal_()
        weight = layer.weight.detach().clone()
        layer.reset_running_stats()
        torch.testing.assert_close(layer.weight.detach(), weight)
    layer.reset_parameters()
    assert_same_state(layer, fresh)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_batch_with_nan_or_inf_leaves_the_running_statistics(bad, running, momentum, solver):
    layer = layer_2d(solver, 6, momentum=momentum, group_size=4, running=running)
    x = correlated(8, 6, 3, 3, dtype=torch.float32)
    spoiled = x.clone()
    spoiled[1, 5, 0, 0] = bad
    fresh = state_of(layer)
    y = layer(spoiled)
    # The output is not hidden: what was spoiled shows.
    assert not y.isfinite().all()
    assert_same_state(layer, fresh)
    layer(x)
    after = state_of(layer)
    assert after["num_batches_tracked"] == 1
    layer(spoiled)
    assert_same_state(layer, after)
    clean = layer_2d(solver, 6, momentum=momentum, group_size=4, running=running)
    clean(x)
    assert_same_state(layer, state_of(clean))


@pytest.mark.parametrize(("group_size", "num_iters"), [(4, 5), (4, 0), (1, 5), (3, 5), (3, 0)])
@pytest.mark.parametrize("running", ["whitening", "covariance"])
# Variances that are infinite, and differences of infinities.
@pytest.mark.parametrize("scale", [1e21, 1e30])
def test_an_overflow_of_the_covariance_leaves_the_running_statistics(group_size, num_iters, running, scale):
    layer = IterNorm2d(4, group_size=group_size, num_iters=num_iters, running=running)
    before = state_of(layer)
    x = (scale * torch.randn(8, 4, 2, 2)).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.isnan().all()
    assert x.grad.isnan().all()
    assert_same_state(layer, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_input_are_fp32(dtype):
    layer = IterNorm2d(8, group_size=4)
    x = correlated(32, 8, 4, 4, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    exact = IterNorm2d(8, group_size=4, dtype=torch.float64)
    exact(x.double())
    assert layer.running_whitening.dtype == torch.float32
    assert relative_error(layer.running_whitening, exact.running_whitening) < 1e-6
    assert layer.eval()(x).dtype == dtype


@pytest.mark.parametrize(("kind", "batch_norm", "shape"), LAYERS)
def test_a_layer_in_half_precision_trains(kind, batch_norm, shape):
    layer, exact = kind(8, group_size=4).bfloat16(), kind(8, group_size=4).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (layer, exact)]
    x = correlated(32, 8, *shape, dtype=torch.bfloat16)
    target = correlated(32, 8, *shape, dtype=torch.bfloat16)
    losses = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_(), x.double().requires_grad_()]
        for each, leaf, optimizer in zip((layer, exact), leaves, optimizers, strict=True):
            loss = (each(leaf) - target.to(leaf.dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert leaves[0].grad.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits, and the difference to the target loses some of them.
        assert relative_error(leaves[0].grad, leaves[1].grad) < 0.03
    assert losses[-2] < losses[2] < losses[0]
    for name, value in exact.state_dict().items():
        ours = layer.state_dict()[name]
        assert ours.dtype == (torch.bfloat16 if value.is_floating_point() else value.dtype)
        assert relative_error(ours, value) < 0.03, name
    assert relative_error(layer.eval()(x), exact.eval()(x.double())) < 0.03


@pytest.mark.parametrize("solver", SOLVERS)
def test_more_channels_than_samples(solver):
    # The covariance is singular but for eps: whitening goes on, with finite output and gradients.
    layer = layer_2d(solver, 16, group_size=None, eps=1e-3)
    x = torch.randn(5, 16, 1, 1, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_constant_channels_are_finite():
    layer = IterNorm2d(4)
    x = torch.zeros(8, 4, 3, 3)
    x[:, 1] = 5
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(layer(x), torch.zeros_like(x), atol=1e-3, rtol=0)


def test_repr_names_what_was_chosen():
    assert repr(IterNorm2d(8, group_size=4, num_iters=3)) == (
        "IterNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, group_size=4, num_iters=3, "
        "running='whitening')"
    )
    text = repr(iternorm.DecorrelatedBatchNorm1d(8, solver="pca", running="covariance"))
    assert "solver='pca', running='covariance'" in text


def test_one_value_per_channel_and_an_empty_batch_are_fine_in_eval():
    layer = IterNorm2d(8, group_size=3).eval()
    assert layer(torch.randn(1, 8, 1, 1)).isfinite().all()
    assert layer(torch.randn(0, 8, 1, 1)).shape == (0, 8, 1, 1)


def test_the_meta_device_gives_shapes():
    layer = IterNorm2d(8, group_size=3, device="meta")
    x = torch.empty(4, 8, 2, 2, device="meta")
    assert layer(x).shape == layer.eval()(x).shape == x.shape


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_weight_that_is_kept_elsewhere_is_found():
    x = torch.randn(8, 6, 3, 3)
    layer = IterNorm2d(6, group_size=3)
    expected = 2 * copy.deepcopy(layer)(x)
    parametrized = nn.utils.parametrize.register_parametrization(copy.deepcopy(layer), "weight", Doubled())
    torch.testing.assert_close(parametrized(x), expected)
    # What nn.DataParallel makes for each GPU: parameters are attributes there.
    replica: Any = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight.mul(2), layer.bias.clone()
    torch.testing.assert_close(replica(x), expected)
