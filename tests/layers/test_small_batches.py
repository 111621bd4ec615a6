"""The warning about groups that have fewer values per channel than channels."""

import copy
import warnings

import pytest
import torch

from iternorm import DecorrelatedBatchNorm1d, IterNorm1d, IterNorm2d, SmallBatchWarning, SyncIterNorm


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    """This warning too, which the configuration of the other tests ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SmallBatchWarning)
        yield


@pytest.mark.parametrize("layer", [IterNorm1d(64), DecorrelatedBatchNorm1d(64, group_size=64), SyncIterNorm(64)])
def test_it_names_the_layer_the_figures_and_a_remedy(layer):
    with pytest.warns(SmallBatchWarning) as caught:
        layer(torch.randn(16, 64))
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(
        f"{type(layer).__name__}(64) whitens groups of 64 channels, but this batch has only 16 values"
    )
    assert "input of shape [16, 64]" in text
    assert "group_size" in text


def test_once_for_each_layer_however_many_batches_come():
    for layer in (IterNorm2d(32, group_size=None) for _ in range(2)):
        with pytest.warns(SmallBatchWarning):
            layer(torch.randn(2, 32, 2, 2))
        for size in (3, 2, 1):
            layer(torch.randn(size, 32, 2, 2))


def test_one_value_is_an_error_without_a_warning():
    layer = IterNorm1d(64)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(torch.randn(1, 64))
    # Which is still to come.
    with pytest.warns(SmallBatchWarning):
        layer(torch.randn(2, 64))


def test_layers_that_know_only_their_batch_statistics_warn_in_eval():
    layer = IterNorm1d(64, track_running_stats=False).eval()
    with pytest.warns(SmallBatchWarning):
        layer(torch.randn(16, 64))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (IterNorm1d(64), (64, 64)),
        (IterNorm2d(160), (1, 160, 8, 8)),
        (IterNorm1d(256, group_size=16), (16, 256)),
        # A group is never larger than the layer.
        (IterNorm1d(8), (8, 8)),
        (IterNorm1d(64, group_size=1), (2, 64)),
        (IterNorm1d(64).eval(), (2, 64)),
        # No samples, no statistics.
        (IterNorm1d(64), (0, 64)),
    ],
)
def test_nothing_is_said_of_batches_that_will_do(layer, shape):
    layer(torch.randn(shape))


def test_a_compiled_layer_is_one_graph_and_silent():
    layer = IterNorm1d(64)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
    x = torch.randn(16, 64)
    y = compiled(x)
    with pytest.warns(SmallBatchWarning):
        torch.testing.assert_close(layer(x), y)


def test_it_can_be_told_from_other_warnings():
    assert issubclass(SmallBatchWarning, UserWarning)
    warnings.filterwarnings("ignore", category=SmallBatchWarning)
    IterNorm1d(64)(torch.randn(16, 64))


def test_experiments_that_are_about_small_batches_do_not_warn(tmp_path):
    pytest.importorskip("accelerate")
    from iternorm.experiments.jobs.registry import Context
    from iternorm.experiments.recipe import Recipe
    from iternorm.experiments.training import train

    size = {"train_examples": 4, "test_examples": 2, "width": 0.1, "max_iterations": 2}
    recipe = Recipe("generated-mnist", "mlp", "IterNorm T=5", 2, 0.1, 1, **size)
    train.train(recipe, Context("cpu", lambda *arguments, **values: None, tmp_path))
