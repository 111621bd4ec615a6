"""A result of the benchmark for the terminal."""

from typing import TYPE_CHECKING

from iternorm.timing.cpu.candidates import PAPER_MS

if TYPE_CHECKING:
    from rich.table import Table

_README_ROWS = ("conv3x3", "BatchNorm2d", "DBN d=16", "IterNorm T=5 d=64")


def table(case: dict) -> "Table":
    """One case of the result as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def ratio(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    layout = "channels_last" if case["channels_last"] else "contiguous"
    printed = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{'x'.join(map(str, case['shape']))} {case['dtype']}, {layout}, forward + backward",
    )
    printed.add_column("layer", no_wrap=True)
    # Two short lines each: the table fits 80 columns.
    for name in ("median\nms", "spread\n%", "ratio to\nconv", "ratio to\nBN", "paper's\nto conv", "extra\nmemory"):
        printed.add_column(name, justify="right", no_wrap=True)
    for row in case["rivals"]:
        printed.add_row(
            row["name"],
            f"{row['median_ms']:.2f}",
            f"{100 * (row['max_ms'] - row['min_ms']) / row['median_ms']:.0f}",
            ratio(row["ratio_to_convolution"]),
            ratio(row["ratio_to_batch_norm"]),
            ratio(row["paper_ratio_to_convolution"]),
            f"{row['extra_activations']:.2f}",
        )
    return printed


def notes(result: dict) -> list[str]:
    """What a reader of the tables has to know, one line each."""
    machine, settings = result["provenance"]["machine"], result["settings"]
    convolution, plain = PAPER_MS["cudnn convolution"], PAPER_MS["nn convolution"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    lines = [
        f"{where}; torch {result['provenance']['torch']['version']}; {settings['rounds']} interleaved rounds.",
        "spread: (max - min) / median.",
        "T: Newton steps. d: channels whitened together. authors': the 2019 formulation with its copies, in our words.",
        "paper's to conv: Table A1, TITAN Xp, relative to its cudnn convolution (its nn convolution: "
        + ", ".join(f"{plain[channels] / convolution[channels]:.2f} at C={channels}" for channels in plain)
        + "). The paper does not state the group of its DBN.",
        "extra memory: peak above input, output and their gradients, in units of one activation.",
    ]
    if settings["malloc_thresholds_set"] is True:
        lines.append("glibc was told to keep large blocks (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), alike for every row.")
    elif settings["malloc_thresholds_set"] is False:
        lines.append("The allocator's thresholds could not be set here: rows that copy more may pay for fresh pages.")
    return lines


def markdown(result: dict) -> str:
    """The table for documents: what a layer costs compared with BatchNorm and a convolution."""
    machine, version = result["provenance"]["machine"], result["provenance"]["torch"]["version"]
    where = f"{machine['cpu']}, {machine['threads']} thread{'s' if machine['threads'] != 1 else ''}, torch {version}"
    lines = [
        f"{where}. Forward + backward of one layer, fp32, ms:",
        "",
        "| activation | " + " | ".join(_README_ROWS) + " | IterNorm / BN | IterNorm / conv3x3 |",
        "| --- |" + " ---: |" * (len(_README_ROWS) + 2),
    ]
    for case in result["cases"]:
        rows = {row["name"]: row for row in case["rivals"]}
        ours = rows[_README_ROWS[-1]]
        cells = [f"{rows[name]['median_ms']:.1f}" for name in _README_ROWS]
        cells += [f"{ours[f'ratio_to_{other}']:.2f}" for other in ("batch_norm", "convolution")]
        lines.append(f"| {'x'.join(map(str, case['shape']))} | {' | '.join(cells)} |")
    return "\n".join(lines)
