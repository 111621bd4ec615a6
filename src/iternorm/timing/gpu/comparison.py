"""One activation: every candidate in both layouts, in interleaved rounds."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iternorm.timing.cpu.devices import Case
from iternorm.timing.gpu.cases import BATCH_NORM, CONVOLUTION, LAYOUTS, CudaCandidate, Shape
from iternorm.timing.gpu.clock import Gpu, matmul_precision, reason
from iternorm.timing.turns import in_turns

# Forward reads the activation twice and writes once, backward reads it and the gradient twice and writes once.
PASSES = 8
# Steps that are discarded before anything is measured, and replays that warm up the clocks.
WARMUP_STEPS, WARMUP_REPLAYS, WARMUP_ROUNDS = 3, 10, 2
# Timings of a slow candidate, and steps in each.
SLOW_ROUNDS, SLOW_STEPS = 3, 2
# Below this size an eager step is CPU time, which scatters by a third, so there are this many times as many timings.
SMALL_BYTES, SMALL_ROUNDS = 2**26, 3


class Entry:
    """A candidate on one layout: its module, its samples, and what went wrong.

    The parameters of a normalization stay in fp32 for a bf16 activation, as autocast has them; a convolution's follow
    the activation.
    """

    def __init__(self, candidate: CudaCandidate, layout: str, x: Tensor, grad_output: Tensor):
        self.candidate, self.layout = candidate, layout
        self.x, self.grad_output = x, grad_output
        self.failed: str | None = None
        self.graph: Any = None
        self.graph_failed = candidate.no_graph
        self.peak_bytes: int | None = None
        self.graph_samples: list[float] = []
        self.eager_samples: list[float] = []
        self.module: Any = None
        self.precision = "highest" if candidate.exact else "high"

    def build(self) -> None:
        torch.manual_seed(0)
        module = self.candidate.make()
        dtype = self.x.dtype if isinstance(module, nn.Conv2d) else torch.float32
        memory_format = torch.channels_last if LAYOUTS[self.layout] else torch.contiguous_format
        module.to(self.x.device, dtype, memory_format=memory_format).train()  # pyright: ignore[reportCallIssue]
        self.inputs = [self.x, *module.parameters()]
        self.module = torch.compile(module, dynamic=False, fullgraph=True) if self.candidate.compiled else module

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One forward and one backward, to the input and the parameters."""
        output = self.module(self.x)
        return output, torch.autograd.grad(output, self.inputs, self.grad_output)


def run_case(
    shape: Shape,
    dtype: torch.dtype,
    candidates: Sequence[CudaCandidate],
    gpu: Gpu,
    copy_gb_per_s: float,
    rounds: int,
    layouts: Sequence[str] = tuple(LAYOUTS),
) -> dict:
    """Time all candidates on one activation in the layouts. What fails is in the result, with the reason."""
    if any(candidate.compiled for candidate in candidates):
        # Compilations for other shapes count towards the limit after which torch gives up and runs eagerly.
        torch.compiler.reset()
    activation_bytes = torch.Size(shape).numel() * dtype.itemsize
    steps = steps_for(activation_bytes)
    case = {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "activation_bytes": activation_bytes,
        "floor_ms": PASSES * activation_bytes / copy_gb_per_s / 1e6,
        "steps_a_timing": steps,
        "failed": None,
    }
    try:
        entries = []
        for layout in layouts:
            x, grad_output = Case(shape, dtype, LAYOUTS[layout]).make(gpu.device)
            entries += [Entry(candidate, layout, x, grad_output) for candidate in candidates]
    except Exception as error:
        return {**case, "failed": reason(error), "rivals": []}
    with torch.random.fork_rng(devices=[]):
        for entry in entries:
            _prepare(entry, gpu)
    # Memory is measured before the first capture: a graph keeps its own.
    for entry in entries:
        _capture(entry, gpu, steps)
    captured = [entry for entry in entries if entry.graph is not None]
    for entry in captured:
        gpu.warm_up(entry.graph, WARMUP_REPLAYS)
    _rounds(captured, rounds, "graph_samples", lambda entry: gpu.replay_ms(entry.graph, steps))
    _rounds(
        [entry for entry in entries if entry.failed is None],
        eager_rounds(rounds, activation_bytes),
        "eager_samples",
        lambda entry: gpu.eager_ms(entry.step, SLOW_STEPS if entry.candidate.slow else max(4, steps)),
    )
    rows = [_row(entry, activation_bytes) for entry in entries]
    add_ratios(rows, case["floor_ms"], activation_bytes)
    return {**case, "rivals": rows}


