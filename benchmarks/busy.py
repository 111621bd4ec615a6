"""Times layers alone and beside processes that keep cores busy, with one thread of torch and with two.

    PYTHONPATH=src python benchmarks/busy.py --json benchmarks/results/busy-epyc.json

Quiet and busy spells take turns. In each, every layer with every number of threads takes turns too, each timing after
an untimed step. The ratios are those to the convolution in the same number of threads and in the same spells.
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
from iternorm.timing.cpu.candidates import Candidate
from iternorm.timing.cpu.devices import Case, CpuDevice, Entry, set_malloc_thresholds
from iternorm.timing.threads import num_threads
from iternorm.timing.turns import in_turns

CONVOLUTION = "conv3x3"
SPELLS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--busy", type=int, default=1, help="how many processes keep a core busy")
    parser.add_argument("--rounds", type=int, default=10, help=f"timings of each in a spell; there are {SPELLS} spells")
    parser.add_argument("--shape", type=int, nargs=4, default=(64, 64, 32, 32))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_malloc_thresholds()
    case, clock = Case(tuple(arguments.shape), channels_last=arguments.channels_last), CpuDevice()
    samples = time_layers(case, clock, arguments.threads, arguments.busy, arguments.rounds)
    rows = []
    for (name, threads, busy), values in samples.items():
        median, convolution = statistics.median(values), statistics.median(samples[CONVOLUTION, threads, busy])
        row = {"name": name, "threads": threads, "busy": busy, "median_ms": median, "ratio": median / convolution}
        rows.append({**row, "min_ms": min(values), "samples_ms": values})
        print(
            f"{name:12} {threads} threads, {busy} busy: {median:7.1f} ms, at least {min(values):6.1f}, "
            f"{row['ratio']:.2f} of the convolution"
        )
    if arguments.json is not None:
        result = {"provenance": provenance(), "shape": case.shape, "channels_last": case.channels_last, "rows": rows}
        write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


def time_layers(case: Case, clock: CpuDevice, threads: list[int], busy: int, rounds: int) -> dict:
    """The timings in ms, by the name of the layer, the number of threads, and that of busy processes."""
    device = torch.device("cpu")
    x, grad = case.make(device)
    entries = [Entry(candidate, case, device, x, grad) for candidate in candidates(case.shape[1])]
    entries = [(contestant, n) for contestant in entries for n in threads]
    samples = {(contestant.candidate.name, n, load): [] for contestant, n in entries for load in (0, busy)}
    for load in (0, busy) * SPELLS:
        with busy_processes(load):
            for index, (contestant, n) in in_turns(entries, rounds, warmup=1):
                with num_threads(n):
                    clock.milliseconds(contestant)
                    elapsed = clock.milliseconds(contestant)
                if index >= 0:
                    samples[contestant.candidate.name, n, load].append(elapsed)
    return samples


def candidates(channels: int) -> list[Candidate]:
    convolution = partial(nn.Conv2d, channels, channels, kernel_size=3, padding=1, bias=False)
    return [
        Candidate(CONVOLUTION, convolution),
        Candidate("BatchNorm2d", partial(nn.BatchNorm2d, channels)),
        Candidate("IterNorm2d", partial(IterNorm2d, channels)),
    ]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but run, for the block."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
