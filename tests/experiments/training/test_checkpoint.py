"""Checkpoints: what they hold, and what becomes of one that cannot be used."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from iternorm import IterNorm2d

pytest.importorskip("safetensors")

from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training import checkpoint
from iternorm.experiments.training.checkpoint import CheckpointError

RECIPE = Recipe("mnist", "mlp", "BN", 32, 0.1, 3, milestones=(1,))
ROWS = [{"iteration": 10, "train_loss": 0.1 + 0.2, "test_loss": None}]
FILES = ("weights.safetensors", "momentum.safetensors", "state.json")


def network(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, width, 3), IterNorm2d(width, group_size=4), nn.Flatten(), nn.Linear(width, 2))
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (missing in torch's stub)
    return model


def trained(model, steps=2, momentum=0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    step(model, optimizer, steps)
    return optimizer


def step(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3, 3, 3) * torch.arange(4.0).view(4, 1, 1, 1)).square().sum().backward()
        optimizer.step()


def test_a_restored_run_goes_on_as_the_other(tmp_path):
    model = network()
    optimizer = trained(model)
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, optimizer)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    found = checkpoint.load(tmp_path, RECIPE)
    assert found.rows == ROWS
    other = network(seed=1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    found.restore(other, other_optimizer)
    buffer = other_optimizer.state[other.get_parameter("0.weight")]["momentum_buffer"]
    assert buffer.is_contiguous(memory_format=torch.channels_last)
    step(model, optimizer)
    step(other, other_optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_that_are_tied_or_share_memory_are_kept(tmp_path):
    def tied():
        layer, whole = nn.Linear(8, 8), torch.rand(6)
        model = nn.Sequential(layer, nn.ReLU(), layer)
        model.register_buffer("whole", whole)
        model.register_buffer("part", whole[2:4])
        return model

    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, RECIPE, ROWS, model, optimizer)
    other = tied()
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path, RECIPE).restore(other, other_optimizer)
    assert other[0].weight is other[2].weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    momentum = (
        steps.state[net.get_parameter("0.weight")]["momentum_buffer"]
        for net, steps in ((model, optimizer), (other, other_optimizer))
    )
    assert torch.equal(*momentum)


def test_a_run_without_momentum_has_none(tmp_path):
    model = network()
    checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model, momentum=0))
    assert checkpoint.load(tmp_path, RECIPE).momentum == {}


def test_there_is_none_in_an_empty_or_missing_folder(tmp_path):
    assert checkpoint.load(tmp_path, RECIPE) is None
    assert checkpoint.load(tmp_path / "missing", RECIPE) is None


def test_a_newer_one_takes_the_place_of_the_older(tmp_path):
    model = network()
    optimizer = trained(model)
    checkpoint.save(tmp_path, RECIPE, ROWS, model, optimizer)
    checkpoint.save(tmp_path, RECIPE, [*ROWS, {"iteration": 20}], model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000002"]


def test_the_older_one_stays_until_the_newer_is_whole(tmp_path, monkeypatch):
    model = network()
    optimizer = trained(model)
    checkpoint.save(tmp_path, RECIPE, ROWS, model, optimizer)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    with pytest.raises(OSError, match=r"checkpoint-000002 could not be written: No space left on device: make room"):
        checkpoint.save(tmp_path, RECIPE, [*ROWS, {"iteration": 20}], model, optimizer)
    # What was written of it takes no room.
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert checkpoint.load(tmp_path, RECIPE).rows == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_one_that_safetensors_cannot_write_names_its_path(tmp_path, monkeypatch):
    import safetensors.torch

    def full(tensors, path):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    model = network()
    with pytest.raises(OSError, match=r"checkpoint-000001 could not be written: I/O error: No space left"):
        checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))


def test_one_in_a_folder_that_cannot_be_made_names_its_path(tmp_path):
    (tmp_path / "file").touch()
    model = network()
    with pytest.raises(OSError, match=r"file/run/checkpoint-000001 could not be written: Not a directory"):
        checkpoint.save(tmp_path / "file" / "run", RECIPE, ROWS, model, trained(model))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 20])
def test_one_that_is_cut_short_is_set_aside(tmp_path, name, left):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    (path / name).write_bytes((path / name).read_bytes()[:left])
    with pytest.warns(UserWarning, match=rf"checkpoint-000001 is not complete.*renamed to {path.name}.unusable"):
        assert checkpoint.load(tmp_path, RECIPE) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.unusable"]
    assert checkpoint.load(tmp_path, RECIPE) is None


@pytest.mark.parametrize("name", FILES)
def test_one_that_is_damaged_is_set_aside(tmp_path, name):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    content = (path / name).read_bytes()
    # One bit of the last number, or of the number of iterations: all of it can still be read.
    where = content.index(b": 10,") + 2 if name == "state.json" else len(content) - 1
    (path / name).write_bytes(content[:where] + bytes([content[where] ^ 2]) + content[where + 1 :])
    with pytest.warns(UserWarning, match=rf"checkpoint-000001 is damaged: {name} is not what was written.*renamed"):
        assert checkpoint.load(tmp_path, RECIPE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": ["x"]},
        {"sha256": None},
        {"sha256": {}},
        {"sha256": dict.fromkeys(FILES, "x")},
        {"rows": [1, 2]},
        {"recipe": ["x"]},
        {"rows": [math.nan]},
    ],
)
def test_one_that_holds_other_things_is_set_aside(tmp_path, change):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **change}))
    with pytest.warns(UserWarning, match=r"checkpoint-000001 is (damaged|not complete).*renamed to"):
        assert checkpoint.load(tmp_path, RECIPE) is None


@pytest.mark.parametrize("name", FILES)
def test_one_without_a_digest_is_set_aside(tmp_path, name):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    state = json.loads((path / "state.json").read_text())
    del state["sha256"][name]
    (path / "state.json").write_text(json.dumps(state))
    with pytest.warns(UserWarning, match=rf"checkpoint-000001 is not complete \(no digest of {name}\).*renamed"):
        assert checkpoint.load(tmp_path, RECIPE) is None


def test_one_with_a_missing_file_is_set_aside(tmp_path):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    (path / "momentum.safetensors").unlink()
    with pytest.warns(UserWarning, match="is not complete"):
        assert checkpoint.load(tmp_path, RECIPE) is None


def test_one_of_another_version_is_set_aside_and_an_older_one_is_taken(tmp_path):
    model = network()
    optimizer = trained(model)
    older = checkpoint.save(tmp_path / "older", RECIPE, ROWS, model, optimizer)
    path = checkpoint.save(tmp_path, RECIPE, [*ROWS, {"iteration": 20}], model, optimizer)
    older.rename(tmp_path / older.name)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.warns(UserWarning, match="has format 99, this"):
        assert checkpoint.load(tmp_path, RECIPE).rows == ROWS


def test_one_of_another_recipe_is_refused_and_stays(tmp_path):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    with pytest.raises(CheckpointError, match=r"checkpoint-000001 is of another recipe, with lr=0.1 \(here 0.2\)"):
        checkpoint.load(tmp_path, replace(RECIPE, lr=0.2))
    assert path.is_dir()


def test_a_field_the_writer_did_not_know_had_its_default(tmp_path):
    model = network()
    path = checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    state = json.loads((path / "state.json").read_text())
    del state["recipe"]["width"]
    # The writer's digest is that of what it wrote.
    del state["sha256"]["state.json"]
    state["sha256"]["state.json"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (path / "state.json").write_text(json.dumps(state))
    assert checkpoint.load(tmp_path, RECIPE).rows == ROWS
    with pytest.raises(CheckpointError, match="width"):
        checkpoint.load(tmp_path, replace(RECIPE, width=0.5))


def test_one_of_another_network_is_refused_and_nothing_changes(tmp_path):
    model = network()
    checkpoint.save(tmp_path, RECIPE, ROWS, model, trained(model))
    other = network(width=12)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"does not fit the network.*0.bias \(\(8,\) in the checkpoint, \(12,\)"):
        checkpoint.load(tmp_path, RECIPE).restore(other, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert not optimizer.state
