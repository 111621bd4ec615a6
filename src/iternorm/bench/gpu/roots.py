"""The benchmark of `iternorm.linalg`, `Whitener`, GroupWhitening and InstanceWhitening on a GPU.

`run_roots()` returns a dictionary that json.dumps takes, after two minutes.
"""

from collections.abc import Callable, Iterator, Sequence

from iternorm.bench.gpu.table import aligned, markdown_table, ratio, where_measured
from iternorm.report.provenance import provenance
from iternorm.timing.gpu import roots as timing
from iternorm.timing.gpu.cases import DTYPES, LAYOUTS
from iternorm.timing.gpu.clock import Gpu, matmul_precision

# Times slower than `inverse_root` that the others are at least.
AGAINST_OTHERS, AGAINST_EIGH = 1.5, 10.0
# Times slower than one read of the data, and than IterNorm, that ours are at most.
AGAINST_READ, AGAINST_ITER_NORM = 1.5, 1.3


def run_roots(
    *,
    rounds: int = 9,
    only: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    save: Callable[[dict], None] | None = None,
    gpu: Gpu | None = None,
) -> dict:
    """Time everything on the current CUDA device, fp32 without TF32.

    The arguments are those of `run_networks`. Where the environment variable ITERNORM_FOREIGN names a folder with the
    packages distributed_shampoo and emerging_optimizers, their roots are timed too.

    Returns:
        `provenance`, `settings`, `roots`, `streams`, `layers`, `targets`.
    """
    gpu = Gpu() if gpu is None else gpu
    result = {"provenance": provenance(str(gpu.device)), "roots": [], "streams": [], "layers": [], "targets": []}
    with matmul_precision("highest"):
        bandwidth = gpu.copy_gb_per_s()
        gpu.release()
        result["settings"] = {"rounds": rounds, "matmul_precision": "highest", "copy_gb_per_s": bandwidth}
        for name, kind, run_part in _parts(gpu, rounds, bandwidth):
            if only is not None and name not in only:
                continue
            result[kind].append(run_part())
            gpu.release()
            result["targets"] = list(_targets(result))
            if save is not None:
                save(result)
            if progress is not None:
                progress(name)
    return result


def _parts(gpu: Gpu, rounds: int, bandwidth: float) -> Iterator[tuple[str, str, Callable[[], dict]]]:
    for shape, p in timing.ROOTS:
        yield f"root {p} {_x(shape)}", "roots", lambda s=shape, p=p: timing.run_roots(s, p, gpu, rounds)
    for shape in timing.STREAMS:
        yield f"stream {_x(shape)}", "streams", lambda s=shape: timing.run_stream(s, gpu, rounds, bandwidth)
    for shape in timing.LAYERS:
        for dtype in DTYPES:
            name = f"layer {_x(shape)} {str(dtype).removeprefix('torch.')}"
            yield name, "layers", lambda s=shape, d=dtype: timing.run_layers(s, d, gpu, rounds, bandwidth)


def _targets(result: dict) -> Iterator[dict]:
    for case in result["roots"]:
        rows = {row["name"]: row for row in case["rows"]}
        where = f"root {case['p']} {_x(case['shape'])}"
        others = [rows[name]["ratio"] for name in (timing.SHAMPOO, timing.CANS) if name in rows]
        measured = [value for value in others if value is not None]
        if others:
            yield _target(f"{where}, fastest of the others / ours", min(measured, default=None), AGAINST_OTHERS, True)
        yield _target(f"{where}, eigh / ours", rows[timing.EIGH]["ratio"], AGAINST_EIGH, True)
    for case in result["streams"]:
        row = next(row for row in case["rows"] if row["name"] == timing.PARTIAL_FIT)
        yield _target(f"stream {_x(case['shape'])}, partial_fit / one read", row["ratio_to_memory"], AGAINST_READ)
    for case in result["layers"]:
        for name in timing.PER_SAMPLE:
            for layout in LAYOUTS:
                where = f"{_x(case['shape'])} {case['dtype']} {layout}, {name} / {timing.ITER_NORM}"
                yield _target(where, _layer_ratio(case, name, layout), AGAINST_ITER_NORM)


def _layer_ratio(case: dict, name: str, layout: str) -> float | None:
    times = {row["name"]: row["graph_ms"] for row in case["rivals"] if row["layout"] == layout}
    ours, iter_norm = times.get(name), times.get(timing.ITER_NORM)
    return None if ours is None or iter_norm is None else ours / iter_norm


def _target(target: str, measured: float | None, limit: float, at_least: bool = False) -> dict:
    met = None if measured is None else (measured >= limit if at_least else measured <= limit)
    return {"target": target, "measured": measured, "limit": limit, "at_least": at_least, "met": met}


def root_lines(result: dict) -> list[str]:
    """The whole result as text, one line each."""
    settings = result["settings"]
    lines = [f"{where_measured(result)}; fp32 without TF32; {settings['rounds']} interleaved rounds."]
    for case in (*result["roots"], *result["streams"]):
        table = [["", "ms", "/ first", "error"]]
        table += [[row["name"], _ms(row["step_ms"]), ratio(row["ratio"]), _error(row)] for row in case["rows"]]
        lines += ["", _title(case), *aligned(table)]
        lines += [f"  failed: {row['name']}: {row['failed']}" for row in case["rows"] if row["failed"] is not None]
    for case in result["layers"]:
        table = [["", "", "graph ms", "eager ms"]]
        table += [[row["name"], row["layout"], _ms(row["graph_ms"]), _ms(row["eager_ms"])] for row in case["rivals"]]
        lines += ["", f"{_x(case['shape'])} {case['dtype']}, forward + backward", *aligned(table, left=2)]
        lines += [f"  failed: {row['name']}: {row['failed']}" for row in case["rivals"] if row["failed"] is not None]
    return [*lines, "", *aligned(_target_rows(result))]


def markdown_roots(result: dict) -> str:
    """The documents' table: each target, what was measured, and whether it is met."""
    return "\n".join([f"{where_measured(result)}, fp32 without TF32.", "", *markdown_table(_target_rows(result))])


def _target_rows(result: dict) -> list[list[str]]:
    rows = [["target", "measured", "limit", "met"]]
    for target in result["targets"]:
        limit = f"{'at least' if target['at_least'] else 'at most'} {target['limit']:.1f}"
        met = {True: "yes", False: "no", None: "not measured"}[target["met"]]
        rows.append([target["target"], ratio(target["measured"]), limit, met])
    return rows


def _title(case: dict) -> str:
    if "p" in case:
        return f"A^(-1/{case['p']}), {_x(case['shape'])}, condition number {case['condition']:.0f}"
    return f"{_x(case['shape'])} {case['dtype']}, one read {1e3 * case['read_ms']:.0f} us"


def _x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _error(row: dict) -> str:
    return "–" if row["error"] is None else f"{row['error']:.1e}"
