"""Whitener: closed forms, streams, merging, and what a failed call leaves."""

import copy
from importlib.util import find_spec

import pytest
import torch
from checks import covariance_with, relative_error

import iternorm
from iternorm import Whitener

SOLVERS = ("zca", "pca", "cholesky", "newton")


def data(samples=500, features=7, dtype=torch.float64):
    mixing = torch.randn(features, features, dtype=torch.float64)
    return (torch.randn(samples, features, dtype=torch.float64) @ mixing + 3 * torch.randn(features)).to(dtype)


def cov(x, correction=1):
    return torch.cov(x.T, correction=correction).reshape(x.shape[1], x.shape[1])


def snapshot(whitener):
    return {name: value.clone() for name, value in whitener.state_dict().items()}


@pytest.mark.parametrize("solver", ["zca", "pca", "cholesky"])
def test_the_output_is_white(solver):
    x = data()
    y = Whitener(solver).fit_transform(x)
    torch.testing.assert_close(cov(y), torch.eye(7, dtype=x.dtype))
    torch.testing.assert_close(y.mean(0), torch.zeros(7, dtype=x.dtype))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("eps", "shrinkage", "correction"), [(0.0, 0.0, 1), (0.1, 0.0, 0), (0.0, 0.3, 1), (0.1, 0.3, 0)]
)
def test_the_matrix_is_the_solvers_of_the_regularized_covariance(solver, eps, shrinkage, correction):
    x = data()
    whitener = Whitener(solver, eps=eps, shrinkage=shrinkage, correction=correction, num_iters=4).fit(x)
    regularized = (1 - shrinkage) * cov(x, correction) + (shrinkage + eps) * torch.eye(7, dtype=x.dtype)
    solve = getattr(iternorm.solvers, solver)
    expected = solve(regularized, 4) if solver == "newton" else solve(regularized)
    torch.testing.assert_close(whitener.whitening_, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whitener.covariance_, cov(x, correction))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("words", [{}, {"eps": 0.1}, {"shrinkage": 0.5}])
def test_inverse_transform_undoes_transform(solver, words):
    x = data()
    whitener = Whitener(solver, **words).fit(x)
    torch.testing.assert_close(whitener.inverse_transform(whitener.transform(x)), x)


def test_the_newton_solver_matches_the_layer():
    x = data()
    layer = iternorm.IterNorm1d(7, group_size=None, affine=False, eps=1e-3).double()
    y = Whitener("newton", eps=1e-3, correction=0).fit_transform(x)
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize("sizes", [(500,), (1,) * 500, (1, 2, 3, 494), (300, 0, 200), (7, 490, 3)])
@pytest.mark.parametrize("offset", [0, 1e6])
def test_a_stream_equals_one_shot(sizes, offset):
    x = data() + offset
    whole, stream = Whitener().fit(x), Whitener()
    for batch in x.split(list(sizes)):
        stream.partial_fit(batch)
    assert stream.n_samples_seen_ == 500
    # The data themselves have lost digits to the offset.
    least = 1e-10 * max(1, offset / 1e2)
    assert relative_error(stream.whitening_, whole.whitening_) < least
    assert relative_error(stream.covariance_, cov(x)) < least


def test_parts_merge_exactly_in_any_order():
    x = data()
    parts = [Whitener("pca").fit(part) for part in x.split([10, 290, 200])]
    before = [snapshot(part) for part in parts[1:]]
    merged = Whitener("pca").merge(*parts)
    assert parts[0].n_samples_seen_ == 10
    assert parts[2].merge(parts[1], parts[0]).n_samples_seen_ == 500
    whole = Whitener("pca").fit(x)
    assert relative_error(merged.whitening_, whole.whitening_) < 1e-12
    assert relative_error(parts[2].whitening_, whole.whitening_) < 1e-12
    torch.testing.assert_close(snapshot(parts[1]), before[0], rtol=0, atol=0)


def test_a_mean_of_1000_deviations_does_no_harm_in_single_precision():
    x = (torch.randn(4096, 16, dtype=torch.float64) @ covariance_with(torch.linspace(0.3, 1.5, 16).double())) + 1000
    x = x.float()
    exact = Whitener().fit(x.double())
    for whitener in (Whitener().fit(x), Whitener().partial_fit(x[:100]).partial_fit(x[100:])):
        # fp32 sums about a pilot: twenty roundings. Sums about zero would be off by more than the variance.
        assert relative_error(whitener.whitening_, exact.whitening_) < 2e-6
        assert relative_error(whitener.transform(x), exact.transform(x.double())) < 3e-6