def steps_for(activation_bytes: int) -> int:
    """Steps in one graph and one timing: about 4 GiB moved, 20 steps at most."""
    return max(2, min(20, 2**32 // (PASSES * activation_bytes)))


def eager_rounds(rounds: int, activation_bytes: int) -> int:
    """How many timings of an eager step stand for so many in a graph."""
    return rounds * (SMALL_ROUNDS if activation_bytes < SMALL_BYTES else 1)


def _guarded(entry: Entry, action: Callable[[], Any]) -> Any:
    """What `action` returns at the entry's precision, or None if it failed; the entry keeps the reason."""
    if entry.failed is not None:
        return None
    try:
        with matmul_precision(entry.precision):
            return action()
    except Exception as error:
        entry.failed = reason(error)
        return None


def _prepare(entry: Entry, gpu: Gpu) -> None:
    def warm() -> None:
        entry.build()
        for _ in range(1 if entry.candidate.slow else WARMUP_STEPS):
            entry.step()
        gpu.synchronize()

    _guarded(entry, warm)
    entry.peak_bytes = _guarded(entry, lambda: gpu.peak_bytes(entry.step))


def _capture(entry: Entry, gpu: Gpu, steps: int) -> None:
    if entry.failed is not None or entry.candidate.no_graph is not None:
        return
    try:
        with matmul_precision(entry.precision):
            entry.graph = gpu.capture(entry.step, steps)
    except Exception as error:
        entry.graph_failed = reason(error)


def _rounds(entries: Sequence[Entry], rounds: int, samples: str, measure: Callable[[Entry], float]) -> None:
    for round_index, entry in in_turns(entries, rounds, WARMUP_ROUNDS):
        if entry.candidate.slow and not 0 <= round_index < SLOW_ROUNDS:
            continue
        elapsed = _guarded(entry, lambda entry=entry: measure(entry))
        if elapsed is not None and round_index >= 0:
            getattr(entry, samples).append(elapsed)


def _row(entry: Entry, activation_bytes: int) -> dict:
    def median(samples: list[float]) -> float | None:
        return statistics.median(samples) if samples and entry.failed is None else None

    graph_ms = median(entry.graph_samples)
    return {
        "name": entry.candidate.name,
        "layout": entry.layout,
        "failed": entry.failed,
        "graph_ms": graph_ms,
        "graph_failed": None if graph_ms is not None else entry.graph_failed or entry.failed,
        "eager_ms": median(entry.eager_samples),
        "peak_bytes": entry.peak_bytes,
        # The output and the gradient of the input are two activations that every candidate's step allocates.
        "extra_activations": None if entry.peak_bytes is None else entry.peak_bytes / activation_bytes - 2,
        "graph_samples_ms": entry.graph_samples,
        "eager_samples_ms": entry.eager_samples,
    }


def add_ratios(rows: Sequence[dict], floor_ms: float, activation_bytes: int) -> None:
    """Put the derived figures into the rows: of CUDA graphs unless the name begins with `eager`."""
    by_name = {(row["name"], row["layout"]): row for row in rows}

    def ratio(row: dict, name: str, layout: str, kind: str) -> float | None:
        other = by_name.get((name, layout), {}).get(kind)
        return row[kind] / other if row[kind] is not None and other is not None else None

    for row in rows:
        layout, graph_ms = row["layout"], row["graph_ms"]
        row["gb_per_s"] = None if graph_ms is None else PASSES * activation_bytes / graph_ms / 1e6
        row["ratio_to_floor"] = None if graph_ms is None else graph_ms / floor_ms
        for prefix, kind in (("", "graph_ms"), ("eager_", "eager_ms")):
            row[f"{prefix}ratio_to_convolution"] = ratio(row, CONVOLUTION, layout, kind)
            row[f"{prefix}ratio_to_batch_norm"] = ratio(row, BATCH_NORM, layout, kind)
            row[f"{prefix}ratio_to_batch_norm_nchw"] = ratio(row, BATCH_NORM, "NCHW", kind)
