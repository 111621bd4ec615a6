"""Checkpoints of a training run: weights and momentum as safetensors, the rest as JSON, no pickle.

A checkpoint is a folder ``checkpoint-ROWS`` with three files, of which the last has the digests of all. It is written
under another name, flushed to disk and renamed, and only then is the previous one removed. So once a checkpoint was
finished, a complete one exists at any moment.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iternorm.experiments.jobs.results import Row, set_aside
from iternorm.experiments.recipe import Recipe

FORMAT = 1
_PREFIX = "checkpoint-"
_FILES = _WEIGHTS, _MOMENTUM, _STATE = "weights.safetensors", "momentum.safetensors", "state.json"


class CheckpointError(ValueError):
    """A complete checkpoint, but of another recipe or network."""


class _UnusableError(ValueError):
    """A checkpoint that is truncated, damaged or of another version."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes:
        path: Its folder.
        rows: The rows so far; they tell the position too.
        weights: Parameters and buffers by name.
        momentum: The optimizer's momentum by the parameter's name; empty before the first step and without momentum.
    """

    path: Path
    rows: list[Row]
    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put weights, buffers and momentum into a network and its optimizer.

        Raises:
            CheckpointError: They are those of another network. Nothing is changed then.
        """
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        found = {name: tensor.shape for name, tensor in self.weights.items()}
        parameters = dict(model.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        strange = {name for name, tensor in self.momentum.items() if shapes.get(name) != tensor.shape}
        strange |= {name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)}
        if strange:
            first = min(strange)
            here, there = (tuple(shape[first]) if first in shape else "absent" for shape in (expected, found))
            raise CheckpointError(
                f"the checkpoint {self.path} does not fit the network: {len(strange)} tensors differ, the first is "
                f"{first} ({there} in the checkpoint, {here} in the network): remove the folder to train anew"
            )
        model.load_state_dict(self.weights)
        for name, tensor in self.momentum.items():
            parameter = parameters[name]
            # In the parameter's memory format.
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(tensor).detach_()


def save(folder: Path, recipe: Recipe, rows: Sequence[Row], model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint into `folder` and remove the older ones there.

    Args:
        folder: The run's folder.
        recipe: What is being trained.
        rows: The rows so far, at least one.
        model: The network, without wrappers.
        optimizer: Of its parameters.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: It cannot be written. The older ones stay.
    """
    from safetensors import SafetensorError

    target = folder / f"{_PREFIX}{len(rows):06d}"
    partial = folder / f".{target.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(partial, recipe, rows, model, optimizer)
        if target.exists():
            # Only if a run was resumed from an older one by hand.
            _remove(target)
        partial.rename(target)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"the checkpoint {target} could not be written: {why}: make room or change permissions there"
        ) from error
    _remove_others(target)
    return target


def _write(
    place: Path, recipe: Recipe, rows: Sequence[Row], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """The three files, flushed to disk."""
    from safetensors.torch import save_file

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    save_file(_apart(model.state_dict()), place / _WEIGHTS)
    momentum = {}
    for name, parameter in model.named_parameters():
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            momentum[name] = buffer.contiguous()
    save_file(momentum, place / _MOMENTUM)
    state: dict[str, Any] = {"format": FORMAT, "recipe": dataclasses.asdict(recipe), "rows": list(rows)}
    state["sha256"] = {name: _digest(place / name) for name in (_WEIGHTS, _MOMENTUM)}
    state["sha256"][_STATE] = _digest_of(state)
    (place / _STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    for name in _FILES:
        _to_disk(place / name)
    _to_disk(place)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous. Those that share memory with one before are copied: safetensors refuses tied weights."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = (tensor.clone() if memory in seen else tensor).contiguous()
        seen.add(memory)
    return found


def load(folder: Path, recipe: Recipe) -> Checkpoint | None:
    """The newest checkpoint of a folder, or None.

    One that is truncated, damaged or of another version is renamed with a warning, and the one before it, or none, is
    taken.

    Raises:
        CheckpointError: The checkpoint is complete, but of another recipe.
    """
    if not folder.is_dir():
        return None
    for leftover in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.is_dir() and _number(path) is not None]
    for path in sorted(paths, key=lambda path: _number(path) or 0, reverse=True):
        try:
            found = _read(path, recipe)
        except _UnusableError as error:
            warnings.warn(f"{error}; it is renamed to {set_aside(path).name} and not used", stacklevel=2)
            continue
        _remove_others(path)
        return found
    return None


def _read(path: Path, recipe: Recipe) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        found = state.get("format") if isinstance(state, dict) else None
        if found != FORMAT:
            raise _UnusableError(
                f"the checkpoint {path} has format {found!r}, this version of iternorm writes {FORMAT}"
            )
        weights, momentum = load_file(path / _WEIGHTS), load_file(path / _MOMENTUM)
        _check_digests(path, state)
        rows, made_by = list(state["rows"]), dict(state["recipe"])
    except _UnusableError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise _UnusableError(f"the checkpoint {path} is not complete ({error})") from error
    wanted: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    # A field that the writer did not know had its default.
    defaults = {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in dataclasses.fields(Recipe)
    }
    differing = [
        f"{name}={made_by.get(name, defaults.get(name))!r} (here {wanted.get(name)!r})"
        for name in sorted(wanted.keys() | made_by.keys())
        if made_by.get(name, defaults.get(name)) != wanted.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint {path} is of another recipe, with {', '.join(differing)}: "
            "train in another folder, or remove it to train anew"
        )
    return Checkpoint(path, rows, weights, momentum)


def _check_digests(path: Path, state: dict[str, Any]) -> None:
    written = state.get("sha256")
    if not isinstance(written, dict):
        written = {}
    if without := [name for name in _FILES if name not in written]:
        raise _UnusableError(f"the checkpoint {path} is not complete (no digest of {', '.join(without)})")
    others = {name: digest for name, digest in written.items() if name != _STATE}
    found = {name: _digest(path / name) for name in (_WEIGHTS, _MOMENTUM)}
    found[_STATE] = _digest_of({**state, "sha256": others})
    if damaged := [name for name in _FILES if found[name] != written[name]]:
        raise _UnusableError(f"the checkpoint {path} is damaged: {', '.join(damaged)} is not what was written")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(state: Mapping[str, Any]) -> str:
    # Through JSON once, so that what was written and what is read are the same text.
    plain = json.loads(json.dumps(state, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _number(path: Path) -> int | None:
    """How many rows the name of a checkpoint says it has, None where it is no checkpoint."""
    number = path.name.removeprefix(_PREFIX)
    return int(number) if number.isdigit() else None


def _remove_others(newest: Path) -> None:
    for other in newest.parent.glob(f"{_PREFIX}*"):
        if other != newest and _number(other) is not None:
            _remove(other)


def _remove(path: Path) -> None:
    """Remove a folder; a kill on the way leaves it under a name that is not a checkpoint's."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
