"""The command line: one small function a verb, which checks nothing itself and leaves the work to the library.

A new verb is a function with typer's annotations under `@verb`. What the user did wrong arrives as a ValueError, an
OSError or a missing package, and is printed as one line; with ITERNORM_TRACEBACK=1 in the environment it is raised.
"""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

app = typer.Typer(
    help="Whitening normalization for PyTorch: see it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
_errors = Console(stderr=True)

# The extra that brings a package the command line's verbs may miss.
_EXTRA_OF = {"sklearn": "demo", "matplotlib": "demo"}


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the command line under its own name; the user's errors become one line and exit code 2."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if os.environ.get("ITERNORM_TRACEBACK"):
                raise
            message = str(error)
            if isinstance(error, ModuleNotFoundError):
                extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
                if extra is None:
                    raise
                message = f"this needs {error.name}: pip install 'iternorm[{extra}]'"
            _errors.print(f"[bold red]error:[/] {_escape(message)}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None

    return app.command()(wrapped)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _require(*packages: str) -> None:
    """Fail before the work, not after it, where a package it needs is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_errors,
        transient=True,
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        from iternorm import __version__

        console.print(f"iternorm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Whitening normalization for PyTorch: see it, measure it."""


@verb
def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder for report.html and results.json.")] = Path(
        "iternorm-demo"
    ),
    epochs: Annotated[int, typer.Option(help="Passes over the training set, each one full-batch step.")] = 60,
    seed: Annotated[int, typer.Option(help="Decides the initial weights.")] = 0,
) -> None:
    """Train the paper's MLP on handwritten digits with four normalizations and write a report (about half a minute)."""
    _require("sklearn", "matplotlib")
    from iternorm.experiments import demo as experiment
    from iternorm.experiments import demo_report

    experiment.check_arguments(epochs, seed)
    with _progress() as progress:
        task = progress.add_task("training", total=experiment.count_steps(epochs))

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        results = experiment.run(epochs=epochs, seed=seed, progress=step)
    console.print(demo_report.table(results))
    page = demo_report.write(results, out)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


@verb
def bench(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Timings of each layer; the median is shown.")] = 15,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every timing and the provenance to this file.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's own number unless given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="On cuda: few layers and rounds, about a minute.")] = False,
) -> None:
    """Time the layers, forward and backward, against a convolution, BatchNorm and the authors' formulation."""
    from iternorm import bench as benchmark

    benchmark.check_arguments(device, rounds, threads, quick)
    with _progress() as progress:
        if device == "cuda":
            task = progress.add_task("timing", total=benchmark.cuda.count_parts(quick))

            def done(part: str) -> None:
                progress.update(task, advance=1, description=part)

            result = benchmark.cuda.run(rounds=rounds, quick=quick, progress=done)
        else:
            task = progress.add_task("timing", total=benchmark.count_timings(rounds=rounds))
            result = benchmark.run(rounds=rounds, threads=threads, progress=lambda: progress.update(task, advance=1))
    if json is not None:
        from json import dumps

        from iternorm.analysis.report import write_text_atomically

        json = write_text_atomically(json, dumps(result, indent=1) + "\n")
    if device == "cuda":
        console.print("\n".join(benchmark.cuda.lines(result)), highlight=False, markup=False, soft_wrap=True)
    else:
        for case in result["cases"]:
            console.print(benchmark.table(case))
        for line in benchmark.notes(result):
            console.print(line, highlight=False)
    if json is not None:
        console.print(f"Written: {json}", highlight=False, soft_wrap=True)
