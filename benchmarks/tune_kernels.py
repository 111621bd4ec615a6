"""Time every tile choice of the kernels on this GPU: what `iternorm.backends.triton.tiling` was chosen from.

    PYTHONPATH=src python benchmarks/tune_kernels.py --out tune.json

Kernels are compiled in parallel processes first, then timed one by one as CUDA graphs.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
from typing import Any

import torch

from iternorm.backends.triton import plan as plans
from iternorm.backends.triton.runtime import stream_of
from iternorm.backends.triton.tiling import Tiles

SHAPES = {
    "stem": (256, 64, 112, 112),
    "a1": (64, 64, 32, 32),
    "a1b": (64, 128, 32, 32),
}
BLOCKS = [(32, 4), (64, 4), (128, 4), (64, 8), (128, 8)]
STAGES = [2, 3, 4]
PER_SM = [1, 2, 3, 4]
KERNELS = ["moments", "cross_moments", "whiten", "whiten_backward", "apply"]
MODES = {"tf32": (torch.float32, "high"), "bf16": (torch.bfloat16, "high"), "fp32": (torch.float32, "highest")}


def prepare(shape, mode, rows):
    dtype, setting = MODES[mode]
    torch.set_float32_matmul_precision(setting)
    layout = torch.channels_last if rows else torch.contiguous_format
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    grad, out = torch.randn_like(x), torch.empty_like(x)
    count = -(-shape[1] // 64)
    matrix = torch.empty(count, 64, 64, device="cuda")
    vector = torch.ones(shape[1], device="cuda")
    matrix.copy_(torch.eye(64, device="cuda"))
    state = torch.zeros(count * 64 * 64 * 32, device="cuda")
    workspace = torch.empty(count * 1024 * 64 * 66, device="cuda")

    def call(kernel):
        plan = plans.plan_for(x, vector, vector, 64, 5, None)
        stream = stream_of(x.device)
        activation, gradient, result, v = x.data_ptr(), grad.data_ptr(), out.data_ptr(), vector.data_ptr()
        partial, reduced = workspace.data_ptr(), matrix.data_ptr()
        if kernel == "moments":
            plan.launches["moments"](stream, (activation, activation, 0, 0, partial))
            plan.launches["reduce"](stream, (partial, reduced, v, v, 0, 0))
        elif kernel == "cross_moments":
            plan.launches["cross_moments"](stream, (gradient, activation, 0, v, partial))
            plan.launches["cross_reduce"](stream, (partial, reduced, v, 0, 0, 0))
        elif kernel == "apply":
            plan.launches["apply"](stream, (activation, result, reduced, v, v, v))
        elif kernel == "whiten":
            kept = (state.data_ptr() + 4 * count * 64 * 64, state.data_ptr() + 8 * count * 64 * 64)
            statistics = (reduced, v, v, *kept, v, v, 0, 0, 0, 0)
            plan.launches["whiten"](stream, (activation, result, *statistics, 1e-5, 0.1))
        else:
            kept = (state.data_ptr() + 4 * count * 64 * 64, state.data_ptr() + 8 * count * 64 * 64)
            statistics = (reduced, reduced, v, *kept, v, v, v)
            plan.launches["whiten_backward"](stream, (gradient, activation, 0, result, *statistics, 1e-5))

    return {kernel: functools.partial(call, kernel) for kernel in KERNELS}


def use(tiles):
    plans.tiles_for = lambda *_: tiles
    plans._plans.clear()


def graph_time(call, repeats=10, replays=5):
    call()
    torch.cuda.synchronize()
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


def compile_share(arguments):
    share, shares, modes = arguments
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    jobs: list[Any] = list(itertools.product(modes, (False, True), KERNELS, BLOCKS, STAGES))
    for index, (mode, rows, kernel, (block, warps), stages) in enumerate(jobs):
        if index % shares != share:
            continue
        # The block size of the reduction and its launch do not depend on the tiles: a small activation will do.
        use(Tiles(block, warps, stages, 1))
        try:
            prepare((4, 64, 16, 16), mode, rows)[kernel]()
        except Exception as error:
            print(f"{mode} rows={rows} {kernel} {block} {warps} {stages}: {type(error).__name__}", file=sys.stderr)


def main():
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
        calls = prepare(shape, mode, rows)
        for kernel in KERNELS:
            found = []
            for (block, warps), stages, per_sm in itertools.product(BLOCKS, STAGES, PER_SM):
                use(Tiles(block, warps, stages, per_sm))
                try:
                    found.append((graph_time(calls[kernel], 2 if name == "stem" else 10), block, warps, stages, per_sm))
                except Exception as error:
                    print(f"{mode} {kernel} {block} {warps} {stages}: {error}"[:200], file=sys.stderr)
            found.sort()
            where: dict[str, Any] = {"mode": mode, "rows": rows, "shape": name, "kernel": kernel}
            results += [{**where, "us": t, "tiles": rest} for t, *rest in found]
            best = "  ".join(f"{t:.1f}us {rest}" for t, *rest in found[:3])
            print(f"{mode} {'NHWC' if rows else 'NCHW'} {name} {kernel}: {best}", flush=True)
        del calls
        torch.cuda.empty_cache()
    with open(args.out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
