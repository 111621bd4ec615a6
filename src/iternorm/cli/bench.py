"""`iternorm bench`."""

from pathlib import Path
from typing import Annotated

import typer

from iternorm.cli.errors import check_outputs
from iternorm.cli.options import Device
from iternorm.cli.terminal import console, progress_bar, tell_written


def bench(
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(help="Timings of each layer; the median is shown.")] = 15,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every timing and the provenance to this file.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's own number unless given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="On cuda: few layers and rounds, about a minute.")] = False,
    networks: Annotated[
        bool, typer.Option("--networks", help="On cuda: whole training steps, eager and compiled, instead of layers.")
    ] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="On cuda: the local part of synchronized layers, instead of layers.")
    ] = False,
    roots: Annotated[
        bool,
        typer.Option("--roots", help="On cuda: roots of matrices, Whitener and GroupWhitening, instead of layers."),
    ] = False,
) -> None:
    """Time the layers, forward and backward, against a convolution, BatchNorm and the authors' formulation."""
    from iternorm import bench as benchmark

    benchmark.check_arguments(device, rounds, threads, quick, networks, sync, roots)
    check_outputs(json)

    def save(result: dict) -> None:
        if json is not None:
            from json import dumps

            from iternorm.report.files import write_text_atomically

            write_text_atomically(json, dumps(result, indent=1) + "\n")

    with progress_bar() as progress:
        if networks or sync or roots:
            task = progress.add_task("timing", total=None)
            gpu = benchmark.gpu
            run_parts = gpu.run_networks if networks else gpu.run_synchronized if sync else gpu.run_roots
            result = run_parts(rounds=rounds, progress=lambda part: progress.update(task, description=part), save=save)
        elif device == "cuda":
            task = progress.add_task("timing", total=benchmark.gpu.count_parts(quick))

            def done(part: str) -> None:
                progress.update(task, advance=1, description=part)

            result = benchmark.gpu.run(rounds=rounds, quick=quick, progress=done, save=save)
        else:
            task = progress.add_task("timing", total=benchmark.count_timings(rounds=rounds))
            result = benchmark.run(rounds=rounds, threads=threads, progress=lambda: progress.update(task, advance=1))
    try:
        save(result)
    finally:
        # The tables are what is left if the disk is full.
        if device == "cuda":
            gpu = benchmark.gpu
            written = (networks, gpu.network_lines), (sync, gpu.synchronized_lines), (roots, gpu.root_lines)
            lines = next((lines_of for asked, lines_of in written if asked), gpu.lines)(result)
            console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        else:
            for case in result["cases"]:
                console.print(benchmark.table(case))
            for line in benchmark.notes(result):
                console.print(line, highlight=False)
    if json is not None:
        tell_written(json)
