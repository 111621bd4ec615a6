"""Times layers beside a process that keeps one core busy, with one thread of torch and with several.

    PYTHONPATH=src python benchmarks/busy.py --threads 1 2

A round times every layer with every number of threads, first alone and then beside the busy process, each after an
untimed step. The last column compares with the convolution of the same round state and the same number of threads.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from iternorm.layers.norms import IterNorm2d
from iternorm.report.files import write_text_atomically
from iternorm.report.provenance import provenance
from iternorm.timing.cpu.devices import Case, Contestant, CpuDevice, set_malloc_thresholds
from iternorm.timing.cpu.rivals import Rival
from iternorm.timing.threads import num_threads
from iternorm.timing.turns import in_turns

CONVOLUTION = "conv3x3"
# What the clock sees of a thread that waits for its turn on a core: the length of one turn, a few milliseconds.
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shape", type=int, nargs=4, default=(64, 64, 32, 32))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--busy", type=int, default=1, help="busy processes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_malloc_thresholds()
    case, cpu = Case(tuple(arguments.shape), channels_last=arguments.channels_last), torch.device("cpu")
    x, grad = case.make(cpu)
    contestants = [Contestant(rival, case, cpu, x, grad) for rival in rivals(case.shape[1])]
    keys = [(contestant, threads) for contestant in contestants for threads in arguments.threads]
    samples = {(c.rival.name, threads, load): [] for c, threads in keys for load in (0, arguments.busy)}
    clock = CpuDevice()
    for load in (0, arguments.busy) * 4:
        with busy_processes(load):
            for index, (contestant, threads) in in_turns(keys, -(-arguments.rounds // 4), warmup=1):
                with num_threads(threads):
                    clock.milliseconds(contestant)
                    elapsed = clock.milliseconds(contestant)
                if index >= 0:
                    samples[contestant.rival.name, threads, load].append(elapsed)
    rows = []
    for (name, threads, load), values in samples.items():
        convolution = samples[CONVOLUTION, threads, load]
        row = {"name": name, "threads": threads, "busy": load, "median_ms": statistics.median(values)}
        row |= {"min_ms": min(values), "ratio": row["median_ms"] / statistics.median(convolution)}
        rows.append(row)
        print(
            f"{name:22} threads {threads}  busy {load}  median {row['median_ms']:7.1f}  min {row['min_ms']:7.1f} ms  "
            f"{row['ratio']:.2f} of the convolution  max {max(values):.1f}"
        )
    if arguments.json is not None:
        result = {"provenance": provenance(), "shape": case.shape, "channels_last": case.channels_last, "rows": rows}
        write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


def rivals(channels: int) -> list[Rival]:
    convolution = partial(nn.Conv2d, channels, channels, kernel_size=3, padding=1, bias=False)
    return [
        Rival(CONVOLUTION, convolution),
        Rival("BatchNorm2d", partial(nn.BatchNorm2d, channels)),
        Rival("IterNorm2d", partial(IterNorm2d, channels)),
        Rival("IterNorm2d torch", partial(IterNorm2d, channels, impl="torch")),
    ]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but run, for the block."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
