"""Two trees of the source on one GPU, in turns: which rows became slower.

git worktree add ../old 38ef59e
PYTHONPATH=src python benchmarks/trees.py --old ../old/src --new src --json trees.json

A row is one layer on one activation: forward and backward in a CUDA graph. Each tree runs in its own processes, and
they take turns, so that a change of the machine's speed affects both. `--batch-norm` times nn.BatchNorm2d on the same
activations, once, in both layouts; rows are divided by the faster one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

STEPS, REPLAYS = 10, 5


class Row(NamedTuple):
    """A layer on an activation; `num_iters` of 0 stands for DecorrelatedBatchNorm2d."""

    shape: tuple[int, int, int, int]
    dtype: str
    layout: str
    group_size: int
    num_iters: int
    exact: bool = False
    relu: bool = False
    residual: bool = False

    def __str__(self) -> str:
        layer = f"IterNorm d={self.group_size} T={self.num_iters}" if self.num_iters else f"DBN d={self.group_size}"
        ends = f"{' exact' if self.exact else ''}{' relu' if self.relu else ''}{' residual' if self.residual else ''}"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.layout} {layer}{ends}"


def rows() -> list[Row]:
    """The rows of `iternorm bench --device cuda` that are our kernels', small groups, float16, ReLU, residual, wide."""
    groups = {
        (64, 64, 32, 32): [(64, 5), (64, 3), (64, 7), (16, 0)],
        (64, 128, 32, 32): [(64, 5), (64, 3), (64, 7), (128, 3), (128, 5), (128, 7), (16, 0)],
        (256, 64, 32, 32): [(64, 5), (16, 5), (8, 5), (1, 5)],
        (256, 512, 4, 4): [(64, 5), (512, 5), (8, 5), (1, 5)],
        (128, 160, 32, 32): [(64, 5), (32, 5), (160, 5)],
        (256, 64, 112, 112): [(64, 5)],
    }
    found = []
    for shape, layers in groups.items():
        for dtype in ("float32", "bfloat16"):
            for layout in ("NCHW", "NHWC"):
                for group_size, num_iters in layers:
                    exact = (False, True) if (group_size, num_iters, dtype) == (64, 5, "float32") else (False,)
                    found += [Row(shape, dtype, layout, group_size, num_iters, each) for each in exact]
    for shape in groups:
        for layout in ("NCHW", "NHWC"):
            found += [Row(shape, "float16", layout, 64, 5)]
            for dtype in ("float32", "bfloat16", "float16"):
                found += [Row(shape, dtype, layout, 64, 5, relu=True, residual=each) for each in (False, True)]
    # All channels together.
    small = (256, 256, 8, 8), (256, 512, 2, 2), (256, 512, 7, 7)
    large = (1024, 256, 8, 8), (64, 512, 28, 28), (64, 1024, 14, 14), (128, 256, 56, 56)
    for shape in small + large:
        for layout in ("NCHW", "NHWC"):
            found += [Row(shape, "float32", layout, shape[1], 5, exact) for exact in (False, True)]
            found += [Row(shape, dtype, layout, shape[1], 5) for dtype in ("bfloat16", "float16")]
    found += [Row((64, 128, 32, 32), "float32", layout, 128, 5, exact=True) for layout in ("NCHW", "NHWC")]
    return found


def microseconds(row: Row, batch_norm: bool = False) -> float:
    """One step of a row, or of BatchNorm on its activation, in a graph of `STEPS`: the median of `REPLAYS`.

    The clock is not the package's own, which is that of either tree.
    """
    import iternorm

    torch.set_float32_matmul_precision("highest" if row.exact else "high")
    torch.manual_seed(0)
    memory_format = torch.channels_last if row.layout == "NHWC" else torch.contiguous_format
    x, gradient, residual = (
        torch.randn(row.shape, device="cuda", dtype=getattr(torch, row.dtype)).to(memory_format=memory_format)
        for _ in range(3)
    )
    channels = row.shape[1]
    if batch_norm:
        layer = torch.nn.BatchNorm2d(channels)
    elif row.num_iters:
        activation = "relu" if row.relu else None
        layer = iternorm.IterNorm2d(channels, group_size=row.group_size, num_iters=row.num_iters, activation=activation)
    else:
        layer = iternorm.DecorrelatedBatchNorm2d(channels, group_size=row.group_size)
    inputs, more = [x.requires_grad_(), *layer.cuda().parameters()], {}
    if row.residual and not batch_norm:
        more = {"residual": residual.requires_grad_()}
        inputs.append(residual)

    def step() -> None:
        torch.autograd.grad(layer(x, **more), inputs, gradient)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / STEPS)
    return median(times)


def _in_other_layout(row: str) -> str:
    return row.replace("NCHW", "NHWC") if "NCHW" in row else row.replace("NHWC", "NCHW")


def child(tree: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, __file__, "--measure", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen) -> dict[str, float]:
    output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"A process that timed rows ended with {process.returncode}; its error is above.")
    return json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="folder with the package iternorm of the older tree")
    parser.add_argument("--new", type=Path, help="the same of the newer tree")
    parser.add_argument("--turns", type=int, default=3, help="how often each tree is timed; 0 compiles kernels only")
    parser.add_argument("--processes", type=int, default=12, help="that compile kernels first")
    parser.add_argument("--only", default="", help="a pattern for the names of rows")
    parser.add_argument("--batch-norm", action="store_true", help="time BatchNorm too")
    parser.add_argument("--json", type=Path, help="write all timings to this file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        part, parts = arguments.part
        chosen = [row for row in rows() if re.search(arguments.only, str(row))][part::parts]
        print(json.dumps({str(row): microseconds(row, arguments.batch_norm) for row in chosen}))
        return
    trees = {"old": arguments.old, "new": arguments.new}
    for name, tree in trees.items():
        if tree is None or not (tree / "iternorm").is_dir():
            parser.error(f"--{name} must be a folder with the package iternorm in it, such as src; got {tree}.")
    if not any(re.search(arguments.only, str(row)) for row in rows()):
        parser.error(f"--only {arguments.only!r} suits no row; their names are such as {str(rows()[0])!r}.")
    only = ("--only", arguments.only)
    compilers = [
        child(tree, "--part", str(part), str(arguments.processes // 2), *only)
        for tree in trees.values()
        for part in range(arguments.processes // 2)
    ]
    for process in compilers:
        answer(process)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for _ in range(arguments.turns):
        for name, tree in trees.items():
            for row, value in answer(child(tree, *only)).items():
                times[name].setdefault(row, []).append(value)
    batch_norm = answer(child(arguments.new, "--batch-norm", *only)) if arguments.batch_norm else {}
    found = {}
    for row, new in times["new"].items():
        old = times["old"][row]
        found[row] = {"old_us": old, "new_us": new, "ratio": median(new) / median(old)}
        line = f"{row:55s} {median(old):8.1f} {median(new):8.1f} us {found[row]['ratio']:6.3f}"
        if batch_norm:
            layouts = [batch_norm[name] for name in (row, _in_other_layout(row)) if name in batch_norm]
            found[row]["batch_norm_us"] = batch_norm[row]
            line += f"  {median(new) / min(layouts):6.2f} of BatchNorm"
        print(line)
    if arguments.json is not None:
        from iternorm.report.files import write_text_atomically
        from iternorm.report.provenance import provenance

        result = {"provenance": provenance("cuda"), "rows": found}
        write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
