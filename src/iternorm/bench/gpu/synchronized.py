"""The benchmark of synchronized layers on a GPU: what a rank computes itself, without the collectives.

`run_synchronized()` returns a dictionary that json.dumps takes, after about a minute.
"""

from collections.abc import Callable

from iternorm.bench.gpu.table import aligned, ratio, where_measured
from iternorm.report.provenance import provenance
from iternorm.timing.gpu.clock import Gpu, matmul_precision
from iternorm.timing.gpu.synchronized import run_layers

SHAPES = ((64, 64, 32, 32), (256, 64, 32, 32), (256, 64, 112, 112))
RANKS = (2, 8, 64)


def run_synchronized(
    *,
    rounds: int = 15,
    progress: Callable[[str], None] | None = None,
    save: Callable[[dict], None] | None = None,
    gpu: Gpu | None = None,
) -> dict:
    """Time everything on the current CUDA device.

    Args:
        rounds: The number of timings of each layer; the median counts.
        progress: Called with the name of each part when it is done.
        save: Called with the result so far after each part.
        gpu: The clocks.

    Returns:
        `provenance`, `settings`, `layers` (one a shape and number of ranks).
    """
    gpu = Gpu() if gpu is None else gpu
    settings = {"rounds": rounds, "matmul_precision": "high"}
    result = {"provenance": provenance(str(gpu.device)), "settings": settings, "layers": []}
    with matmul_precision("high"):
        for shape in SHAPES:
            for size in RANKS:
                result["layers"].append(run_layers(shape, size, gpu, rounds))
                gpu.release()
                if save is not None:
                    save(result)
                if progress is not None:
                    progress(f"{'x'.join(map(str, shape))} {size} ranks")
    return result


def synchronized_lines(result: dict) -> list[str]:
    """The whole result as text, one line each."""
    rounds = result["settings"]["rounds"]
    lines = [
        f"{where_measured(result)}; bf16, channels_last, eager; {rounds} interleaved rounds; collectives are absent."
    ]
    for part in result["layers"]:
        sent = part["sent_bytes"]
        title = f"{'x'.join(map(str, part['shape']))}, {part['ranks']} ranks; SyncIterNorm sends "
        title += f"{sent['all_gather']} bytes forward (all-gather), {sent['all_reduce']} backward (all-reduce)"
        rows = [
            [
                row["name"],
                "–" if row["step_ms"] is None else f"{1000 * row['step_ms']:.0f}",
                ratio(row["ratio_to_batch_norm"]),
                ratio(row["ratio_to_iter_norm"]),
            ]
            for row in part["rows"]
        ]
        lines += ["", title, *aligned([["", "µs", "/SyncBN", "/IterNorm"], *rows])]
        lines += [f"  failed: {row['name']}: {row['failed']}" for row in part["rows"] if row["failed"] is not None]
    return lines
