"""Time every tile choice of the kernels on this GPU: what `iternorm.backends.triton.tiling` was chosen from.

    PYTHONPATH=src python benchmarks/tune_kernels.py --out tune.json

A choice is timed in the pass that the kernel belongs to, with the other kernels as they are: a forward, a backward or
an eval of a layer with groups of 64 channels. Kernels are compiled in parallel processes first, then the passes are
timed one by one as CUDA graphs.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from iternorm.backends.triton import plan as plans
from iternorm.backends.triton import run, tiling
from iternorm.backends.triton.tiling import Tiles

SHAPES = {
    "stem": (256, 64, 112, 112),
    "a1": (64, 64, 32, 32),
    "a1b": (64, 128, 32, 32),
}
BLOCKS = [(32, 4), (64, 4), (128, 4), (64, 8), (128, 8)]
STAGES = [2, 3, 4]
PER_SM = [1, 2, 3, 4]
# Each kernel, and the pass that it belongs to.
KERNELS = {
    "moments": "forward",
    "whiten": "forward",
    "cross_moments": "backward",
    "whiten_backward": "backward",
    "apply": "eval",
}
MODES = {"tf32": (torch.float32, "high"), "bf16": (torch.bfloat16, "high"), "fp32": (torch.float32, "highest")}
_GROUP, _STEPS, _EPS = 64, 5, 1e-5


def passes(shape: tuple[int, ...], mode: str, rows: bool, device: str = "cuda") -> dict[str, Callable[[], object]]:
    """The passes of a layer on an activation of this shape."""
    dtype, setting = MODES[mode]
    torch.set_float32_matmul_precision(setting)
    layout = torch.channels_last if rows else torch.contiguous_format
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout)
    grad, learned = torch.randn_like(x), torch.ones(shape[1], device=device)
    matrix = torch.eye(_GROUP, device=device).repeat(-(-shape[1] // _GROUP), 1, 1)

    def forward():
        return run.forward(x, learned, learned, _GROUP, _STEPS, _EPS)

    state = forward()[1]

    def backward():
        plan = run.plan_of_state(state, x, learned, _GROUP, _STEPS, False, False, False, False)
        return run.backward(grad, x, learned, state, plan, _EPS, True)

    def apply():
        return run.apply(x, matrix, learned, learned, learned, _GROUP)

    return {"forward": forward, "backward": backward, "eval": apply}


def use(kernel: str | None = None, tiles: Tiles | None = None) -> None:
    """Give a kernel these tiles and the others their own; without arguments, all their own."""

    def chosen(name: str, *rest: Any) -> Tiles:
        return tiles if tiles is not None and name == kernel else tiling.tiles_for(name, *rest)

    plans.tiles_for = chosen
    plans._plans.clear()


def tiles_of(kernel: str) -> Tiles:
    """What the last pass gave to a kernel: smaller tiles than those asked for where they do not fit the GPU."""
    (plan,) = plans._plans.values()
    return plan._tiles(kernel)


def graph_time(call: Callable[[], object], repeats: int = 10, replays: int = 5) -> float:
    """The median time of a call in a CUDA graph of so many, in microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / repeats)
    return sorted(times)[len(times) // 2]


def compile_share(arguments: tuple[int, int, list[str]]) -> None:
    """Compile every so manieth choice, for later processes."""
    share, shares, modes = arguments
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    jobs: list[Any] = list(itertools.product(modes, (False, True), KERNELS, BLOCKS, STAGES))
    for mode, rows, kernel, (block, warps), stages in jobs[share::shares]:
        # The programs of a launch are no constant of it: a small activation will do.
        use()
        calls = passes((4, 64, 16, 16), mode, rows)
        use(kernel, Tiles(block, warps, stages, 1))
        try:
            calls[KERNELS[kernel]]()
        except Exception as error:
            print(f"{mode} rows={rows} {kernel} {block} {warps} {stages}: {type(error).__name__}", file=sys.stderr)


def timings(kernel: str, calls: dict[str, Callable[[], object]], repeats: int) -> list[tuple[float, Tiles]]:
    """Every choice for a kernel that fits the GPU, with the time of its pass, the fastest first."""
    found = []
    for (block, warps), stages, per_sm in itertools.product(BLOCKS, STAGES, PER_SM):
        tiles, call = Tiles(block, warps, stages, per_sm), calls[KERNELS[kernel]]
        use(kernel, tiles)
        try:
            call()
            torch.cuda.synchronize()
            if tiles_of(kernel) == tiles:
                found.append((graph_time(call, repeats), tiles))
        except Exception as error:
            print(f"{kernel} {tiles}: {error}"[:200], file=sys.stderr)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--modes", default="tf32,bf16,fp32")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    modes = args.modes.split(",")
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_share, [(i, args.processes, modes) for i in range(args.processes)])
    results = []
    for mode, rows, (name, shape) in itertools.product(modes, (False, True), SHAPES.items()):
        use()
        calls = passes(shape, mode, rows)
        for kernel, part in KERNELS.items():
            found = timings(kernel, calls, 2 if name == "stem" else 10)
            where: dict[str, Any] = {"mode": mode, "rows": rows, "shape": name, "kernel": kernel, "pass": part}
            results += [{**where, "us": time, "tiles": tiles} for time, tiles in found]
            best = "  ".join(f"{time:.1f} us {tuple(tiles)}" for time, tiles in found[:3])
            print(f"{mode} {'NHWC' if rows else 'NCHW'} {name} {kernel}, {part}: {best}", flush=True)
        del calls
        torch.cuda.empty_cache()
    with open(args.out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
