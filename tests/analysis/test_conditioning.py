"""Covariance, spectrum and the numbers made of them, by closed forms."""

import math

import pytest
import torch

from iternorm import analysis


def random_covariance(size, generator, dtype=torch.float64):
    root = torch.randn(size, size, generator=generator, dtype=dtype)
    return root @ root.T


@pytest.mark.parametrize("shape", [(50, 3), (50, 1), (5, 3, 10), (5, 3, 2, 5), (2, 300, 7, 5)])
def test_covariance_equals_torch_cov(shape, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 1000
    rows = x.movedim(1, 0).flatten(1)
    expected = torch.cov(rows, correction=0).reshape(shape[1], shape[1])
    torch.testing.assert_close(analysis.covariance(x), expected)


def test_fp32_covariance_survives_a_large_mean(generator):
    x = torch.randn(4000, 5, generator=generator, dtype=torch.float64) + 1000
    torch.testing.assert_close(
        analysis.covariance(x.float()).double(), torch.cov(x.T, correction=0), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_fp32(dtype, generator):
    x = torch.randn(4000, 4, generator=generator).to(dtype)
    measured = analysis.covariance(x)
    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured, analysis.covariance(x.float()))


def test_stream_equals_all_at_once(generator):
    # More channels than one band of the update, and batches whose means are far apart.
    x = torch.randn(60, 300, generator=generator, dtype=torch.float64)
    x += torch.arange(60)[:, None] // 20 * 100
    total = None
    for batch in x.split([7, 13, 40]):
        total = analysis.update_moments(total, batch)
    assert total.num_samples == 60
    torch.testing.assert_close(total.mean, x.mean(0))
    torch.testing.assert_close(total.covariance, torch.cov(x.T, correction=0))


def test_merged_moments_equal_all_at_once(generator):
    x = torch.randn(60, 300, generator=generator, dtype=torch.float64)
    x += torch.arange(60)[:, None] // 20 * 100
    total = None
    for batch in x.split([7, 13, 40]):
        total = analysis.merge_moments(total, analysis.moments(batch))
    assert total.num_samples == 60
    torch.testing.assert_close(total.mean, x.mean(0))
    torch.testing.assert_close(total.covariance, torch.cov(x.T, correction=0))


def test_spectrum_is_descending_and_not_negative(generator):
    covariance = random_covariance(6, generator)
    values = analysis.spectrum(covariance)
    torch.testing.assert_close(values.sum(), covariance.trace())
    torch.testing.assert_close(values.prod(), torch.linalg.det(covariance))
    assert (values.diff() <= 0).all()
    rank_one = torch.ones(5, 5)
    assert (analysis.spectrum(rank_one) >= 0).all()


def test_condition_number_of_a_diagonal(generator):
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    covariance = rotation @ torch.diag(torch.tensor([50.0, 7, 3, 2], dtype=torch.float64)) @ rotation.T
    assert analysis.condition_number(covariance).item() == pytest.approx(25)
    assert analysis.condition_number(torch.eye(3)) == 1
    # In fp32 rounding reaches 1e-7 of the largest eigenvalue, not 1e-5.
    assert analysis.condition_number(torch.diag(torch.tensor([1.0, 1e-5]))).item() == pytest.approx(1e5)


def test_condition_number_without_full_rank_is_infinite(generator):
    x = torch.randn(10, 30, generator=generator)
    assert analysis.condition_number(analysis.covariance(x)) == math.inf
    assert analysis.condition_number(torch.zeros(3, 3)) == math.inf


def test_a_direction_has_variance_beyond_the_rounding_of_the_largest():
    # √16 of them.
    eps = torch.finfo(torch.float64).eps
    values = torch.ones(16, dtype=torch.float64)
    values[0] = 3
    assert analysis.condition_number(values.index_fill(0, torch.tensor(15), 3 * 3.9 * eps).diag()) == math.inf
    assert analysis.condition_number(values.index_fill(0, torch.tensor(15), 3 * 4.1 * eps).diag()) < math.inf


def test_batched_covariances_give_batched_values(generator):
    batch = torch.stack([random_covariance(4, generator) for _ in range(3)])
    for function in (
        analysis.condition_number,
        analysis.effective_rank,
        analysis.mean_absolute_correlation,
        analysis.whiteness_error,
        analysis.spectrum,
        analysis.correlation,
    ):
        torch.testing.assert_close(function(batch), torch.stack([function(entry) for entry in batch]))


def test_effective_rank_counts_equal_directions():
    assert analysis.effective_rank(torch.eye(7)).item() == pytest.approx(7)
    assert analysis.effective_rank(torch.diag(torch.tensor([3.0, 3, 0, 0]))).item() == pytest.approx(2)
    assert analysis.effective_rank(0.01 * torch.eye(7)).item() == pytest.approx(7)
    assert analysis.effective_rank(torch.zeros(4, 4)) == 0


def test_mean_absolute_correlation_of_known_correlations():
    correlation = torch.tensor([[1.0, 0.5, -0.5], [0.5, 1, 0], [-0.5, 0, 1]])
    deviation = torch.tensor([1.0, 10, 0.1])
    covariance = correlation * deviation[:, None] * deviation
    torch.testing.assert_close(analysis.correlation(covariance), correlation)
    assert analysis.mean_absolute_correlation(covariance).item() == pytest.approx(1 / 3)
    assert analysis.mean_absolute_correlation(torch.ones(1, 1)) == 0


def test_channel_without_variance_correlates_with_nothing():
    covariance = torch.tensor([[4.0, 0], [0, 0]])
    torch.testing.assert_close(analysis.correlation(covariance), torch.eye(2))


def test_whiteness_error_is_zero_for_white_data_only():
    assert analysis.whiteness_error(torch.eye(5)) == 0
    assert analysis.whiteness_error(2 * torch.eye(5)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.zeros(3), ValueError, r"shape \(3,\)"),
        (torch.zeros(3, 2, dtype=torch.long), TypeError, "int64"),
        (torch.zeros(0, 2), ValueError, "no samples"),
    ],
)
def test_wrong_activations_are_named(x, error, text):
    with pytest.raises(error, match=text):
        analysis.covariance(x)


def test_wrong_covariances_are_named():
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        analysis.spectrum(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="int64"):
        analysis.whiteness_error(torch.zeros(2, 2, dtype=torch.long))
