"""Training on a GPU: a captured step trains as an eager one does."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.graph import CapturedStep
from iternorm.experiments.training.train import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MLP = Recipe("generated-mnist", "mlp", "BN", 64, 0.1, 3, momentum=0.9, train_examples=1024, test_examples=200)
VGG = Recipe(
    "generated-cifar10", "vgg", "BN", 32, 0.05, 2, momentum=0.9, augment=True, train_examples=256, test_examples=64,
    width=0.25, milestones=(1,), gamma=0.2,
)  # fmt: skip
WRN = replace(VGG, model="wrn-10-1", dropout=0.3, nesterov=True, weight_decay=5e-4, width=1.0)


def trained(recipe, folder, device="cuda", **options):
    rows = train(recipe, Context(device, lambda *args, **values: None, folder), **options)
    (path,) = folder.glob("checkpoint-*")
    return rows, load_file(path / "weights.safetensors")


@pytest.mark.parametrize(
    "recipe",
    [
        MLP,
        replace(MLP, norm="plain"),
        replace(MLP, norm="IterNorm T=5"),
        replace(MLP, batch_size=2, record_every=100, max_iterations=250),
        VGG,
        replace(VGG, norm="IterNorm T=5 d=64"),
        replace(VGG, norm="IterNorm T=5", channels_last=True),
        replace(VGG, norm="IterNorm T=5 d=64", precision="bf16", channels_last=True),
        WRN,
    ],
    ids=lambda recipe: f"{recipe.model}-{recipe.norm}-{recipe.precision}-{recipe.batch_size}".replace(" ", "-"),
)
def test_a_captured_run_is_the_eager_one(recipe, tmp_path, monkeypatch):
    replayed = []
    real = CapturedStep.__call__

    def noted(self, images, labels):
        real(self, images, labels)
        replayed.append(self._graph is not None)

    monkeypatch.setattr(CapturedStep, "__call__", noted)
    captured, captured_weights = trained(recipe, tmp_path / "captured", capture=True)
    assert replayed
    assert all(replayed)
    eager, eager_weights = trained(recipe, tmp_path / "eager", capture=False)
    # The first steps agree closely; later ones drift apart, because convolutions add in an order of their own.
    assert captured[0]["train_loss"] == pytest.approx(eager[0]["train_loss"], rel=2e-2)
    assert captured[-1]["train_loss"] == pytest.approx(eager[-1]["train_loss"], rel=0.2, abs=0.05)
    for name, tensor in captured_weights.items():
        if name.endswith("num_batches_tracked"):
            assert tensor == eager_weights[name] == captured[-1]["iteration"]
        assert tensor.isfinite().all()


def test_the_mlp_trains_as_on_the_cpu(tmp_path):
    gpu, _ = trained(replace(MLP, norm="IterNorm T=5"), tmp_path / "gpu")
    cpu, _ = trained(replace(MLP, norm="IterNorm T=5"), tmp_path / "cpu", device="cpu")
    assert [row["train_loss"] for row in gpu] == pytest.approx([row["train_loss"] for row in cpu], rel=1e-2, abs=1e-3)


def test_a_captured_run_resumes(tmp_path, monkeypatch):
    recipe = replace(MLP, norm="IterNorm T=5", epochs=4)
    expected, _ = trained(recipe, tmp_path / "whole")
    calls = 0
    real = CapturedStep.__call__

    def stopping(self, images, labels):
        nonlocal calls
        calls += 1
        if calls == 2 * 16 + 5:
            raise KeyboardInterrupt
        real(self, images, labels)

    monkeypatch.setattr(CapturedStep, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        trained(recipe, tmp_path / "parts", checkpoint_seconds=0)
    rows, _ = trained(recipe, tmp_path / "parts", checkpoint_seconds=0)
    assert len(rows) == 4
    assert [row["train_loss"] for row in rows] == pytest.approx(
        [row["train_loss"] for row in expected], rel=1e-2, abs=1e-3
    )


def test_divergence_is_seen_inside_a_long_epoch(tmp_path):
    recipe = replace(MLP, norm="plain", lr=1e6, batch_size=2)
    rows, _ = trained(recipe, tmp_path)
    # A look reads what the look before it asked for.
    assert [row["iteration"] for row in rows] == [200]
    assert rows[0]["diverged"] is True


def test_the_current_device_and_switches_are_left_as_they_were(tmp_path):
    torch.backends.cudnn.benchmark = False
    state = torch.cuda.get_rng_state()
    trained(replace(MLP, epochs=1), tmp_path)
    assert torch.backends.cudnn.benchmark is False
    assert torch.equal(torch.cuda.get_rng_state(), state)
