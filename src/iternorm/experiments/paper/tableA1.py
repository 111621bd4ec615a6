"""Table A1: wall-clock time of IterNorm, DBN and a 3x3 convolution, forward and backward.

Reproduces: the paper's Table A1: 64 samples of 32x32, with 64 and with 128 channels.
Claim: IterNorm costs about as much as a convolution, and half of DBN or less.
Command: iternorm run tableA1 --device cuda && iternorm plot tableA1
Cost: about a minute on two cores.
The paper got: on a TITAN Xp, 64 / 128 channels, in ms: cudnn convolution 5.65 / 13.62, nn convolution 8.89 / 17.46, DBN
15.92 / 35.02, IterNorm with T=3 6.59 / 13.32, T=5 7.40 / 13.92, T=7 8.21 / 14.68.
Departures: today's machine and libraries, so ratios within one run are what compares; on a GPU products in TF32, which
a TITAN Xp does not have; medians of n interleaved timings (the paper: means of 100 runs), few of the slow DBN. DBN has
groups of 16 and IterNorm whitens all channels together; the paper names neither for this table. On a GPU calls as small
as these wait for the host, so the number of iterations does not show. The nn convolution, Torch 7's own, is not timed,
nor the claim that IterNorm is faster than it. That IterNorm is "slightly slower" than cudnn's convolution is read as:
at most slightly. The appendix compares DBN and IterNorm in a VGG too, 1.366 s against 0.343 s a step; ours are in
docs/speed.md. The timing is that of `iternorm bench`; see its method in benchmarks/README.md.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from iternorm.experiments.evidence import rule
from iternorm.experiments.jobs.findings import Claim, Comparison, measured
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.jobs.results import Config, Result, Row
from iternorm.report import palette
from iternorm.timing.cpu import candidates, comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The paper's.
_LAYOUT = "NCHW"
# DBN by eigendecomposition, as the paper's, and on a GPU by our kernels too.
_DBN, _DBN_KERNELS = "DBN d=16", "DBN d=16 kernels"
# "Slightly slower", as the paper's own largest ratio; "significantly faster": its own are 0.46 and 0.40.
_SLIGHTLY, _FASTER = 1.31, 0.5
_CHANNELS = tuple(case.shape[1] for case in comparison.TABLE_A1)
# Of the axis of ratios.
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_COLUMNS = ("name", "median_ms", "min_ms", "max_ms", "ratio_to_convolution", "paper_ms", "paper_ratio_to_convolution")


def jobs(plan: Plan) -> list[Config]:
    """One job for each shape."""
    shapes = [[2, 64, 8, 8]] if plan.smoke else [list(case.shape) for case in comparison.TABLE_A1]
    rounds = 2 if plan.smoke else 15
    common = {"device": plan.device, "rounds": rounds}
    return [{"job": f"{plan.device}-C{shape[1]}", "shape": shape, **common} for shape in shapes]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each layer that is timed."""
    context.record["precision"] = "tf32" if config["device"] == "cuda" else "fp32"
    return _run_cuda(config, context) if config["device"] == "cuda" else _run_cpu(config, context)


def _run_cpu(config: Config, context: Context) -> list[Row]:
    cases = [comparison.Case(tuple(config["shape"]))]
    total = comparison.count_timings(cases, rounds=config["rounds"])
    done = 0

    def timed() -> None:
        nonlocal done
        done += 1
        context.step(done, total)

    (case,) = comparison.run(cases, rounds=config["rounds"], progress=timed)["cases"]
    return [
        {column: candidate[column] for column in _COLUMNS} | {"timings": len(candidate["samples_ms"])}
        for candidate in case["rivals"]
    ]


