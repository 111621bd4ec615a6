"""Whitener on the kernels' moments, in Triton's interpreter: the stream in fp32 against one shot in fp64."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_gpu.py", allow_module_level=True)

from checks import correlated, relative_error
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from iternorm import Whitener
from iternorm.backends.triton import runtime
from iternorm.whitening import dispatch

# What reads no sample.
FREE = {"detach", "new_empty"}


class Operations(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "has_moment_kernels", lambda x: x.dtype != torch.float64)


# More features take the interpreter long.
@pytest.mark.parametrize(
    ("features", "deviations"), [(1, 0), (1, 1000), (3, 0), (3, 1000), (20, 0), (20, 1000), (32, 1000), (66, 1000)]
)
def test_a_stream_in_single_precision_equals_one_shot_in_double(features, deviations, poisoned_memory):
    x = correlated(500, features, dtype=torch.float32)
    x = x + deviations * x.std(0) * torch.linspace(-1, 1, features)
    whitener = Whitener(solver="newton")
    for batch in x.split([1, 199, 300] if features <= 64 else [1, 499]):
        whitener.partial_fit(batch)
    exact = Whitener(solver="newton").fit(x.double())
    # Rounding of sums of differences from a pilot near the mean.
    assert relative_error(whitener.covariance_, exact.covariance_) < 2e-6
    assert (whitener.mean_ - exact.mean_).abs().max() < 1e-6 * x.std(0).max()


@pytest.mark.parametrize("mean", [3.3, 1000.1])
def test_a_constant_feature_has_no_variance(mean):
    x = correlated(300, 7, dtype=torch.float32)
    x[:, 2] = mean
    whitener = Whitener().partial_fit(x[:130]).partial_fit(x[130:])
    assert whitener.n_components_ == 6
    assert whitener.mean_[2] == x[0, 2]


@pytest.mark.parametrize("deviations", [0, 1000])
def test_a_batch_is_read_once_and_not_waited_for(deviations, monkeypatch):
    x = correlated(300, 7, dtype=torch.float32)
    x = x + deviations * x.std(0)
    whitener = Whitener().partial_fit(x)
    launched, launch = [], runtime.Launch.__call__

    def counted(self, stream, values):
        launched.append(self.kernel.__name__)
        # The interpreter copies memory by torch.
        with _disable_current_modes():
            launch(self, stream, values)

    monkeypatch.setattr(runtime.Launch, "__call__", counted)
    with Operations() as operations:
        whitener.partial_fit(x)
    assert launched == ["stream_moments", "join_stream"]
    assert [name for name in operations.names if name not in FREE] == []


def test_what_was_fitted_elsewhere_goes_on_as_a_stream():
    x = correlated(500, 5, dtype=torch.float32)
    parts = [Whitener().fit(block) for block in x[:300].split(100)]
    merged = parts[0].merge(*parts[1:])
    loaded = Whitener().load_state_dict(merged.state_dict())
    exact = Whitener().fit(x.double())
    for whitener in (merged, loaded):
        whitener.partial_fit(x[300:400]).partial_fit(x[400:])
        assert whitener.n_samples_seen_ == 500
        assert relative_error(whitener.covariance_, exact.covariance_) < 1e-6
        assert (whitener.mean_ - exact.mean_).abs().max() < 1e-6


def test_samples_that_are_not_contiguous_are_read_right():
    x = correlated(60, 8, dtype=torch.float32)
    torch.testing.assert_close(Whitener().fit(x.t().contiguous().t()).mean_, Whitener().fit(x).mean_)


USES = {
    "transform": lambda whitener, x: whitener.transform(x),
    "mean": lambda whitener, x: whitener.mean_,
    "state": lambda whitener, x: whitener.state_dict(),
    "merge": lambda whitener, x: Whitener().merge(whitener),
    "copy": lambda whitener, x: copy.deepcopy(whitener),
    "pickle": lambda whitener, x: pickle.dumps(whitener),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("use", USES)
def test_a_batch_that_is_not_finite_is_left_out_and_the_first_use_says_so(value, use):
    x = correlated(60, 8, dtype=torch.float32)
    bad = x.clone()
    bad[7, 3] = value
    whitener, expected = Whitener(), Whitener()
    for batch in (x, 2 * x, 3 * x):
        whitener.partial_fit(batch).partial_fit(bad)
        expected.partial_fit(batch)
    with pytest.raises(ValueError, match=r"A batch that partial_fit was given contains NaN.*\(180 samples\)"):
        USES[use](whitener, x)
    assert all(torch.equal(value, whitener.state_dict()[name]) for name, value in expected.state_dict().items())
    # Once said it is over.
    assert whitener.partial_fit(x).n_samples_seen_ == 240


def test_fit_of_samples_that_are_not_finite_raises_at_once():
    x = correlated(60, 8, dtype=torch.float32)
    whitener = Whitener().partial_fit(x)
    before = whitener.state_dict()
    with pytest.raises(ValueError, match="Input X contains NaN or infinity"):
        whitener.fit(torch.full_like(x, torch.nan))
    assert all(torch.equal(value, before[name]) for name, value in whitener.state_dict().items())


def test_a_first_batch_that_is_not_finite_leaves_nothing_fitted():
    x = correlated(60, 8, dtype=torch.float32)
    whitener = Whitener().partial_fit(torch.full_like(x, torch.nan))
    with pytest.raises(ValueError, match="A batch that partial_fit was given contains NaN"):
        whitener.transform(x)
    with pytest.raises(ValueError, match="not fitted yet"):
        whitener.transform(x)
    assert whitener.partial_fit(x).n_samples_seen_ == 60
