"""Whitener: which directions the data vary in, and which are constants, dependent features or roundings."""

import pytest
import torch
from checks import correlated

from iternorm import Whitener

SOLVERS = ("zca", "pca", "cholesky", "newton")


def test_empty_directions_are_dropped():
    x = correlated(500, 5)
    x = torch.cat([x, x[:, :2] + x[:, 2:4], torch.full((500, 1), 4.0, dtype=x.dtype)], 1)
    pca, zca = Whitener("pca").fit(x), Whitener("zca").fit(x)
    assert pca.n_components_ == zca.n_components_ == 5
    torch.testing.assert_close(pca.transform(x).T.cov(), torch.eye(5, dtype=x.dtype))
    projector = zca.transform(x).T.cov()
    torch.testing.assert_close(projector @ projector, projector)
    torch.testing.assert_close(zca.inverse_transform(zca.transform(x)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_samples_than_features_span_their_own_space(dtype):
    x = torch.randn(10, 64, dtype=dtype)
    whitener = Whitener("pca").fit(x)
    assert whitener.n_components_ == 9
    torch.testing.assert_close(whitener.transform(x).T.cov(), torch.eye(9, dtype=dtype), atol=1e-4, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("value", [0.0, 1000.1])
def test_constant_features_are_refused(solver, value):
    with pytest.raises(ValueError, match="give eps or shrinkage"):
        Whitener(solver).fit(torch.full((50, 4), value))
    assert (
        Whitener(solver, eps=1e-3).fit(torch.full((50, 4), value)).transform(torch.full((2, 4), value)).abs().max() < 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_feature_is_refused_by_cholesky(dtype):
    """Rounding gives it a variance, which is not to be scaled to 1."""
    x = correlated(500, 7, dtype=dtype)
    x[:, 2] = 7.3
    with pytest.raises(ValueError, match="full rank, 7, and feature 2 is constant"):
        Whitener("cholesky").fit(x)
    streamed = Whitener("cholesky")
    for batch in x.split(130):
        streamed.partial_fit(batch)
    with pytest.raises(ValueError, match="feature 2 is constant"):
        streamed.transform(x)
    Whitener("cholesky", eps=1e-3).fit(x)


@pytest.mark.parametrize("mean", [1.0, 3.3, 100.7, 1000.1, 1e5 + 0.3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_constant_features_are_no_directions(dtype, mean):
    """Their means are rounded, which is not to be scaled to 1."""
    x = correlated(500, 7)
    x[:, 2], x[:, 4] = mean, mean / 1.37
    # Float16 has no 1e5.
    x = x.clamp(max=6e4).to(dtype)
    streamed = Whitener("pca")
    for batch in x.split(130):
        streamed.partial_fit(batch)
    for whitener in (Whitener().fit(x), Whitener("pca").fit(x), streamed):
        assert whitener.n_components_ == 5
        assert whitener.whitening_[:, [2, 4]].abs().max() < 1e-9
        torch.testing.assert_close(whitener.mean_[[2, 4]], x[0, [2, 4]].double(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_few_steps_of_half_precision_are_not_constant(solver, dtype):
    x = (torch.randn(500, 3) + 50).to(dtype)
    assert Whitener(solver).fit(x).n_components_ == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_directions_that_vary(dtype):
    x = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.7, 0.45, 0.1])
    x = torch.cat([x, x[:, :1] + x[:, 1:2]], 1).to(dtype)
    # The last feature depends on two others but for its roundings.
    assert Whitener().fit(x).n_components_ == 4
    assert Whitener("cholesky").fit(x[:, :4]).n_components_ == 4
    with pytest.raises(ValueError, match="some features depend on others"):
        Whitener("cholesky").fit(x)
    # A batch of half precision among others does not drop what these vary in.
    assert Whitener().partial_fit(x[:, :4].double()).partial_fit(x[:8, :4]).n_components_ == 4


@pytest.mark.parametrize("solver", ["zca", "pca", "cholesky"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_small_feature_beside_large_ones_is_no_rounding(solver, dtype):
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1.0, 1e-3])
    whitener = Whitener(solver).fit(x.to(dtype))
    assert whitener.n_components_ == 3
    white = torch.as_tensor(whitener.transform(x.to(dtype))).float()
    torch.testing.assert_close(torch.cov(white.T), torch.eye(3), atol=0.02, rtol=0)
    # Nor does a small batch of a coarser dtype make it one.
    mixed = Whitener(solver).partial_fit(x.to(dtype)).partial_fit(x[:8].bfloat16())
    assert mixed.n_components_ == 3


@pytest.mark.parametrize("mean", [0.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_roundings_of_a_mean_are_no_direction(dtype, mean):
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) + mean
    x = torch.cat([x, x[:, :1] + x[:, 1:2]], 1).to(dtype)
    assert Whitener().fit(x).n_components_ == 3
    with pytest.raises(ValueError, match="some features depend on others"):
        Whitener("cholesky").fit(x)


def test_samples_that_are_all_rounding_are_refused():
    centred = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    x = (centred + 2000).bfloat16()
    with pytest.raises(ValueError, match="no more than their dtype rounds them: subtract the mean before"):
        Whitener().fit(x)
    assert Whitener(eps=1e-3).fit(x).n_components_ == 3
    assert Whitener().fit(centred.bfloat16()).n_components_ == 3


def test_dependent_features_are_refused_by_cholesky():
    x = correlated(500, 7)
    x = torch.cat([x, x[:, :1] - x[:, 1:2]], 1)
    with pytest.raises(ValueError, match="some features depend on others"):
        Whitener("cholesky").fit(x)
    Whitener("cholesky", shrinkage=1e-3).fit(x)