def _run_cuda(config: Config, context: Context) -> list[Row]:
    from iternorm.timing.gpu.cases import candidates_for
    from iternorm.timing.gpu.clock import Gpu, matmul_precision
    from iternorm.timing.gpu.comparison import run_case
    from iternorm.timing.gpu.precompile import compile_all, jobs_for

    gpu = Gpu()
    shape = tuple(config["shape"])
    needed = [job for job in jobs_for([shape], [torch.float32]) if job.name is not None and job.layout == _LAYOUT]
    compile_all(needed)
    context.step(1, 2)
    with matmul_precision("high"):
        candidates = candidates_for(shape, torch.float32)
        case = run_case(shape, torch.float32, candidates, gpu, gpu.copy_gb_per_s(), config["rounds"], [_LAYOUT])
    context.step(2, 2)
    return cuda_rows(case)


def cuda_rows(case: Mapping[str, Any]) -> list[Row]:
    """The rows of a case of the GPU's benchmark: eager calls, which is how the paper ran."""
    if case["failed"] is not None:
        raise RuntimeError(f"{case['shape']} could not be timed: {case['failed']}")
    channels = case["shape"][1]
    rows = []
    for candidate in case["rivals"]:
        if candidate["layout"] != _LAYOUT or candidate["eager_ms"] is None:
            continue
        paper = candidates.PAPER_MS.get(_paper_name(candidate["name"], channels), {}).get(channels)
        samples = candidate["eager_samples_ms"]
        values = (
            candidate["name"],
            candidate["eager_ms"],
            min(samples),
            max(samples),
            candidate["eager_ratio_to_convolution"],
        )
        convolution = candidates.PAPER_MS["cudnn convolution"].get(channels)
        ratio = paper / convolution if paper is not None and convolution is not None else None
        rows.append(dict(zip(_COLUMNS, (*values, paper, ratio), strict=True)) | {"timings": len(samples)})
    return rows


def _paper_name(name: str, channels: int) -> str:
    """The paper's row for the same thing; its IterNorm whitens all channels together."""
    if found := re.fullmatch(rf"IterNorm T=(\d) d={channels}", name):
        return f"IterNorm, T={found[1]}"
    return {"conv3x3": "cudnn convolution", _DBN: "DBN", _DBN_KERNELS: "DBN"}.get(name, "")


