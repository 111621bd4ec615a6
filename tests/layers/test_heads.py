"""What self-supervised heads need of the layers: eps = 0, unbiased covariances, shrinkage, shuffled groups."""

import pytest
import torch
from checks import correlated, groups_between, relative_error

import iternorm
from iternorm import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d
from iternorm.backends.native import build

SOLVERS = ("newton", "zca", "pca", "cholesky")
WORDS = [
    {"eps": 0.0, "correction": 1},
    {"eps": 0.1, "shrinkage": 0.3},
    {"eps": 0.0, "correction": 1, "shrinkage": 0.2},
]


def layer_of(solver, *args, **words):
    if solver == "newton":
        return IterNorm2d(*args, **words)
    return DecorrelatedBatchNorm2d(*args, solver=solver, **words)


def by_hand(x, solver, group_size, eps, correction=0, shrinkage=0.0):
    """Each group's covariance from torch.cov, regularized, and the solver's own function."""
    outputs = []
    for group in x.split(group_size, 1):
        samples = group.transpose(0, 1).flatten(1)
        covariance = torch.cov(samples, correction=correction)
        identity = torch.eye(len(samples), dtype=x.dtype)
        covariance = (1 - shrinkage) * covariance + (shrinkage + eps) * identity
        solve = getattr(iternorm.solvers, solver)
        matrix = solve(covariance, 5) if solver == "newton" else solve(covariance)
        centered = group - samples.mean(1)[:, None, None]
        outputs.append(torch.einsum("ij,njhw->nihw", matrix, centered))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("impl", ["torch", "native", "reference"])
def test_the_covariance_is_the_one_that_was_asked_for(solver, words, impl):
    if impl == "native":
        reason = build.failure(torch.float64)
        if reason is not None:
            pytest.skip(reason)
    x = correlated(6, 10, 5, 4).requires_grad_()
    layer = layer_of(solver, 10, group_size=4, impl=impl, affine=False, dtype=torch.float64, **words)
    y, expected = layer(x), by_hand(x, solver, 4, **words)
    assert relative_error(y, expected) < 1e-12
    grad = torch.randn_like(y)
    (ours,), (theirs,) = (torch.autograd.grad(t, x, grad) for t in (y, expected))
    assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize("solver", SOLVERS)
def test_second_derivatives_and_transforms_see_it_too(solver):
    x = correlated(4, 4, 3, 3).requires_grad_()
    layer = layer_of(solver, 4, group_size=2, dtype=torch.float64, track_running_stats=False, **WORDS[2])
    assert torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)
    mapped = torch.func.vmap(layer)(torch.stack([x, 2 * x]).detach())
    torch.testing.assert_close(mapped[0], layer(x).detach())


@pytest.mark.parametrize("running", ["whitening", "covariance"])
@pytest.mark.parametrize("solver", ["newton", "zca", "cholesky"])
def test_eval_uses_what_training_averaged(running, solver):
    x = correlated(30, 6, 4, 4)
    words = {"running": running, "momentum": 1.0, "dtype": torch.float64, "group_size": 4, "num_iters": 5}
    if solver != "newton":
        words.pop("num_iters")
    layer = layer_of(solver, 6, **words, **WORDS[2])
    y = layer(x)
    torch.testing.assert_close(layer.eval()(x), y)
    if running == "covariance":
        samples = x.transpose(0, 1).flatten(1)
        torch.testing.assert_close(layer.running_covariance[0], torch.cov(samples[:4]))
    folded = iternorm.fold_pointwise(layer)
    torch.testing.assert_close(folded(x), y)
    other = layer_of(solver, 6, **words, **WORDS[2])
    iternorm.recalibrate(other, [x], progress=False)
    torch.testing.assert_close(other.eval()(x), y)


def test_functions_take_the_words():
    x = correlated(20, 6)
    words = {"training": True, "group_size": None, "eps": 0.0, "correction": 1, "shrinkage": 0.1}
    layer = DecorrelatedBatchNorm1d(6, 0.0, group_size=None, solver="cholesky", correction=1, shrinkage=0.1)
    y = iternorm.functional.decorrelated_batch_norm(x, solver="cholesky", **words)
    torch.testing.assert_close(y, layer.double()(x))
    torch.testing.assert_close(
        iternorm.functional.iter_norm(x, **words),
        IterNorm1d(6, 0.0, group_size=None, correction=1, shrinkage=0.1).double()(x),
    )
    assert repr(layer).endswith("correction=1, shrinkage=0.1)")


