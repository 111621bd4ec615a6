"""A run that stopped goes on: checkpoints of the training loop, in this process and on the CPU."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from small_runs import MLP, WRN, context, timeless, weights

from iternorm import LazyIterNorm2d
from iternorm.experiments.training import checkpoint
from iternorm.experiments.training import train as train_module
from iternorm.experiments.training.checkpoint import CheckpointError
from iternorm.experiments.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_with_dropout_resumes_inside_an_epoch(tmp_path, monkeypatch):
    expected = train(WRN, context(tmp_path / "whole"))
    assert len(expected) == 4
    real, count = train_module._Run._train, 0

    def stopping(self, period, batches):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        count %= 2
        return real(self, period, batches)

    monkeypatch.setattr(train_module._Run, "_train", stopping)
    for _ in range(3):
        torch.manual_seed(random.randrange(100))
        with pytest.raises(KeyboardInterrupt):
            train(WRN, context(tmp_path / "parts"), checkpoint_seconds=0)
        count = 0
    rows = train(WRN, context(tmp_path / "parts"), checkpoint_seconds=0)
    assert timeless(rows) == timeless(expected)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_run_with_lazy_layers_resumes(tmp_path):
    def network(recipe, source):
        return nn.Sequential(nn.LazyConv2d(4, 3), LazyIterNorm2d(), nn.Flatten(), nn.LazyLinear(source.num_classes))

    rows = train(MLP, context(tmp_path / "whole"), network=network)

    def stop(done, total, **values):
        if done > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(MLP, context(tmp_path / "cut", stop), network=network, checkpoint_seconds=0)
    assert checkpoint.load(tmp_path / "cut", MLP).rows
    assert timeless(train(MLP, context(tmp_path / "cut"), network=network)) == timeless(rows)


def test_a_finished_run_is_not_trained_again(tmp_path):
    rows = train(MLP, context(tmp_path))
    told = []
    # The same rows, the seconds that they took among them, and one report.
    assert train(MLP, context(tmp_path, lambda done, total, **values: told.append((done, total)))) == rows
    assert told == [(18, 18)]


def test_checkpoints_are_as_far_apart_as_they_should_be(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(train_module.checkpoint, "save", lambda folder, recipe, rows, *rest: saved.append(len(rows)))
    train(MLP, context(tmp_path))
    assert saved == [3]
    saved.clear()
    train(MLP, context(tmp_path), checkpoint_seconds=0)
    assert saved == [1, 2, 3]


def test_checkpoints_that_take_long_take_a_fiftieth_of_the_time(tmp_path, monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr(train_module.time, "monotonic", lambda: now[0])
    # A row takes 12 seconds, a checkpoint one.
    monkeypatch.setattr(train_module.Watch, "begin", passing(now, 12.0, train_module.Watch.begin))

    def slow(folder, recipe, rows, *rest):
        now[0] += 1.0
        saved.append(len(rows))

    monkeypatch.setattr(train_module.checkpoint, "save", slow)
    train(replace(MLP, epochs=12), context(tmp_path))
    assert saved == [1, 6, 11, 12]


def passing(now, seconds, real):
    def call(*arguments):
        now[0] += seconds
        return real(*arguments)

    return call


def test_a_full_disk_at_the_end_does_not_lose_the_run(tmp_path, monkeypatch):
    expected = timeless(train(MLP, context(tmp_path / "roomy")))

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    with pytest.warns(UserWarning, match=r"checkpoint-000003 could not be written: No space left on device.*finished"):
        assert timeless(train(MLP, context(tmp_path / "full"))) == expected
    # Before the end there is more to lose than a checkpoint.
    with pytest.raises(OSError, match=r"checkpoint-000001 could not be written"):
        train(MLP, context(tmp_path / "full"), checkpoint_seconds=0)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    train(MLP, context(tmp_path))
    with pytest.raises(CheckpointError, match="norm='BN'"):
        train(replace(MLP, norm="IterNorm T=5"), context(tmp_path))


def test_a_run_that_was_cut_short_on_disk_starts_anew(tmp_path):
    expected = train(MLP, context(tmp_path))
    (path,) = tmp_path.glob("checkpoint-*")
    (path / "weights.safetensors").write_bytes(b"short")
    with pytest.warns(UserWarning, match="is not complete"):
        assert timeless(train(MLP, context(tmp_path))) == timeless(expected)
