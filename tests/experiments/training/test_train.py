"""The training loop, in this process and on the CPU."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from small_runs import MLP, WRN, context, silent, timeless, weights

from iternorm.experiments.data.sources import open_source
from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training import checkpoint, watch
from iternorm.experiments.training import train as train_module
from iternorm.experiments.training.graph import CapturedStep, EagerStep
from iternorm.experiments.training.train import periods, train
from iternorm.networks.models import build

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_notes_its_precision_and_what_a_folder_held(tmp_path):
    pytest.importorskip("PIL")
    recipe = Recipe(
        "generated-imagenet", "resnet-18", "BN", 8, 0.01, 1, train_examples=16, test_examples=8, width=1 / 16
    )
    recipe = replace(recipe, image_size=32, kept_on_device=True)
    context = Context("cpu", lambda *args, **values: None, tmp_path)
    train(recipe, context)
    assert context.record["precision"] == "fp32"
    assert context.record["data"]["classes"] == 12
    assert len(context.record["data"]["listing_sha256"]) == 64


def test_rows_say_what_was_trained(tmp_path):
    recipe = replace(MLP, milestones=(1,), gamma=0.1, eval_every=2)
    rows = train(recipe, context(tmp_path))
    # 200 examples are 6 batches of 32; what is left is dropped.
    assert [(row["epoch"], row["iteration"]) for row in rows] == [(1, 6), (2, 12), (3, 18)]
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.01, 0.01])
    assert [row["test_error"] is None for row in rows] == [True, False, False]
    assert rows[2]["train_loss"] < rows[0]["train_loss"] < 3
    assert all(row["seconds"] > 0 for row in rows)
    assert all(0 <= row["train_error"] <= 100 for row in rows)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_loop_is_plain_sgd(tmp_path, nesterov):
    recipe = replace(MLP, nesterov=nesterov, weight_decay=0.01, milestones=(2,), gamma=0.2, precision="fp32")
    rows = train(recipe, context(tmp_path))
    source = open_source(recipe, "cpu")
    torch.manual_seed(recipe.seed)
    model = build("mlp", "BN", 10, source.in_shape, width=recipe.width)
    velocity = {}
    for epoch, row in enumerate(rows):
        lr = recipe.lr * (0.2 if epoch >= 2 else 1)
        model.train()
        losses, wrong = [], 0
        for images, labels in source.train_batches(epoch):
            logits = model(images)
            loss = cross_entropy(logits, labels)
            losses.append(loss.item())
            wrong += (logits.argmax(1) != labels).sum().item()
            names, parameters = zip(*model.named_parameters(), strict=True)
            for name, parameter, grad in zip(names, parameters, torch.autograd.grad(loss, parameters), strict=True):
                step = grad + 0.01 * parameter.detach()
                velocity[name] = step if name not in velocity else 0.9 * velocity[name] + step
                parameter.data -= lr * (step + 0.9 * velocity[name] if nesterov else velocity[name])
        assert row["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert row["train_error"] == pytest.approx(100 * wrong / (32 * len(losses)), abs=1.1)
        model.eval()
        images, labels = (torch.cat(parts) for parts in zip(*source.test_batches(), strict=True))
        assert row["test_loss"] == pytest.approx(cross_entropy(model(images), labels).item(), rel=1e-3)
    assert sum(len(labels) for _, labels in source.test_batches()) == 70


def test_runs_are_repeatable_and_seeds_differ(tmp_path):
    first, second = (train(WRN, context(tmp_path / name)) for name in "ab")
    assert timeless(first) == timeless(second)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    other = train(replace(WRN, seed=1), context(tmp_path / "c"))
    assert other[0]["train_loss"] != first[0]["train_loss"]


def test_a_diverged_run_ends_and_says_so(tmp_path):
    recipe = replace(MLP, norm="plain", lr=1e6, epochs=50, eval_every=1)
    told = []
    rows = train(recipe, context(tmp_path, lambda done, total, **values: told.append((done, total))))
    assert told[-1] == (300, 300)
    assert len(rows) < 50
    assert rows[-1]["diverged"] is True
    assert rows[-1]["train_loss"] is None
    assert rows[-1]["test_loss"] is None
    assert not any("diverged" in row for row in rows[:-1])
    json.dumps(rows, allow_nan=False)
    assert train(recipe, context(tmp_path)) == rows


def test_divergence_inside_a_long_epoch_is_seen_there(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY", 20)
    recipe = replace(MLP, norm="plain", lr=1e6, batch_size=2)
    rows = train(recipe, context(tmp_path))
    assert [row["iteration"] for row in rows] == [20]
    assert rows[0]["diverged"] is True


def test_an_eigendecomposition_that_fails_is_divergence(tmp_path, monkeypatch):
    real, calls = EagerStep.__call__, 0

    def failing(self, images, labels):
        nonlocal calls
        calls += 1
        if calls == 9:
            message = "linalg.eigh: the algorithm failed to converge"
            raise torch.linalg.LinAlgError(message)  # pyright: ignore[reportPrivateImportUsage]
        real(self, images, labels)

    monkeypatch.setattr(EagerStep, "__call__", failing)
    rows = train(MLP, context(tmp_path))
    assert len(rows) == 2
    assert (rows[1]["iteration"], rows[1]["diverged"], rows[1]["train_loss"]) == (8, True, None)
    assert "failed to converge" in rows[1]["reason"]


def test_rows_inside_an_epoch_and_an_early_end(tmp_path):
    recipe = replace(MLP, record_every=4, max_iterations=10, eval_every=2)
    rows = train(recipe, context(tmp_path))
    assert [(row["epoch"], row["iteration"]) for row in rows] == [(1, 4), (1, 6), (2, 10)]
    assert [row["test_error"] is not None for row in rows] == [False, True, True]
    # The parts of an epoch together are the epoch.
    whole = train(replace(MLP, epochs=1), context(tmp_path / "whole"))
    parts = (4 * rows[0]["train_loss"] + 2 * rows[1]["train_loss"]) / 6
    assert parts == pytest.approx(whole[0]["train_loss"])


def test_periods_of_a_run_that_ends_with_an_epoch():
    assert [tuple(p) for p in periods(replace(MLP, max_iterations=6), 6)] == [(0, 0, 6)]
    assert [tuple(p) for p in periods(replace(MLP, epochs=2), 6)] == [(0, 0, 6), (1, 0, 6)]


def test_nothing_outside_a_run_changes(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(replace(MLP, precision="tf32"), context(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_runs_of_different_precision_in_one_process(tmp_path):
    losses = {}
    for name in ("fp32", "bf16", "tf32", "fp32"):
        rows = train(replace(MLP, epochs=1, precision=name), context(tmp_path / f"{name}{len(losses)}"))
        losses.setdefault(name, []).append(rows[0]["train_loss"])
    assert losses["fp32"][0] == losses["fp32"][1]
    assert losses["bf16"][0] != losses["fp32"][0]
    assert losses["bf16"][0] == pytest.approx(losses["fp32"][0], rel=0.02)


def test_channels_last_is_left_to_gpus(tmp_path, monkeypatch):
    # oneDNN corrupts memory in the backward of this network in channels_last on a CPU without AVX-512, for which
    # ONEDNN_MAX_CPU_ISA=AVX2 stands anywhere.
    recipe, formats = replace(WRN, dropout=0.0, max_iterations=1), []

    def spy(name, *args, **words):
        model = build(name, *args, **words)
        model.register_forward_pre_hook(lambda _, given: formats.append(given[0].is_contiguous()))
        return model

    monkeypatch.setattr(train_module, "build", spy)
    first = train(recipe, context(tmp_path / "a"))
    second = train(replace(recipe, channels_last=True), context(tmp_path / "b"))
    assert first[0]["train_loss"] == second[0]["train_loss"]
    assert all(formats)
    # The recipe is still the one that was asked for: a GPU can go on from here.
    assert checkpoint.load(tmp_path / "b", replace(recipe, channels_last=True)).rows == second


def test_progress_is_told_now_and_then(tmp_path, monkeypatch):
    told = []

    def note(done, total, **values):
        told.append((done, total, values))

    monkeypatch.setattr(watch, "REPORT_SECONDS", 0.0)
    train(MLP, context(tmp_path / "a", note))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {total for _, total, _ in told} == {18}
    assert told[-1][0] == 18
    assert len(told) == 18 + 3
    assert all(values["rate"] > 0 and math.isfinite(values["loss"]) for _, _, values in told)
    told.clear()
    monkeypatch.setattr(watch, "REPORT_SECONDS", 1000.0)
    train(MLP, context(tmp_path / "b", note))
    # The first iteration, and the ends of rows.
    assert len(told) <= 4


def test_top_five_errors_of_many_classes(tmp_path, monkeypatch):
    class Classes:
        num_classes, in_shape, num_train, num_test, iterations_per_epoch = 12, (1, 2, 2), 8, 24, 1

        def train_batches(self, epoch):
            yield torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.long)

        def test_batches(self):
            yield torch.zeros(24, 1, 2, 2), torch.arange(24) % 12

    monkeypatch.setattr(train_module, "open_source", lambda *args, **kwargs: Classes())
    recipe = replace(MLP, norm="plain", batch_size=8, epochs=1, train_examples=None, test_examples=None)
    (row,) = train(recipe, context(tmp_path))
    # All images are the same, so one class is right, and five are among the five likeliest.
    assert row["test_error"] == pytest.approx(100 * 11 / 12)
    assert row["test_error_top5"] == pytest.approx(100 * 7 / 12)
    assert "train_error_top5" in row


def test_events_are_written_where_they_are_asked_for(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = train(MLP, context(tmp_path / "run", tensorboard=tmp_path / "events"))
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {"train/loss", "train/error", "test/loss", "test/error", "lr"} <= set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in found] == [6, 12, 18]
    assert [value for _, value in found] == pytest.approx([row["train_loss"] for row in rows])


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "torch sees none"), ("mps", "not supported in training: use 'cpu' or 'cuda'")]
)
def test_a_device_that_is_not_there(tmp_path, device, message):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=message):
        train(MLP, Context(device, silent, tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a capture to fail")
def test_a_capture_that_fails_warns_and_trains_eagerly(tmp_path):
    with pytest.warns(UserWarning, match="could not be captured in a CUDA graph and is run eagerly"):
        rows = train(MLP, context(tmp_path / "a"), capture=True)
    assert timeless(rows) == timeless(train(MLP, context(tmp_path / "b")))
    assert issubclass(CapturedStep, EagerStep)


@pytest.mark.slow
def test_a_compiled_network_trains_alike(tmp_path):
    expected = train(MLP, context(tmp_path / "a"))
    rows = train(MLP, context(tmp_path / "b", compile=True))
    assert [row["train_loss"] for row in rows] == pytest.approx([row["train_loss"] for row in expected], rel=1e-3)
    torch._dynamo.reset()