def test_components_are_those_of_largest_variance():
    x = data()
    full, three = Whitener("pca").fit(x), Whitener("pca", 3).fit(x)
    torch.testing.assert_close(three.transform(x), full.transform(x)[:, :3])
    variances = full.coloring_.square().sum(0)
    torch.testing.assert_close(variances, torch.linalg.eigvalsh(cov(x)).flip(0))
    zca = Whitener("zca", n_components=3).fit(x)
    assert zca.transform(x).shape == x.shape
    torch.testing.assert_close(zca.inverse_transform(zca.transform(x)), three.inverse_transform(three.transform(x)))


def test_to_linear_is_transform():
    x = data()
    whitener = Whitener("pca", n_components=4).fit(x)
    layer, back = whitener.to_linear(torch.float64), whitener.to_linear(torch.float64, inverse=True)
    y = whitener.transform(x)
    torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(back(y), whitener.inverse_transform(y))
    assert not any(p.requires_grad for p in layer.parameters())
    assert whitener.to_linear().weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    x = torch.randn(300, 6).to(dtype)
    y = Whitener().fit_transform(x)
    assert y.dtype == dtype
    expected = Whitener().fit(x.double()).transform(x.double())
    torch.testing.assert_close(y, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_autocast_does_not_reach_it():
    x = data(dtype=torch.float32)
    whitener = Whitener().fit(x)
    y = whitener.transform(x)
    back = whitener.inverse_transform(y)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(whitener.transform(x), y, rtol=0, atol=0)
        torch.testing.assert_close(whitener.inverse_transform(y), back, rtol=0, atol=0)


def test_moments_move_and_stay_in_double_precision():
    x = data(dtype=torch.float32)
    whitener = Whitener().fit(x)
    with pytest.raises(TypeError, match="dtype"):
        whitener.to(torch.float32)  # pyright: ignore[reportArgumentType]
    assert whitener.to("cpu").partial_fit(x).mean_.dtype == torch.float64


def test_tensors_stay_off_the_default_device():
    # A mean that is summed once more.
    x = data().float() + 1000
    expected = Whitener().fit(x).transform(x)
    with torch.device("meta"):
        torch.testing.assert_close(Whitener().partial_fit(x).transform(x), expected)


def test_gradients_reach_the_input_and_not_the_fit():
    x = data(20, 3).requires_grad_()
    whitener = Whitener().fit(x)
    assert not whitener.whitening_.requires_grad
    assert torch.autograd.gradcheck(whitener.transform, (x,))
    assert torch.autograd.gradcheck(whitener.inverse_transform, (x,))


def test_parameters_can_be_changed_after_the_fit():
    x = data()
    whitener = Whitener().fit(x)
    torch.testing.assert_close(whitener.set_params(solver="pca", n_components=2).transform(x).shape, (500, 2))
    torch.testing.assert_close(whitener.transform(x), Whitener("pca", 2).fit(x).transform(x))


def test_a_copy_is_independent():
    x = data()
    whitener = Whitener().fit(x)
    other = copy.deepcopy(whitener).partial_fit(x + 1)
    assert (whitener.n_samples_seen_, other.n_samples_seen_) == (500, 1000)


def test_state_dict_round_trip_continues_the_stream():
    x = data()
    state = Whitener().fit(x[:100]).state_dict()
    loaded = Whitener().load_state_dict(state).partial_fit(x[100:])
    assert relative_error(loaded.whitening_, Whitener().fit(x).whitening_) < 1e-12


def test_safetensors_round_trip(tmp_path):
    pytest.importorskip("safetensors")
    x = data()
    whitener = Whitener("pca", n_components=3, eps=1e-3).fit(x)
    whitener.save(tmp_path / "whitener.safetensors")
    loaded = Whitener.load(tmp_path / "whitener.safetensors")
    assert loaded.get_params() == whitener.get_params()
    torch.testing.assert_close(loaded.transform(x), whitener.transform(x), rtol=0, atol=0)
    from safetensors.torch import save_file

    save_file(whitener.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"was not written by Whitener\.save"):
        Whitener.load(tmp_path / "other.safetensors")


BAD = [
    (lambda x: torch.full_like(x, torch.nan), ValueError, "contains NaN or infinity"),
    (lambda x: x[:, :4], ValueError, "X has 4 features, but Whitener is expecting 7"),
    (lambda x: x[0], ValueError, r"X has shape \[7\]; expected \[samples, features\]"),
    (lambda x: x.long(), TypeError, "X has dtype torch.int64"),
    (lambda x: x[:, :0], ValueError, r"0 feature\(s\)"),
    pytest.param(
        lambda x: "text",
        ValueError,
        "could not convert",
        marks=pytest.mark.skipif(find_spec("numpy") is None, reason="what is no tensor is converted by numpy"),
    ),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD)
@pytest.mark.parametrize("method", ["partial_fit", "fit", "transform"])
def test_a_failed_call_changes_nothing(method, change, error, text):
    x = data()
    whitener = Whitener().fit(x)
    state, y = snapshot(whitener), whitener.transform(x)
    bad = change(x)
    if method == "fit" and "4 features" in text:
        # A new fit may be of other features.
        assert whitener.fit(bad).n_features_in_ == 4
        return
    if method == "transform" and "NaN" in text:
        # Tensors go through.
        assert whitener.transform(bad).isnan().all()
        return
    with pytest.raises(error, match=text):
        getattr(whitener, method)(bad)
    torch.testing.assert_close(snapshot(whitener), state, rtol=0, atol=0)
    torch.testing.assert_close(whitener.transform(x), y, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["partial_fit", "fit"])
def test_a_variance_that_overflows_is_refused_whatever_the_others_are(method):
    x = data().float()
    whitener = Whitener().fit(x)
    state = snapshot(whitener)
    with pytest.raises(ValueError, match="whose squares overflow"):
        getattr(whitener, method)(x * torch.tensor([1e20, 1, 1, 1, 1, 1, 1]))
    torch.testing.assert_close(snapshot(whitener), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "samples", "text"),
    [
        ({"n_components": 5}, 4, "n_components=5 is more than the 3 directions in which the 4 samples vary"),
        ({"n_components": 8}, 100, "n_components=8 is more than the 7 features"),
        ({"solver": "cholesky"}, 7, "needs a covariance of full rank, 7, and only 7 samples were seen"),
        ({}, 1, "n_samples=1: a covariance with correction=1 needs at least 2 samples"),
        ({"solver": "svd"}, 100, "solver='svd' is not known"),
        ({"eps": -1.0}, 100, r"eps=-1.0 must be from 0"),
        ({"shrinkage": 1.5}, 100, r"shrinkage=1.5 must be from 0 to 1"),
        ({"tol": 2.0}, 100, r"tol=2.0 must be from 0 to 1"),
        ({"correction": 2}, 100, "correction=2 is not known"),
        ({"n_components": 0}, 100, "n_components=0 must be at least 1"),
        ({"n_components": 2, "solver": "newton"}, 100, 'needs solver="zca" or "pca"'),
        ({"num_iters": -1}, 100, "num_iters=-1 must be at least 0"),
    ],
)
def test_what_the_data_do_not_determine_is_refused_and_the_old_fit_stays(words, samples, text):
    x = data()
    whitener = Whitener().fit(x)
    state = snapshot(whitener)
    whitener.set_params(**words)
    with pytest.raises(ValueError, match=text):
        whitener.fit(x[:samples])
    torch.testing.assert_close(snapshot(whitener), state, rtol=0, atol=0)


@pytest.mark.parametrize("call", [lambda w: w.transform(torch.ones(2, 2)), lambda w: w.mean_, lambda w: w.state_dict()])
def test_nothing_comes_out_before_a_fit(call):
    with pytest.raises(ValueError, match="not fitted yet; call fit or partial_fit first"):
        call(Whitener())
    assert not hasattr(Whitener(), "whitening_")


def test_state_dicts_that_do_not_fit_are_refused():
    whitener = Whitener().fit(data())
    state = snapshot(whitener)
    with pytest.raises(ValueError, match="that of a Whitener has"):
        whitener.load_state_dict({"mean": state["mean"]})
    with pytest.raises(ValueError, match=r"those of d features are \[d\] and \[d, d\]"):
        whitener.load_state_dict({**state, "mean": state["mean"][:3]})
    with pytest.raises(ValueError, match="cannot be merged"):
        whitener.merge(Whitener().fit(data(features=3)))
    torch.testing.assert_close(snapshot(whitener), state, rtol=0, atol=0)