def test_shrinkage_one_only_centres():
    x = correlated(20, 6)
    layer = DecorrelatedBatchNorm1d(6, 0.0, affine=False, shrinkage=1.0).double()
    torch.testing.assert_close(layer(x), x - x.mean(0))


def test_no_eps_and_dependent_channels_show_as_nan_and_leave_the_statistics():
    x = torch.randn(20, 3).repeat(1, 2)
    layer = DecorrelatedBatchNorm1d(6, 0.0, solver="cholesky")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert not (layer(x) * 1e-6).abs().max() < 1e3 or layer(x).isnan().any()
    for name, value in layer.state_dict().items():
        assert value.isfinite().all(), name
    assert before.keys() == layer.state_dict().keys()


@pytest.mark.parametrize("kind", [IterNorm1d, DecorrelatedBatchNorm1d])
def test_shuffled_groups_are_groups_of_the_shuffled_channels(kind):
    x = correlated(50, 7)
    plain = kind(7, group_size=3, affine=False, track_running_stats=False).double()
    layer = kind(7, group_size=3, track_running_stats=False, shuffle=True).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(7))
        layer.bias.copy_(torch.randn(7))
    found = [groups_between(x, (layer(x) - layer.bias) / layer.weight, plain, 3) for _ in range(8)]
    assert None not in found
    # Each batch has groups of its own.
    assert len(set(found)) > 1
    # In eval the channels stay in their groups.
    torch.testing.assert_close(layer.eval()(x), plain(x) * layer.weight + layer.bias)


def test_gradients_of_shuffled_groups_are_exact():
    x = correlated(12, 6)
    layer = DecorrelatedBatchNorm1d(6, group_size=2, track_running_stats=False, shuffle=True).double()

    def run(x):
        torch.manual_seed(3)
        return layer(x)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(),), fast_mode=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y.square().mean(0), torch.ones(6, dtype=torch.float64), rtol=1e-2, atol=1e-2)


def test_what_is_added_to_shuffled_groups_is_not_shuffled():
    x, residual = correlated(12, 6), correlated(12, 6)
    layer = DecorrelatedBatchNorm1d(6, group_size=2, track_running_stats=False, shuffle=True).double()
    torch.manual_seed(3)
    expected = layer(x) + residual
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x, residual=residual), expected)


def test_shuffled_groups_keep_no_statistics():
    with pytest.raises(ValueError, match="shuffle=True makes new groups for each batch"):
        DecorrelatedBatchNorm1d(6, shuffle=True)


@pytest.mark.parametrize("words", [{"correction": 1}, {"shrinkage": 0.1}])
def test_kernels_that_do_not_know_them_say_so(words):
    layer = IterNorm2d(8, impl="triton", **words)
    with pytest.raises(ValueError, match="the kernels have neither correction nor shrinkage"):
        layer(torch.randn(4, 8, 4, 4))


def test_w_mse_checkpoints_load():
    covariance = torch.randn(6, 6)
    covariance = covariance @ covariance.T + torch.eye(6)
    state = {"running_mean": torch.randn(1, 6, 1, 1), "running_variance": covariance}
    words = {"affine": False, "running": "covariance", "solver": "cholesky", "correction": 1}
    layer = DecorrelatedBatchNorm1d(6, 0.0, group_size=None, **words)
    layer.load_state_dict(state)
    x = torch.randn(5, 6)
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    torch.testing.assert_close(layer.eval()(x), (x - state["running_mean"].flatten()) @ whitening.T)
    averages_whitening = DecorrelatedBatchNorm1d(6, group_size=None)
    for other in (DecorrelatedBatchNorm1d(6, group_size=3, running="covariance"), averages_whitening):
        with pytest.raises(RuntimeError, match='build the layer with that many channels, running="covariance"'):
            other.load_state_dict(state)
