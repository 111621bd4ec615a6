"""Trains in processes that are really killed, and trains on from what they left. Run by test_train_killed.py.

    python killed_runs.py FOLDER

Everything is imported and the data made once; each trial is a fork of this process. Prints one JSON object: what an
uninterrupted run
gave, and what each killed and resumed run gave.
"""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import safetensors.torch
import torch

from iternorm.experiments.data import generated
from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training import checkpoint
from iternorm.experiments.training.graph import EagerStep
from iternorm.experiments.training.train import train

torch.set_num_threads(1)
generated.look_alike = functools.cache(generated.look_alike)

DATA = {"train_examples": 256, "test_examples": 64, "width": 0.2}
RECIPES = {
    "epochs": Recipe("generated-mnist", "mlp", "IterNorm T=3", 64, 0.1, 3, momentum=0.9, **DATA),
    "inside": Recipe("generated-mnist", "mlp", "BN", 2, 0.05, 1, momentum=0.9, record_every=50, **DATA),
}
RANDOM_KILLS = 4


def in_fork(function):
    """Run a function in a process of its own and return that process's id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def finish(recipe, folder):
    """Train to the end and note what came of it."""
    rows = train(recipe, Context("cpu", lambda *args, **values: None, folder), checkpoint_seconds=0)
    (path,) = folder.glob("checkpoint-*")
    digests = {
        name: hashlib.sha256((path / f"{name}.safetensors").read_bytes()).hexdigest()
        for name in ("weights", "momentum")
    }
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    left = sorted(entry.name for entry in folder.iterdir())
    (folder.parent / f"{folder.name}.json").write_text(json.dumps({"rows": rows, **digests, "left": left}))


def outcome(recipe, folder):
    """Train to the end in a process that nobody kills."""
    pid = in_fork(lambda: finish(recipe, folder))
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"the run that should end failed with status {status}")
    return json.loads((folder.parent / f"{folder.name}.json").read_text())


def kill_at(event):
    """Let this process be killed just before it writes, syncs, renames or removes something for the n-th time."""
    seen = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    checkpoint.os.fsync = counted(os.fsync)
    checkpoint.shutil.rmtree = counted(shutil.rmtree)
    checkpoint.Path.rename = counted(Path.rename)
    checkpoint.Path.write_text = counted(Path.write_text)
    safetensors.torch.save_file = counted(safetensors.torch.save_file)


def killed_while_writing(recipe, folder):
    """Kill at each event of writing checkpoints in turn, each time in a new folder, until a run gets through."""
    found = []
    for event in range(1, 1000):
        place = folder / f"event{event}"

        def work(place=place, event=event):
            kill_at(event)
            finish(recipe, place)

        _, status = os.waitpid(in_fork(work), 0)
        if status == 0:
            return found
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"a run failed with status {status} before it was killed at event {event}")
        kept = checkpoint.load(place, recipe)
        found.append({"kept": 0 if kept is None else len(kept.rows), "outcome": outcome(recipe, place)})
    raise RuntimeError("no run got through")


def killed_at_random(recipe, folder, seed):
    """Kill one run again and again, before a step drawn at random, and last from outside at a random time."""
    choices = random.Random(seed)
    kills = 0
    for _ in range(RANDOM_KILLS):
        step = choices.randint(1, recipe.record_every or 4)

        def work(step=step):
            kill_before(step)
            finish(recipe, folder)

        _, status = os.waitpid(in_fork(work), 0)
        kills += os.WIFSIGNALED(status)
    pid = in_fork(lambda: finish(recipe, folder))
    time.sleep(choices.uniform(0, 0.2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"kills": kills, "outcome": outcome(recipe, folder)}


def kill_before(step):
    """Let this process be killed just before its n-th step of training."""
    real, taken = EagerStep.__call__, 0

    def counted(self, images, labels):
        nonlocal taken
        taken += 1
        if taken == step:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, images, labels)

    EagerStep.__call__ = counted


def main(folder):
    finish(RECIPES["epochs"], folder / "warm-up")
    results = {}
    for name, recipe in RECIPES.items():
        place = folder / name
        place.mkdir()
        results[name] = {
            "expected": outcome(recipe, place / "whole"),
            "writing": killed_while_writing(recipe, place),
            "random": [killed_at_random(recipe, place / f"random{seed}", seed) for seed in range(3)],
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
