"""Whitener on the kernels' moments, in Triton's interpreter: the stream in fp32 against one shot in fp64."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

from checks import correlated, relative_error

from iternorm import Whitener
from iternorm.whitening import dispatch


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "has_moment_kernels", lambda x: x.dtype != torch.float64)


@pytest.mark.parametrize("features", [1, 3, 20, 64, 100])
@pytest.mark.parametrize("deviations", [0, 1000])
def test_a_stream_in_single_precision_equals_one_shot_in_double(features, deviations, poisoned_memory):
    x = correlated(500, features, dtype=torch.float32)
    x = x + deviations * x.std(0) * torch.linspace(-1, 1, features)
    whitener = Whitener(solver="newton")
    for batch in x.split([1, 199, 300]):
        whitener.partial_fit(batch)
    exact = Whitener(solver="newton").fit(x.double())
    # Rounding of sums of differences from a pilot near the mean.
    assert relative_error(whitener.covariance_, exact.covariance_) < 2e-6
    assert (whitener.mean_ - exact.mean_).abs().max() < 1e-6 * x.std(0).max()


def test_samples_that_are_not_contiguous_are_read_right():
    x = correlated(60, 8, dtype=torch.float32)
    torch.testing.assert_close(Whitener().fit(x.t().contiguous().t()).mean_, Whitener().fit(x).mean_)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_batch_that_is_not_finite_changes_nothing(value):
    x = correlated(60, 8, dtype=torch.float32)
    whitener = Whitener().partial_fit(x)
    before = whitener.state_dict()
    x[7, 3] = value
    with pytest.raises(ValueError, match="NaN or infinity, or values whose squares overflow"):
        whitener.partial_fit(x)
    assert all(torch.equal(value, before[name]) for name, value in whitener.state_dict().items())
