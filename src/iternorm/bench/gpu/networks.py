"""The benchmark of whole networks on a GPU: training steps as people run them, and the end of a residual block.

`run_networks()` returns a dictionary that json.dumps takes, after ten minutes, most of them compilation.
"""

from collections.abc import Callable, Sequence

from iternorm.bench.gpu.table import aligned, markdown_table, ratio, where_measured
from iternorm.report.provenance import provenance
from iternorm.timing.gpu.clock import Gpu, matmul_precision
from iternorm.timing.gpu.networks import networks, norms, run_junction, run_network

JUNCTIONS = ((256, 256, 56, 56), (64, 256, 56, 56))


def run_networks(
    *,
    rounds: int = 9,
    only: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    save: Callable[[dict], None] | None = None,
    gpu: Gpu | None = None,
) -> dict:
    """Time everything on the current CUDA device.

    Args:
        rounds: The number of timings of each network; the median counts.
        only: Parts to run, as `progress` names them; all of them unless given.
        progress: Called with the name of each part when it is done.
        save: Called with the result so far after each part.
        gpu: The clocks.

    Returns:
        `provenance`, `settings`, `networks` (one a network, batch and mode), `junctions` (one a shape).
    """
    gpu = Gpu() if gpu is None else gpu
    settings = {"rounds": rounds, "matmul_precision": "high"}
    result = {"provenance": provenance(str(gpu.device)), "settings": settings, "networks": [], "junctions": []}
    parts: list[tuple[str, str, Callable[[], dict]]] = []
    for shape in JUNCTIONS:
        name = f"junction {'x'.join(map(str, shape))}"
        parts.append((name, "junctions", lambda shape=shape: run_junction(shape, gpu, rounds)))
    for network in networks():
        for mode in network.modes:
            name = f"{network.name} {network.batch_size} {mode or 'eager'}"

            def part(network=network, mode=mode) -> dict:
                return run_network(network, mode, norms(), gpu, rounds)

            parts.append((name, "networks", part))
    with matmul_precision("high"):
        for name, kind, run_part in parts:
            if only is not None and name not in only:
                continue
            result[kind].append(run_part())
            gpu.release()
            if save is not None:
                save(result)
            if progress is not None:
                progress(name)
    return result


def network_lines(result: dict) -> list[str]:
    """The whole result as text, one line each."""
    lines = [f"{where_measured(result)}; bf16, channels_last; {result['settings']['rounds']} interleaved rounds."]
    for part in (*result["networks"], *result["junctions"]):
        lines += ["", _title(part), *aligned([["", "ms", "/BN", "peak MiB"], *_rows(part)])]
        lines += [f"  failed: {row['name']}: {row['failed']}" for row in part["rows"] if row["failed"] is not None]
    return lines


def markdown_networks(result: dict) -> str:
    """The site's table: a training step of each network, BatchNorm's and ours."""
    rows = [["training step", "BatchNorm, ms", "IterNorm, ms", "ratio", "fused, ms", "ratio"]]
    for part in result["networks"]:
        by_name = {row["name"]: row for row in part["rows"]}
        ours, fused = by_name.get("IterNorm d=64", {}), by_name.get("IterNorm d=64 fused", {})
        rows.append(
            [
                _title(part),
                _milliseconds(by_name["BatchNorm2d"]),
                *(
                    cell
                    for row in (ours, fused)
                    for cell in (_milliseconds(row), ratio(row.get("ratio_to_batch_norm")))
                ),
            ]
        )
    return "\n".join(
        [f"{where_measured(result)}, bf16 autocast, channels_last, groups of 64 channels.", "", *markdown_table(rows)]
    )


def markdown_ratios(result: dict) -> str:
    """The README's table: a step's time as a share of BatchNorm's, a line for each network and batch size."""
    rows = [["training step, IterNorm / BatchNorm", "eager", "eager, fused", "compiled", "compiled, CUDA graph"]]
    columns = {"eager": 1, "default": 3, "reduce-overhead": 4}
    for part in (part for part in result["networks"] if "network" in part):
        name = f"{part['network']}, batch {part['batch_size']}"
        if rows[-1][0] != name:
            rows.append([name, *["–"] * 4])
        by_name = {row["name"]: row.get("ratio_to_batch_norm") for row in part["rows"]}
        rows[-1][columns[part["mode"]]] = ratio(by_name.get("IterNorm d=64"))
        if part["mode"] == "eager":
            rows[-1][2] = ratio(by_name.get("IterNorm d=64 fused"))
    return "\n".join(markdown_table(rows))


def _title(part: dict) -> str:
    if "network" in part:
        mode = {"eager": "eager", "default": "compiled"}.get(part["mode"], f"compiled, {part['mode']}")
        return f"{part['network']}, batch {part['batch_size']}, {mode}"
    return f"layer + add + ReLU, {'x'.join(map(str, part['shape']))}"


def _rows(part: dict) -> list[list[str]]:
    return [
        [
            row["name"],
            _milliseconds(row),
            ratio(row["ratio_to_batch_norm"]),
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in part["rows"]
    ]


def _milliseconds(row: dict) -> str:
    return "–" if row.get("step_ms") is None else f"{row['step_ms']:.2f}"
