"""Time every tile choice of the kernels on this GPU: what `iternorm.backends.triton.tiling` was chosen from.

    PYTHONPATH=src python benchmarks/tune_kernels.py --out tune.json

A choice is timed in the pass that the kernel belongs to, with the other kernels as they are: a forward, a backward or
an eval of a layer with groups of 64 channels, the same with a ReLU or with all channels together, a forward or a
backward of GroupWhitening2d, a batch of a stream. Kernels are compiled in parallel processes first, then passes are
timed one by one as CUDA graphs.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iternorm.backends.triton import items, run, tiling
from iternorm.backends.triton import plan as plans
from iternorm.backends.triton.layout import BLOCK, padded_size
from iternorm.backends.triton.tiling import Tiles
from iternorm.backends.triton.tools import stream

STAGES = [2, 3, 4]
PER_SM = [1, 2, 3, 4]
MODES = {
    "tf32": (torch.float32, "high"),
    "bf16": (torch.bfloat16, "high"),
    "fp16": (torch.float16, "high"),
    "fp32": (torch.float32, "highest"),
}
_STEPS, _EPS = 5, 1e-5
_OWN_TILES = items.ItemPlan.tiles_of
Calls = dict[str, Callable[[], object]]


class Subject(NamedTuple):
    """What is tuned.

    Attributes:
        kernels: Each kernel, and the pass that it belongs to.
        shapes: The activations.
        blocks: Samples of a tile, and warps.
        passes: The calls of an activation, by name of the pass.
        layouts: Of memory: whether samples are rows.
        modes: The dtypes and precisions, of `MODES`.
        variants: What else of the tiles is varied.
    """

    kernels: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    blocks: list[tuple[int, int]]
    passes: Callable[[torch.Tensor], Calls]
    layouts: tuple[bool, ...] = (False, True)
    modes: tuple[str, ...] = tuple(MODES)
    variants: tuple[dict[str, Any], ...] = ({},)

    def choices(self, kernel: str, shape: tuple[int, ...], rows: bool) -> list[Tiles]:
        """The tiles to compile for an activation, with one program to a multiprocessor each."""
        padded = padded_size(shape[1])
        found = [
            Tiles(samples, warps, stages, 1)._replace(**variant)
            for variant, (samples, warps), stages in itertools.product(self.variants, self.blocks, STAGES)
            if padded % variant.get("block", BLOCK) == 0
        ]
        if kernel.endswith("moments"):
            # Only maps know the rest.
            found = dict.fromkeys(tiles._replace(depth=BLOCK, as_rows=False) for tiles in found)
        return [tiles for tiles in found if not (rows and tiles.as_rows)]


def of_layer(x: torch.Tensor, relu: bool = False, size: int = 64) -> Calls:
    """The passes of a layer with groups of so many channels, and a ReLU where that is asked for."""
    grad, learned = torch.randn_like(x), torch.ones(x.shape[1], device=x.device)
    matrix = torch.eye(size, device=x.device).repeat(-(-x.shape[1] // size), 1, 1)

    def forward():
        return run.forward(x, learned, learned, size, _STEPS, _EPS, relu=relu)

    output, state, _ = forward()

    def backward():
        plan = run.plan_of_state(state, x, learned, size, _STEPS, False, relu, False, False)
        return run.backward(grad, x, learned, state, plan, _EPS, True, output if relu else None)

    def apply():
        return run.apply(x, matrix, learned, learned, learned, size)

    return {"forward": forward, "backward": backward, "eval": apply}


def of_layer_with_relu(x: torch.Tensor) -> Calls:
    """The same with a ReLU, whose backward reads the output too."""
    return of_layer(x, relu=True)


def of_wide_layer(x: torch.Tensor) -> Calls:
    """The passes of a layer with all channels together."""
    return of_layer(x, size=x.shape[1])


def of_samples(x: torch.Tensor, rows: int = 32) -> Calls:
    """The passes of `GroupWhitening2d` with its default groups."""
    grad, learned = torch.randn_like(x), torch.ones(x.shape[1], device=x.device)

    def forward():
        return items.forward(x, learned, learned, rows, rows, _STEPS, _EPS, False, False)

    state = forward()[1]

    def backward():
        plan = items.plan_for(x, learned, learned, rows, rows, _STEPS, False, False)
        return items.backward(grad, x, learned, state, plan, _EPS, True)

    return {"forward": forward, "backward": backward}


def of_stream(x: torch.Tensor) -> Calls:
    """A batch of `Whitener.partial_fit`."""
    batches = stream.Stream(x.shape[1], x.device)

    def batch():
        batches.add(x)
        return batches.joined

    return {"batch": batch}


_PASSES = {
    "moments": "forward",
    "whiten": "forward",
    "cross_moments": "backward",
    "whiten_backward": "backward",
}
_SHAPES = {
    "stem": (256, 64, 112, 112),
    "a1": (64, 64, 32, 32),
    "a1b": (64, 128, 32, 32),
    "vgg": (256, 64, 32, 32),
    "vgg4": (256, 512, 4, 4),
}
_BLOCKS = [(32, 4), (64, 4), (128, 4), (64, 8), (128, 8)]
SUBJECTS = {
    "layer": Subject(
        {**_PASSES, "apply": "eval"},
        _SHAPES,
        _BLOCKS,
        of_layer,
    ),
    "relu": Subject(
        {"cross_moments": "backward", "whiten_backward": "backward"},
        _SHAPES,
        _BLOCKS,
        of_layer_with_relu,
    ),
    "wide": Subject(
        {"moments": "forward", "apply": "eval", "cross_moments": "backward", "apply_backward": "backward"},
        {"160": (128, 160, 32, 32), "256": (1024, 256, 8, 8), "512": (64, 512, 28, 28)},
        _BLOCKS,
        of_wide_layer,
        variants=tuple(
            {"block": block, "depth": depth, "as_rows": as_rows}
            for block, depth, as_rows in itertools.product((64, 128), (32, 64), (False, True))
        ),
    ),
    "samples": Subject(
        _PASSES,
        {"256x64": (256, 64, 32, 32), "64x64": (64, 64, 32, 32), "64x256": (64, 256, 32, 32)},
        [(64, 4), (128, 4), (256, 4), (128, 8), (256, 8)],
        of_samples,
        modes=("bf16", "fp32"),
    ),
    "stream": Subject(
        {"moments": "batch"},
        {"64 features": (2**20, 64), "128 features": (2**20, 128)},
        [(32, 4), (64, 4), (128, 4), (32, 8), (64, 8), (128, 8)],
        of_stream,
        layouts=(True,),
        modes=("fp32",),
    ),
}


def passes(subject: Subject, shape: tuple[int, ...], mode: str, rows: bool, device: str = "cuda") -> Calls:
    """The passes of a subject on an activation of this shape."""
    dtype, setting = MODES[mode]
    torch.set_float32_matmul_precision(setting)
    x = torch.randn(shape, device=device).to(dtype)
    if rows and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return subject.passes(x)


def use(tuned: str | None = None, tiles: Tiles | None = None) -> None:
    """Give a kernel these tiles and the others their own; without arguments, all their own."""

    def chosen(kernel: str, *rest: Any) -> Tiles:
        return tiles if tiles is not None and kernel == tuned else tiling.tiles_for(kernel, *rest)

    def chosen_for_samples(self: items.ItemPlan, kernel: str) -> Tiles:
        return tiles if tiles is not None and kernel == tuned else _OWN_TILES(self, kernel)

    plans.tiles_for = chosen
    items.ItemPlan.tiles_of = chosen_for_samples
    forget()


def forget() -> None:
    """Drop all plans."""
    plans._plans.clear()
    items._plans.clear()
    stream._plans.clear()


def tiles_of(kernel: str) -> Tiles:
    """What the last pass gave to a kernel: smaller tiles than those asked for where they do not fit the GPU."""
    (plan,) = (*plans._plans.values(), *items._plans.values(), *stream._plans.values())
    launch = plan.launches[kernel]
    return plan._chosen[kernel]._replace(samples=launch.constants["TILE"].BL)


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


def compile_share(arguments: tuple[int, int, list[Subject], list[str]]) -> None:
    """Compile every so manieth choice, for later processes."""
    share, shares, subjects, modes = arguments
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    jobs: list[Any] = []
    for subject in subjects:
        # The programs of a launch are no constant of it: a small batch will do.
        shapes = {(max(4, shape[0] >> 8), *shape[1:]) for shape in subject.shapes.values()}
        asked = [mode for mode in subject.modes if mode in modes]
        for shape, mode, rows, kernel in itertools.product(sorted(shapes), asked, subject.layouts, subject.kernels):
            jobs += [(subject, shape, mode, rows, kernel, tiles) for tiles in subject.choices(kernel, shape, rows)]
    for subject, shape, mode, rows, kernel, tiles in jobs[share::shares]:
        use()
        calls = passes(subject, shape, mode, rows)
        use(kernel, tiles)
        try:
            calls[subject.kernels[kernel]]()
        except Exception as error:
            print(f"{mode} rows={rows} {kernel} {tiles}: {type(error).__name__}", file=sys.stderr)


def timings(choices: list[Tiles], kernel: str, call: Callable[[], object], repeats: int) -> list[tuple[float, Tiles]]:
    """Every choice for a kernel that fits the GPU, with the time of its pass, the fastest first."""
    found = []
    for choice, per_sm in itertools.product(choices, PER_SM):
        tiles = choice._replace(per_sm=per_sm)
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
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--shape", type=int, nargs="+", help="the one activation to time, in place of the subjects' own"
    )
    parser.add_argument("--layout", choices=("NCHW", "NHWC"), help="the one layout, in place of both")
    parser.add_argument("--kernels", help="of the subjects', those to time")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    names, modes = args.subjects.split(","), args.modes.split(",")
    subjects = {name: SUBJECTS[name] for name in names}
    kernels = {kernel for subject in subjects.values() for kernel in subject.kernels}
    wanted = kernels if args.kernels is None else set(args.kernels.split(","))
    if not wanted <= kernels:
        parser.error(f"--kernels must be of {', '.join(sorted(kernels))}; got {args.kernels!r}.")
    for name, subject in subjects.items():
        if args.shape is not None:
            subject = subject._replace(shapes={"x".join(map(str, args.shape)): tuple(args.shape)})
        if args.layout is not None:
            subject = subject._replace(layouts=(args.layout == "NHWC",))
        subject = subject._replace(kernels={k: part for k, part in subject.kernels.items() if k in wanted})
        subjects[name] = subject
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_share, [(i, args.processes, [*subjects.values()], modes) for i in range(args.processes)])
    results = []
    for name, subject in subjects.items():
        asked = [mode for mode in subject.modes if mode in modes]
        for mode, rows, (shape_name, shape) in itertools.product(asked, subject.layouts, subject.shapes.items()):
            use()
            calls = passes(subject, shape, mode, rows)
            use()
            own = {part: graph_time(warm(call)) for part, call in calls.items()}
            for kernel, part in subject.kernels.items():
                choices = subject.choices(kernel, shape, rows)
                found = timings(choices, kernel, calls[part], 2 if shape_name == "stem" else 10)
                where: dict[str, Any] = {"subject": name, "mode": mode, "rows": rows, "shape": shape_name}
                where |= {"kernel": kernel, "pass": part}
                results += [{**where, "us": time, "tiles": tiles} for time, tiles in found]
                best = "  ".join(f"{time:.1f} us {tuple(tiles)}" for time, tiles in found[:3])
                layout = "NHWC" if rows else "NCHW"
                print(f"{name} {mode} {layout} {shape_name} {kernel}, {part}: now {own[part]:.1f}, {best}", flush=True)
            del calls
            torch.cuda.empty_cache()
    with open(args.out, "w") as file:
        json.dump(results, file)


def warm(call: Callable[[], object]) -> Callable[[], object]:
    """The call, after its kernels are compiled."""
    call()
    return call


if __name__ == "__main__":
    main()
