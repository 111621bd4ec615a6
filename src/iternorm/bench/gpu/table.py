"""A result of the GPU's benchmark as text for the terminal and as markdown for the documents."""

import re
from collections.abc import Callable, Sequence

from iternorm.timing.gpu.cases import BATCH_NORM, COMPILED_BATCH_NORM, CONVOLUTION, EXACT_ITER_NORM, ITER_NORM, LAYOUTS

NONE = "–"


def lines(result: dict) -> list[str]:
    """The whole result, one line each."""
    settings = result["settings"]
    found = [
        f"{where_measured(result)}; {settings['rounds']} interleaved rounds; copy {settings['copy_gb_per_s']:.0f} GB/s."
    ]
    for case in result["cases"]:
        found += ["", *_case_lines(case)]
    for setting in result["training"]:
        found += ["", *_training_lines(setting)]
    met = sum(target["met"] is True for target in result["targets"])
    found += ["", f"Targets: {met} of {len(result['targets'])} met"]
    rows = [["target", "dtype", "measured", "limit", "met"]]
    for target in result["targets"]:
        rows.append(
            [target["target"], target["dtype"], ratio(target["measured"]), f"{target['limit']:.2f}", _met(target)]
        )
    found += [*aligned(rows), "", *notes(result)]
    return found


def notes(result: dict) -> list[str]:
    """What a reader of the tables has to know, and everything that failed."""
    found = [
        "graph: forward and backward replayed in a CUDA graph; eager: wall clock, launches included. Medians.",
        "floor: eight passes over the activation at copy bandwidth; one that fits the L2 cache may go below it.",
        "extra: peak memory beyond input, output and their gradients, in units of one activation.",
        "fp32 may use TF32 in matrix products and convolutions; rows named exact may not.",
    ]
    precompiled = result["settings"].get("precompiled", {})
    if precompiled.get("processes"):
        found.append(
            f"compiled beforehand: {precompiled['jobs']} jobs, {precompiled['processes']} processes, "
            f"{precompiled['seconds']:.0f} s"
        )
    found += [f"compilation failed: {text}" for text in precompiled.get("failed", ())]
    for case in result["cases"]:
        where = f"{_shape(case)} {case['dtype']}"
        if case["failed"] is not None:
            found.append(f"failed: {where}: {case['failed']}")
        for row in case["rivals"]:
            if row["failed"] is not None:
                found.append(f"failed: {where} {row['layout']} {row['name']}: {row['failed']}")
            elif row["graph_failed"] is not None:
                found.append(f"no CUDA graph: {where} {row['layout']} {row['name']}: {row['graph_failed']}")
    for setting in result["training"]:
        for row in setting["networks"]:
            if row["failed"] is not None:
                found.append(f"failed: VGG {setting['dtype']} {setting['layout']} {row['name']}: {row['failed']}")
    return found


def _case_lines(case: dict) -> list[str]:
    title = f"{_shape(case)} {case['dtype']}, forward + backward, us; floor {_microseconds(case['floor_ms'])}"
    rows = [["layer", "", "graph", "eager", "GB/s", "/floor", "/conv", "/BN", "/BN NCHW", "eager/BN", "extra"]]
    for row in case["rivals"]:
        rows.append(
            [
                row["name"],
                row["layout"],
                *(_microseconds(row[kind]) for kind in ("graph_ms", "eager_ms")),
                NONE if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}",
                *(
                    ratio(row[f"{kind}ratio_to_{other}"])
                    for kind, other in (
                        ("", "floor"),
                        ("", "convolution"),
                        ("", "batch_norm"),
                        ("", "batch_norm_nchw"),
                        ("eager_", "batch_norm"),
                    )
                ),
                ratio(row["extra_activations"]),
            ]
        )
    return [title, *aligned(rows, left=2)]


def _training_lines(setting: dict) -> list[str]:
    title = f"VGG training step, batch {setting['batch_size']}, {setting['dtype']} {setting['layout']}"
    rows = [["normalization", "ms", "/BN", "peak MiB", "/BN", "paper ms"]]
    for row in setting["networks"]:
        rows.append(
            [
                row["name"],
                NONE if row["step_ms"] is None else f"{row['step_ms']:.2f}",
                ratio(row["ratio_to_batch_norm"]),
                NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
                ratio(row["memory_ratio_to_batch_norm"]),
                NONE if row["paper_s"] is None else f"{1e3 * row['paper_s']:.0f}",
            ]
        )
    return [title, *aligned(rows)]


def markdown(result: dict) -> str:
    """The tables for documents: the layers, and the training step."""
    training = [setting for setting in result["training"] if setting["networks"]]
    return "\n".join(
        [
            f"{where_measured(result)}. Forward + backward of one layer, µs, as NCHW / NHWC, in a CUDA graph unless",
            "marked eager. fp32 is torch's default, without TF32 in matrix products; the columns `TF32` allow it.",
            "`/ BN` is the better layout's time divided by that of the best BatchNorm of any kind.",
            "",
            *markdown_table(_layer_rows(result["cases"])),
            "",
            f"A training step of the paper's VGG, batch {training[0]['batch_size']}, eager{_tf32_note(result)}.",
            "The paper's times were measured on a TITAN Xp.",
            "",
            *markdown_table(_training_rows(training)),
        ]
    )


