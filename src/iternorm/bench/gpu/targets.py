"""The targets of the kernels, and whether a result of the benchmark meets them.

All are ratios within one run, of forward and backward, for groups of 64 channels and five Newton steps.
"""

from collections.abc import Iterator

from iternorm.timing.gpu.cases import (
    BATCH_NORM,
    COMPILED_BATCH_NORM,
    CONVOLUTION,
    EXACT_ITER_NORM,
    ITER_NORM,
    LAYOUTS,
    STEM,
    TABLE_A1,
)

DTYPES = ("float32", "bfloat16")
# By dtype, in the order of DTYPES.
FLOOR, BEST_BATCH_NORM, BATCH_NORM_NCHW, SAME_CONVOLUTION, EAGER = (
    (1.25, 1.40),
    (1.15, 1.10),
    (1.0, 1.0),
    (0.5, 0.8),
    1.5,
)
EXACT, TRAINING_TIME, TRAINING_MEMORY = 1.5, 1.25, 1.05


def evaluate(result: dict) -> list[dict]:
    """The targets, each with what was `measured`, the `limit` and whether it was `met` (None: not measured)."""
    found = []
    for target, dtype, measured, limit in _all(result):
        met = None if measured is None else measured <= limit
        found.append({"target": target, "dtype": dtype, "measured": measured, "limit": limit, "met": met})
    return found


def _all(result: dict) -> Iterator[tuple[str, str, float | None, float]]:
    stem, stem_name = list(STEM), "x".join(map(str, STEM))
    for index, dtype in enumerate(DTYPES):
        ours = _best(result, stem, dtype, ITER_NORM)
        floor = _case(result, stem, dtype).get("floor_ms")
        yield f"{stem_name}, best layout / eight-pass floor", dtype, _ratio(ours, floor), FLOOR[index]
        candidates = [_best(result, stem, dtype, name) for name in (BATCH_NORM, COMPILED_BATCH_NORM)]
        best = min((time for time in candidates if time is not None), default=None)
        yield f"{stem_name}, best layout / best BatchNorm", dtype, _ratio(ours, best), BEST_BATCH_NORM[index]
    for index, dtype in enumerate(DTYPES):
        for shape in TABLE_A1:
            for layout in LAYOUTS:
                where = f"{'x'.join(map(str, shape))} {layout}"
                row = _row(result, list(shape), dtype, ITER_NORM, layout)
                yield (
                    f"{where}, graph / BatchNorm NCHW, graph",
                    dtype,
                    row.get("ratio_to_batch_norm_nchw"),
                    BATCH_NORM_NCHW[index],
                )
                yield (
                    f"{where}, graph / {CONVOLUTION}, same layout, graph",
                    dtype,
                    row.get("ratio_to_convolution"),
                    SAME_CONVOLUTION[index],
                )
                yield f"{where}, eager / BatchNorm eager", dtype, row.get("eager_ratio_to_batch_norm"), EAGER
    for shape in (*TABLE_A1, STEM):
        ratios = []
        for layout in LAYOUTS:
            exact = _row(result, list(shape), "float32", EXACT_ITER_NORM, layout).get("graph_ms")
            ratios.append(_ratio(exact, _row(result, list(shape), "float32", ITER_NORM, layout).get("graph_ms")))
        worst = None if None in ratios else max(ratio for ratio in ratios if ratio is not None)
        yield f"{'x'.join(map(str, shape))}, exact fp32 / TF32 allowed, worse layout", "float32", worst, EXACT
    for dtype in DTYPES:
        row = _network(result, dtype, "IterNorm d=64")
        yield "VGG training step / BatchNorm", dtype, row.get("ratio_to_batch_norm"), TRAINING_TIME
        yield "VGG peak memory / BatchNorm", dtype, row.get("memory_ratio_to_batch_norm"), TRAINING_MEMORY


def _case(result: dict, shape: list[int], dtype: str) -> dict:
    return next((case for case in result["cases"] if case["shape"] == shape and case["dtype"] == dtype), {})


def _row(result: dict, shape: list[int], dtype: str, name: str, layout: str) -> dict:
    rows = _case(result, shape, dtype).get("rivals", ())
    return next((row for row in rows if row["name"] == name and row["layout"] == layout), {})


def _best(result: dict, shape: list[int], dtype: str, name: str) -> float | None:
    """The time as a CUDA graph in the layout where it is the smaller."""
    times = (_row(result, shape, dtype, name, layout).get("graph_ms") for layout in LAYOUTS)
    return min((time for time in times if time is not None), default=None)


def _network(result: dict, dtype: str, name: str) -> dict:
    networks = next((setting["networks"] for setting in result["training"] if setting["dtype"] == dtype), ())
    return next((row for row in networks if row["name"] == name), {})


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other
