"""Bad arguments and bad inputs of the layers: refused by name, with nothing changed."""

import pytest
import torch
from checks import assert_same_state, state_of

from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, IterNorm3d

ARGUMENT_ERRORS = [
    ({"num_features": 0}, ValueError, "num_features=0 must be at least 1; give the number of channels"),
    ({"num_features": 2.0}, TypeError, "num_features=2.0 is not an integer"),
    ({"eps": -1}, ValueError, "eps=-1 must not be negative or infinite"),
    ({"momentum": -0.1}, ValueError, "momentum=-0.1 must be from 0 to 1; None is the average of all batches"),
    ({"group_size": 0}, ValueError, "group_size=0 must be at least 1"),
    ({"group_size": 2.0}, TypeError, "group_size=2.0 is not an integer"),
    ({"num_iters": -1}, ValueError, "num_iters=-1 must be at least 0"),
    ({"num_iters": "5"}, TypeError, "num_iters='5' is not an integer"),
    ({"running": "mean"}, ValueError, "running='mean' is not known; choose one of 'whitening', 'covariance'"),
    ({"impl": "fast"}, ValueError, "impl='fast' is not known; choose one of"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), ARGUMENT_ERRORS)
def test_bad_arguments_are_named_with_their_value_and_the_remedy(changes, kind, message):
    with pytest.raises(kind, match=message):
        IterNorm2d(**{"num_features": 8, **changes})


def test_bad_solver_is_named():
    with pytest.raises(ValueError, match="solver='svd' is not known; choose one of 'zca', 'pca', 'cholesky'"):
        DecorrelatedBatchNorm2d(8, solver="svd")


def test_whitening_words_are_keyword_only_and_unknown_ones_are_refused():
    with pytest.raises(TypeError):
        IterNorm2d(8, 1e-5, 0.1, True, True, None, None, 4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="num_groups"):
        IterNorm2d(8, num_groups=2)  # pyright: ignore[reportCallIssue]


INPUT_ERRORS = [
    (IterNorm1d, (4, 8, 2, 2), ValueError, r"expected 2 or 3D input \[N, C\] or \[N, C, L\], got 4D input"),
    (IterNorm2d, (4, 8), ValueError, r"expected 4D input \[N, C, H, W\], got 2D input of shape \[4, 8\]"),
    (IterNorm3d, (4, 8, 2, 2), ValueError, r"expected 5D input \[N, C, D, H, W\], got 4D"),
    (IterNorm2d, (4, 7, 2, 2), ValueError, r"expected an input of 8 channels .*, got 7: shape \[4, 7, 2, 2\]"),
    (IterNorm2d, (1, 8, 1, 1), ValueError, r"Expected more than 1 value per channel when training, .*; use a larger"),
]


@pytest.mark.parametrize(("kind", "shape", "error", "message"), INPUT_ERRORS)
def test_a_bad_input_is_refused_and_nothing_is_changed(kind, shape, error, message):
    layer = kind(8)
    before = state_of(layer)
    with pytest.raises(error, match=message):
        layer(torch.randn(shape))
    assert_same_state(layer, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_an_input_that_is_not_floating_point_is_refused(dtype):
    layer = IterNorm2d(8)
    before = state_of(layer)
    with pytest.raises(TypeError, match=f"input has dtype {dtype}; convert it to a floating-point dtype"):
        layer(torch.ones(4, 8, 2, 2, dtype=dtype))
    assert_same_state(layer, before)


def test_an_attribute_spoiled_later_is_refused_and_nothing_is_changed():
    for name, value in (
        ("eps", -1.0),
        ("momentum", 2.0),
        ("group_size", 3),
        ("impl", "none"),
        ("running", "covariance"),
    ):
        layer = IterNorm2d(8, group_size=4)
        before = state_of(layer)
        setattr(layer, name, value)
        with pytest.raises(ValueError, match=name if name != "group_size" else "running_whitening has shape"):
            layer(torch.randn(4, 8, 2, 2))
        assert_same_state(layer, before)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean"])
def test_a_vector_of_another_width_is_refused_by_name(name):
    layer = IterNorm2d(8)
    vector = torch.ones(1)
    setattr(layer, name, vector if name == "running_mean" else torch.nn.Parameter(vector))
    with pytest.raises(ValueError, match=rf"{name} has shape \[1\]; 8 channels need \[8\]"):
        layer(torch.randn(4, 8, 2, 2))
