"""Trains on the processes that torchrun starts. Run by test_train_torchrun.py.

    python -m torch.distributed.run --standalone --nproc-per-node 2 torchrun_training.py RECIPES.json FOLDER

Each process writes the rows of all recipes to ``FOLDER/rows-RANK.json``.
"""

import json
import os
import sys
from pathlib import Path

import torch

from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.train import train


def main(recipes, folder):
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    told, rows = [], []
    for config in json.loads(recipes.read_text()):
        context = Context("cpu", lambda done, total, **values: told.append(done), folder / config["job"])
        rows.append(train(Recipe.from_config(config), context, checkpoint_seconds=0))
    result = {"rows": rows, "told": len(told), "size": torch.distributed.get_world_size()}
    (folder / f"rows-{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
