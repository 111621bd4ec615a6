"""Time the iteration above 64 channels with other blocks on this GPU: what `tiling.blocks_for` is chosen from.

    PYTHONPATH=src python benchmarks/tune_iteration.py --sizes 128 256 512

A line is one size and precision: the chosen blocks first, then all that were tried, forward and backward apart, the
fastest first. Times are of launches in a CUDA graph. A choice that the GPU has no room for is left out.
"""

import argparse
import itertools
import statistics

import torch
from triton import OutOfResources

from iternorm.backends.triton import iteration, tiling
from iternorm.backends.triton.tiling import Blocks

SIDES, DEPTHS, STAGES, WARPS = (32, 64), (32, 64, 128), (2, 3, 4), (2, 4)
NUM_ITERS, LAUNCHES, ROUNDS = 5, 10, 7


def microseconds(function) -> float:
    """The median time of a call, in a graph of several."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            function()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def time_both(covariance) -> tuple[float, float]:
    whitening, saved = iteration.solve(covariance, NUM_ITERS)
    forward = microseconds(lambda: iteration.solve(covariance, NUM_ITERS))
    arguments = (covariance, covariance, whitening, saved, NUM_ITERS)
    return forward, microseconds(lambda: iteration.solve_backward(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the iteration above 64 channels with other blocks.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--precisions", nargs="+", default=["high", "highest"])
    arguments = parser.parse_args()
    chosen = tiling.blocks_for
    for size, precision in itertools.product(arguments.sizes, arguments.precisions):
        torch.set_float32_matmul_precision(precision)
        samples = torch.randn(4 * size, size, device="cuda")
        covariance = torch.cov(samples.T)[None] + 1e-5 * torch.eye(size, device="cuda")
        tiling.blocks_for = chosen
        iteration._chain_for.cache_clear()
        print(f"{size} {precision}: now {time_both(covariance)}", flush=True)
        found = []
        for values in itertools.product(SIDES, DEPTHS, STAGES, WARPS):
            blocks = Blocks(*values)
            tiling.blocks_for = lambda *_, blocks=blocks: blocks
            iteration._chain_for.cache_clear()
            try:
                found.append((blocks, *time_both(covariance)))
            except OutOfResources:
                continue
        for which, name in ((1, "forward"), (2, "backward")):
            best = sorted(found, key=lambda row: row[which])[:5]
            print(f"  {name}: " + "; ".join(f"{tuple(row[0])} {row[which]:.1f}" for row in best), flush=True)


if __name__ == "__main__":
    main()
