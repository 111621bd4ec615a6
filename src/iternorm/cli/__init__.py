"""The command line: one small function a verb, which checks nothing itself and leaves the work to the library.

A new verb is a function with typer's annotations under `@verb`. What the user did wrong arrives as a ValueError, an
OSError or a missing package, and is printed as one line; with ITERNORM_TRACEBACK=1 in the environment it is raised.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand

app = typer.Typer(
    help="Whitening normalization for PyTorch: see it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()
_errors = Console(stderr=True)

# The extra that brings a package the command line's verbs may miss.
_EXTRA_OF = {"sklearn": "demo", "matplotlib": "demo", "ray": "ray"}
_EXTRA_OF |= dict.fromkeys(("accelerate", "safetensors", "pooch", "PIL", "tensorboard"), "experiments")


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the command line under its own name; the user's errors become one line and exit code 2."""
    return app.command()(_with_plain_errors(function))


def _with_plain_errors(function: Callable[..., Any]) -> Callable[..., Any]:
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

    return wrapped


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _require(*packages: str) -> None:
    """Fail before the work, not after it, where a package it needs is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _check_outputs(*paths: Path | None) -> None:
    """Fail before the work, not after it, where a file cannot be written."""
    from iternorm.report.files import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def _one_of(*choices: str) -> Callable[[str], list[str]]:
    """What a shell completes an option's value with."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def _ids(incomplete: str) -> list[str]:
    from iternorm.experiments.jobs.registry import EXPERIMENTS

    return _one_of(*EXPERIMENTS, "all")(incomplete)


def _data_sets(incomplete: str) -> list[str]:
    from iternorm.experiments.data.datasets import DATA_SETS

    return _one_of(*DATA_SETS)(incomplete)


def _progress(*more: ProgressColumn, disable: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *more,
        console=_errors,
        transient=True,
        disable=disable or not _errors.is_terminal,
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        from iternorm import __version__

        console.print(f"iternorm {__version__}", highlight=False)
        raise typer.Exit


_Device = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=_one_of("cpu", "cuda"))]
_Experiments = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...",
        help="Ids that `iternorm ls` lists, or all; or a study of your own, ./study.py.",
        autocompletion=_ids,
    ),
]
_Results = Annotated[Path, typer.Option("--results", file_okay=False, help="The folder of results.")]
_Smoke = Annotated[bool, typer.Option("--smoke", help="The small size: all experiments in a minute or two.")]
_Data = Annotated[
    Path | None,
    typer.Option("--data", file_okay=False, help="The folder of data sets; $ITERNORM_DATA unless given."),
]


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
    from iternorm.experiments.demo import page as demo_report
    from iternorm.experiments.demo import runs as experiment

    experiment.check_arguments(epochs, seed)
    _check_outputs(out / "report.html")
    with _progress() as progress:
        task = progress.add_task("training", total=experiment.count_steps(epochs))

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        results = experiment.run(epochs=epochs, seed=seed, progress=step)
    page = demo_report.write(results, out)
    console.print(demo_report.table(results))
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


