"""Running statistics: what they average, when they are used, and what leaves them alone."""

import pytest
import torch
from checks import assert_same_state, correlated, covariance_of, layer_2d, relative_error, state_of
from torch import nn

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, reference

SOLVERS = ("newton", "zca", "pca", "cholesky")


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