def plot(results: Sequence[Result]) -> "Figure":
    """Time relative to the convolution, ours and the paper's, a panel for each shape."""
    from matplotlib.figure import Figure

    columns = max(len({tuple(result.config["shape"]) for result in results}), 1)
    lines = -(-len(results) // columns)
    height = 0.9 + 0.3 * max(len(result.rows) for result in results)
    figure = Figure(figsize=(4.75 * columns, height * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for empty in panels[len(results) :]:
        empty.remove()
    for axes, result in zip(panels, results, strict=False):
        names = [row["name"] for row in result.rows]
        heights = range(len(names))
        ratios = [row["ratio_to_convolution"] for row in result.rows]
        colors = [palette.color_of(_norm(name)) or palette.GREY for name in names]
        # From 1, to the left what is faster than the convolution: ratios lie between a twentieth and fifteen.
        axes.set_xscale("log")
        axes.barh(heights, [ratio - 1 for ratio in ratios], left=1, color=colors, height=0.6)
        paper = [(row["paper_ratio_to_convolution"], height) for row, height in zip(result.rows, heights, strict=True)]
        known = [point for point in paper if point[0] is not None]
        axes.scatter(
            [x for x, _ in known],
            [y for _, y in known],
            color="white",
            edgecolors=palette.PAPER,
            marker="D",
            zorder=3,
            s=25,
            label="the paper (TITAN Xp, 2019)",
        )
        for height, row in zip(heights, result.rows, strict=True):
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
            axes.text(1.0, height, f" {_digits(row['median_ms'])} ms", **place)
        axes.set_yticks(heights, names, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        lowest, highest = (edge(*ratios, *(x for x, _ in known)) for edge in (min, max))
        axes.set_xlim(lowest / 1.3, highest * 1.3)
        ticks = [tick for tick in _TICKS if lowest / 1.3 <= tick <= highest * 1.3]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="x", alpha=0.25)
        shape = "x".join(map(str, result.config["shape"]))
        axes.set(xlabel="time / time of a 3x3 convolution", title=f"{shape}, {result.config['device']}")
    marks = figure.axes[0].get_legend_handles_labels()
    figure.legend(*marks, fontsize=8, loc="outside lower center")
    return figure


def _norm(name: str) -> str:
    """The norm of a row, of which an IterNorm has the colour of its group, whatever its T."""
    return re.sub(r"^(?:IterNorm|authors') T=\d (d=\d+).*", r"IterNorm T=5 \1", name)


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Ratios to the convolution of the same run, and times."""
    found = []
    for result in results:
        channels, device = result.config["shape"][1], result.config["device"]
        # The rows of one norm side by side and by T, whatever the order in which they were timed.
        norms = list(dict.fromkeys(_norm(row["name"]) for row in result.rows))
        for row in sorted(result.rows, key=lambda row: (norms.index(_norm(row["name"])), row["name"])):
            if row["paper_ms"] is None:
                continue
            what = f"{row['name']}, {channels} channels, {device}"
            note = f"{_digits(row['median_ms'])} ms; the paper {row['paper_ms']:.2f} ms on a TITAN Xp"
            ratio = f"{row['paper_ratio_to_convolution']:.2f}"
            ours = (row["ratio_to_convolution"],)
            found.append(Comparison(what, ratio, ours, unit="× conv", note=note, count=row.get("timings")))
    return found


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper says of the cost. It timed a GPU, so a GPU decides; a CPU is told beside it."""
    # By device, what IterNorm's time is divided by, and the number of channels.
    ratios: dict[str, dict[str, dict[int, float]]] = {}
    for result in sorted(results, key=lambda result: result.config["device"] != "cuda"):
        channels = result.config["shape"][1]
        times = {row["name"]: row["median_ms"] for row in result.rows}
        ours = times.get(f"IterNorm T=5 d={channels}")
        if ours is not None:
            of_device = ratios.setdefault(result.config["device"], {})
            for name in ("conv3x3", _DBN, _DBN_KERNELS):
                if name in times:
                    of_device.setdefault(name, {})[channels] = ours / times[name]
    found = []
    for text, name, limit, what in (
        (
            "IterNorm (T=5) is at most slightly slower than a convolution (the paper: 1.31 and 1.02 times cudnn's).",
            *("conv3x3", _SLIGHTLY, "time / time of the convolution"),
        ),
        (
            "IterNorm is significantly faster than DBN (by eigendecomposition, as the paper's).",
            *(_DBN, _FASTER, "time / time of DBN with groups of 16"),
        ),
    ):
        of_devices = {device: names[name] for device, names in ratios.items() if name in names}
        evidence = [f"on {device} {_listed(values)}" for device, values in of_devices.items()]
        if name == _DBN and (kernels := ratios.get("cuda", {}).get(_DBN_KERNELS)):
            evidence.append(f"of DBN by our kernels, which the paper did not have, {_listed(kernels)}")
        evidence.append(f"at most {limit} is needed, on a GPU as in the paper")
        of_gpu = of_devices.get("cuda", {})
        holds = {channels: of_gpu[channels] <= limit if channels in of_gpu else None for channels in _CHANNELS}
        finding, coverage = rule.over_parts({str(key): measured(value) for key, value in holds.items()}, "sizes")
        found.append(Claim(text, finding, f"{what}: {'; '.join(evidence)}" if of_devices else "", coverage))
    return found


def _digits(value: float) -> str:
    """Three digits, zeros at the end too."""
    return f"{value:#.3g}".rstrip(".")


def _listed(ratios: Mapping[int, float]) -> str:
    return ", ".join(f"{ratio:.2f} with {channels} channels" for channels, ratio in ratios.items())
