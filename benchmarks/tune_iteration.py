"""Time the iteration above 64 channels with other blocks on this GPU: what `tiling.blocks_for` is chosen from.

    PYTHONPATH=src python benchmarks/tune_iteration.py --sizes 128 256 512

For each size and precision it prints the time with the chosen blocks, then the five fastest of all, forward and
backward apart. Times are of launches in a CUDA graph. A choice that the GPU has no room for is left out.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from contextlib import suppress

import torch
from triton import OutOfResources

from iternorm.backends.triton import tiling
from iternorm.backends.triton.launches import iteration
from iternorm.backends.triton.tiling import Blocks
from tune_kernels import graph_time, warm

CHOICES = [Blocks(*values) for values in itertools.product((16, 32, 64), (32, 128), (3,), (2, 4), (False, True))]
NUM_ITERS = 5
_chosen = tiling.blocks_for


def use(blocks: Blocks | None = None) -> None:
    """Multiply in these blocks, or in those that are chosen."""
    tiling.blocks_for = _chosen if blocks is None else lambda *_: blocks
    iteration._chain_for.cache_clear()


def covariance_of(size: int, precision: str, device: str = "cuda") -> torch.Tensor:
    torch.set_float32_matmul_precision(precision)
    return torch.cov(torch.randn(size, 4 * size, device=device))[None] + 1e-5 * torch.eye(size, device=device)


def both_ways(covariance: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """The iteration forward and backward, each run once."""
    whitening, saved = iteration.solve(covariance, NUM_ITERS)
    arguments = (covariance, covariance, whitening, saved, NUM_ITERS)
    return lambda: iteration.solve(covariance, NUM_ITERS), warm(lambda: iteration.solve_backward(*arguments))


def compile_share(arguments: tuple[int, int, list[tuple[int, str]]]) -> None:
    """Compile every so manieth choice, for later processes."""
    share, shares, wanted = arguments
    for (size, precision), blocks in list(itertools.product(wanted, CHOICES))[share::shares]:
        use(blocks)
        with suppress(OutOfResources):
            both_ways(covariance_of(size, precision))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the iteration above 64 channels with other blocks.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--precisions", nargs="+", default=["high", "highest"])
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    wanted = list(itertools.product(arguments.sizes, arguments.precisions))
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_share, [(i, arguments.processes, wanted) for i in range(arguments.processes)])
    for size, precision in wanted:
        covariance = covariance_of(size, precision)
        use()
        now = ", ".join(f"{graph_time(call):.1f}" for call in both_ways(covariance))
        found = []
        for blocks in CHOICES:
            use(blocks)
            with suppress(OutOfResources):
                found.append((blocks, *map(graph_time, both_ways(covariance))))
        print(f"{size} {precision}: now {now} us", flush=True)
        for which, name in ((1, "forward"), (2, "backward")):
            best = sorted(found, key=lambda row: row[which])[:5]
            print(f"  {name}: " + "; ".join(f"{tuple(row[0])} {row[which]:.1f}" for row in best), flush=True)


if __name__ == "__main__":
    main()
