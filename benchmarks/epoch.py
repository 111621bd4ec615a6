"""Times epochs of the paper's VGG on CIFAR-10, trained by the loop of the experiments, data and augmentation included.

    PYTHONPATH=src python benchmarks/epoch.py --device cuda --json benchmarks/results/epoch-h200.json

Evaluation is not part of an epoch's time. The first epoch, which compiles and captures, is left out of the median.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from iternorm.experiments.families import vgg_cifar
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training.train import train
from iternorm.report.files import write_text_atomically
from iternorm.report.provenance import provenance

NORMS = ("BN", "IterNorm T=5 d=64", "IterNorm T=5", "DBN-16")
PRECISIONS = ("fp32", "tf32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--norm", action="append", choices=NORMS, help="repeat it; all unless given")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="repeat it; all unless given")
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for norm in arguments.norm or NORMS:
        for precision in arguments.precision or PRECISIONS:
            basic = Recipe.from_config(vgg_cifar.configuration("basic", norm, 0, Plan(device=arguments.device)))
            recipe = dataclasses.replace(basic, precision=precision, epochs=arguments.epochs, milestones=())
            with tempfile.TemporaryDirectory() as folder:
                context = Context(arguments.device, lambda *args, **values: None, Path(folder))
                epochs = train(recipe, context, capture=False if arguments.eager else None)
            seconds = [epoch["seconds"] for epoch in epochs]
            last = {key: epochs[-1][key] for key in ("train_loss", "train_error", "test_error")}
            row = {"norm": norm, "precision": precision, "median_s": statistics.median(seconds[1:] or seconds)}
            rows.append({**row, "eager": arguments.eager, "seconds": seconds, **last})
            print(f"{norm:18} {precision:5} {row['median_s']:6.2f} s an epoch  {last}", flush=True)
            if arguments.json is not None:
                # After each, so that a run that is cut short leaves what it has.
                result = {"provenance": provenance(arguments.device), "batch_size": 256, "rows": rows}
                write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