def _tf32_note(result: dict) -> str:
    return "" if result["settings"]["matmul_precision"] == "highest" else ", with TF32 allowed in the fp32 columns"


def markdown_targets(result: dict) -> str:
    """The targets, what was measured, and whether they were met."""
    rows = [["target", "dtype", "measured", "limit", "met"]]
    for target in result["targets"]:
        rows.append(
            [target["target"], target["dtype"], ratio(target["measured"]), f"{target['limit']:.2f}", _met(target)]
        )
    return "\n".join(markdown_table(rows, left=2))


def _layer_rows(cases: Sequence[dict]) -> list[list[str]]:
    head = [
        "activation",
        "conv3x3",
        "BN",
        "BN compiled",
        "IterNorm",
        "/ BN",
        "TF32",
        "/ BN",
        "eager BN",
        "eager IterNorm",
    ]
    rows = [head]
    for case in cases:
        times = {(row["name"], row["layout"]): row for row in case["rivals"]}
        # What a user gets without setting anything: no TF32, where there is a choice.
        fast = ITER_NORM if any(name == EXACT_ITER_NORM for name, _ in times) else None
        default = ITER_NORM if fast is None else EXACT_ITER_NORM

        def pair(name: str | None, kind: str = "graph_ms", times: dict = times) -> str:
            cells = [_microseconds(times.get((name, layout), {}).get(kind)) for layout in LAYOUTS]
            return NONE if set(cells) == {NONE} else " / ".join(cells)

        def best(*wanted: str | None, times: dict = times) -> float | None:
            found = (times.get((name, layout), {}).get("graph_ms") for name in wanted for layout in LAYOUTS)
            return min((time for time in found if time is not None), default=None)

        def against_batch_norm(name: str | None, best: Callable[..., float | None] = best) -> str:
            ours, batch_norm = best(name), best(BATCH_NORM, COMPILED_BATCH_NORM)
            return ratio(None if ours is None or batch_norm is None else ours / batch_norm)

        rows.append(
            [
                f"{_shape(case)} {_short(case['dtype'])}",
                *(pair(name) for name in (CONVOLUTION, BATCH_NORM, COMPILED_BATCH_NORM)),
                *(cell for name in (default, fast) for cell in (pair(name), against_batch_norm(name))),
                *(pair(name, "eager_ms") for name in (BATCH_NORM, default)),
            ]
        )
    return rows


def _training_rows(settings: Sequence[dict]) -> list[list[str]]:
    head = ["normalization"]
    for setting in settings:
        where = f"{_short(setting['dtype'])} {setting['layout']}"
        head += [f"{where}, ms", "/ BN", "memory / BN"]
    rows = [[*head, "the paper, ms"]]
    names = list(dict.fromkeys(row["name"] for setting in settings for row in setting["networks"]))
    for name in names:
        cells, paper = [], None
        for setting in settings:
            row = next((row for row in setting["networks"] if row["name"] == name), {})
            paper = row.get("paper_s") or paper
            step_ms = row.get("step_ms")
            cells += [
                NONE if step_ms is None else f"{step_ms:.2f}",
                ratio(row.get("ratio_to_batch_norm")),
                ratio(row.get("memory_ratio_to_batch_norm")),
            ]
        rows.append([name, *cells, NONE if paper is None else f"{1e3 * paper:.0f}"])
    return rows


def put_between_markers(document: str, name: str, content: str) -> str:
    """The document with `content` between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``."""
    begin, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", document, flags=re.DOTALL)
    if found is None:
        raise ValueError(f"the document has no lines {begin!r} and {end!r}: put them where the tables belong")
    return document[: found.start()] + f"{begin}\n\n{content}\n\n{end}" + document[found.end() :]


def markdown_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table whose first row is its head; the columns after the first `left` are numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The same as plain text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def pad(column: int, cell: str) -> str:
        justify: Callable[[int], str] = cell.ljust if column < left else cell.rjust
        return justify(widths[column])

    return ["  " + "  ".join(pad(column, cell) for column, cell in enumerate(row)).rstrip() for row in rows]


def where_measured(result: dict) -> str:
    """The GPU and the versions."""
    machine, torch_ = result["provenance"]["machine"], result["provenance"]["torch"]
    triton = f", triton {torch_['triton']}" if torch_.get("triton") else ""
    return f"{machine.get('gpu') or machine['cpu']}, torch {torch_['version']}{triton}"


def _shape(case: dict) -> str:
    return "x".join(map(str, case["shape"]))


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)


def _met(target: dict) -> str:
    return {True: "yes", False: "no", None: "not measured"}[target["met"]]


def ratio(value: float | None) -> str:
    """A ratio as tables show it."""
    return NONE if value is None else f"{value:.2f}"


def _microseconds(milliseconds: float | None) -> str:
    if milliseconds is None:
        return NONE
    microseconds = 1e3 * milliseconds
    return f"{microseconds:.1f}" if microseconds < 10 else f"{microseconds:.0f}"