@verb
def bench(
    device: _Device = "cpu",
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
    _check_outputs(json)

    def save(result: dict) -> None:
        if json is not None:
            from json import dumps

            from iternorm.report.files import write_text_atomically

            write_text_atomically(json, dumps(result, indent=1) + "\n")

    with _progress() as progress:
        if device == "cuda":
            task = progress.add_task("timing", total=benchmark.gpu.count_parts(quick))

            def done(part: str) -> None:
                progress.update(task, advance=1, description=part)

            result = benchmark.gpu.run(rounds=rounds, quick=quick, progress=done, save=save)
        else:
            task = progress.add_task("timing", total=benchmark.count_timings(rounds=rounds))
            result = benchmark.run(rounds=rounds, threads=threads, progress=lambda: progress.update(task, advance=1))
    save(result)
    if device == "cuda":
        console.print("\n".join(benchmark.gpu.lines(result)), highlight=False, markup=False, soft_wrap=True)
    else:
        for case in result["cases"]:
            console.print(benchmark.table(case))
        for line in benchmark.notes(result):
            console.print(line, highlight=False)
    if json is not None:
        console.print(f"Written: {json}", highlight=False, soft_wrap=True)


@verb
def analyze(
    model_factory: Annotated[
        str, typer.Argument(help="module:name or file.py:name of a model, or of a function that returns one.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="digits, mnist, cifar10 (the latter under $ITERNORM_DATA), a .npy, .npz or .pt file, or "
            "a folder of images.",
            autocompletion=_data_sets,
        ),
    ],
    batch_size: Annotated[int, typer.Option(help="Examples in a batch of the pass over the data.")] = 64,
    examples: Annotated[int, typer.Option(help="Examples to look at, chosen at random.")] = 2048,
    snd: Annotated[str, typer.Option(help="Batch sizes to estimate the batch noise (SND) for, or off.")] = "8,32,128",
    layer: Annotated[
        list[str] | None, typer.Option(help="Name of a layer; repeat it. All normalization layers unless given.")
    ] = None,
    alternative: Annotated[
        list[str] | None, typer.Option(help="What to compare with: BN, 'DBN-16', 'IterNorm T=5 d=64'; repeat it.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="train (batch statistics) or eval (running statistics).", autocompletion=_one_of("train", "eval")
        ),
    ] = "train",
    image_size: Annotated[int | None, typer.Option(help="Scale and crop the images of a folder to this.")] = None,
    flatten: Annotated[bool, typer.Option("--flatten", help="Give the model vectors instead of images.")] = False,
    device: _Device = "cpu",
    seed: Annotated[int, typer.Option(help="Decides the examples, their order and the draws.")] = 0,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all values to this file.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots to this file.")] = None,
) -> None:
    """Show conditioning, correlation, batch noise and drift of every normalization layer of a model."""
    from iternorm.analysis import Whitening
    from iternorm.analysis import analyze as analyze_model
    from iternorm.experiments.data import inputs

    sizes = _batch_sizes(snd)
    others = None if not alternative else [Whitening.parse(label) for label in alternative]
    _check_outputs(json, html)
    target = inputs.open_device(device)
    model = inputs.build_model(model_factory).to(target)
    batches = inputs.open_batches(
        data, batch_size=batch_size, max_examples=examples, image_size=image_size, flatten=flatten, seed=seed
    )
    with _progress() as progress:
        tasks = {"batches": progress.add_task("batches", total=len(batches))}

        def step(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        options: dict[str, Any] = {"layers": layer or None, "batch_sizes": sizes, "mode": mode, "seed": seed}
        result = analyze_model(model, batches, alternatives=others, progress=step, **options)
    # Files first: they are what is left if nothing can be printed.
    if json is not None:
        result.to_json(json)
    if html is not None:
        result.to_html(html)
    console.print(result.table(), highlight=False, soft_wrap=True, markup=False)
    for path in filter(None, (json, html)):
        console.print(f"Written: {path}", highlight=False, soft_wrap=True, markup=False)


def _batch_sizes(text: str) -> tuple[int, ...]:
    if text.strip().lower() == "off":
        return ()
    try:
        return tuple(sorted({int(size) for size in text.split(",")}))
    except ValueError:
        raise ValueError(f"--snd is {text!r}, but batch sizes such as 8,32,128 or off are needed") from None


@verb
def ls(smoke: _Smoke = False, data: _Data = None, results: _Results = Path("results")) -> None:
    """List the experiments, one for each figure and table of the paper, and how much of each is done here."""
    from rich.table import Table

    from iternorm.experiments.jobs import registry

    table = Table("id", "what", "cost", "results", box=None, pad_edge=False)
    unusable: list[str] = []
    with _data_folder(data):
        for name in registry.EXPERIMENTS:
            experiment = registry.get(name)
            state = registry.survey(experiment, results, smoke=smoke)
            unusable += state.unusable
            table.add_row(name, experiment.title.rstrip("."), experiment.cost, str(state))
    _warn(unusable)
    console.print(table, highlight=False)


def _warn(reasons: Iterable[str]) -> None:
    # Experiments that share results share what is wrong with them.
    for reason in dict.fromkeys(reasons):
        _errors.print(f"warning: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True)


class _OptionalAddress(TyperCommand):
    """A command whose --ray may stand without an address, which typer has no way to say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for word, following in pairwise([*args, ""]):
            # An address is host:port, ray://host:port or auto; anything else behind --ray is another argument.
            alone = word == "--ray" and not (":" in following or following in ("auto", "local"))
            given.append("--ray=local" if alone else word)
        return super().parse_args(ctx, given)


@app.command(cls=_OptionalAddress)
@_with_plain_errors
def run(
    experiments: _Experiments,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, where an experiment has any.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only jobs whose name contains this, or matches it (* and ?); repeat it.")
    ] = None,
    smoke: _Smoke = False,
    device: _Device = "cpu",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files below .tensorboard in the folder of results.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the models with torch.compile.")] = False,
    data: _Data = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Run the jobs on the Ray cluster there, or on a Ray of this machine."),
    ] = None,
    gpus_per_job: Annotated[float, typer.Option(help="With --ray on cuda: the share of a GPU that a job gets.")] = 1.0,
    results: _Results = Path("results"),
) -> None:
    """Run what is not finished of experiments, and keep the results; several such commands may run side by side."""
    from iternorm.experiments.jobs import console as screen
    from iternorm.experiments.jobs import registry, sweep

    chosen, plan = registry.get_all(experiments), registry.Plan(smoke, device, seeds)
    # Tensors of the small size are so small that threads only wait for each other: all of it took half a minute of
    # processor time with one, and nine minutes with two on a machine that others used too.
    options = sweep.Options(device, tensorboard, compile, threads=1 if smoke else None)
    silent = not sweep.is_first_process()
    # Where both are one terminal, lines have to pass through the console that draws the bars.
    output = _errors if console.is_terminal and _errors.is_terminal else console
    output = Console(quiet=True) if silent else output
    # The small size takes real data where they are, so the folder decides which jobs there are.
    with _data_folder(data), _progress(TextColumn("{task.fields[values]}"), disable=silent) as progress:
        jobs = registry.select(chosen, plan, only or ())
        bars = screen.Bars(progress, jobs)
        if ray is not None:
            _require("ray")
            from iternorm.experiments.jobs import ray_sweep

            address = None if ray == "local" else ray
            outcomes = ray_sweep.run(
                jobs, results, options, address=address, gpus_per_job=gpus_per_job, progress=bars.step
            )
        else:
            outcomes = sweep.run(jobs, results, options, progress=bars.step)
        try:
            screen.show(outcomes, jobs, bars, output, _errors, stop=bool(os.environ.get("ITERNORM_TRACEBACK")))
        except KeyboardInterrupt:
            _errors.print("stopped: the same command goes on from the last checkpoint", highlight=False)
            raise typer.Exit(130) from None


@contextmanager
def _data_folder(folder: Path | None) -> Iterator[None]:
    """ITERNORM_DATA in the environment, for a while, where there is a folder."""
    before = os.environ.get("ITERNORM_DATA")
    if folder is not None:
        os.environ["ITERNORM_DATA"] = str(folder.absolute())
    try:
        yield
    finally:
        if folder is not None:
            del os.environ["ITERNORM_DATA"]
            if before is not None:
                os.environ["ITERNORM_DATA"] = before


@verb
def plot(
    experiments: _Experiments,
    smoke: _Smoke = False,
    data: _Data = None,
    results: _Results = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The figure's file (.png, .svg or .pdf); beside the results unless given."),
    ] = None,
) -> None:
    """Draw an experiment's figure from the results that are there."""
    _require("matplotlib")
    from iternorm.experiments.jobs import registry

    chosen = registry.get_all(experiments)
    if out is not None and len(chosen) > 1:
        raise ValueError(f"--out {out} is one file, for one experiment: {len(chosen)} are given")
    with _data_folder(data):
        for experiment in chosen:
            path, state = registry.draw(experiment, results, smoke=smoke, out=out)
            _warn(state.unusable)
            part = f"  ({state})" if state.missing else ""
            console.print(f"Written: {path}{part}", highlight=False, soft_wrap=True, markup=False)


@verb
def report(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="A report of these alone; a study of your own is ./study.py."),
    ] = None,
    results: _Results = Path("results"),
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The folder for reproduction.md and .html, or ID.md and .html.")
    ] = Path("docs"),
) -> None:
    """Write the report: the paper's claims and numbers beside ours, for every figure and table."""
    _require("matplotlib")
    from iternorm.experiments.evidence import reproduction
    from iternorm.experiments.jobs import registry

    for path in reproduction.write(results, out, registry.get_all(experiments) if experiments else None):
        console.print(f"Written: {path}", highlight=False, soft_wrap=True, markup=False)
