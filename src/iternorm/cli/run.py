"""`iternorm run`."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn
from typer.core import TyperCommand

from iternorm.cli.errors import require
from iternorm.cli.options import Data, Device, Experiments, Results, Smoke, data_folder
from iternorm.cli.terminal import console, errors, plain_warnings, progress_bar


class OptionalAddress(TyperCommand):
    """A command whose --ray may stand without an address, which typer has no way to say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for word, following in pairwise([*args, ""]):
            # An address is host:port, ray://host:port or auto; anything else behind --ray is another argument.
            alone = word == "--ray" and not (":" in following or following in ("auto", "local"))
            given.append("--ray=local" if alone else word)
        return super().parse_args(ctx, given)


def run(
    experiments: Experiments,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, where an experiment has any.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only jobs whose name contains this, or matches it (* and ?); repeat it.")
    ] = None,
    smoke: Smoke = False,
    device: Device = "cpu",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files below .tensorboard in the folder of results.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the models with torch.compile.")] = False,
    data: Data = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Run the jobs on the Ray cluster there, or on a Ray of this machine."),
    ] = None,
    gpus_per_job: Annotated[
        float | None, typer.Option(help="With --ray on cuda: the share of a GPU that a job gets; 1 unless given.")
    ] = None,
    results: Results = Path("results"),
) -> None:
    """Run the unfinished jobs of experiments and keep the results; several such commands may run side by side."""
    from iternorm.experiments.jobs import console as screen
    from iternorm.experiments.jobs import registry, sweep

    if gpus_per_job is not None and ray is None:
        raise ValueError(f"--gpus-per-job {gpus_per_job:g} is for --ray: add it, or start several such commands")
    chosen, plan = registry.get_all(experiments), registry.Plan(smoke, device, seeds)
    # Tensors of the small size are so small that threads only wait for each other: all of it took half a minute of
    # processor time with one, and nine minutes with two on a machine that others used too.
    options = sweep.Options(device, tensorboard, compile, threads=1 if smoke else None)
    silent = not sweep.is_first_process()
    # Where both are one terminal, lines have to pass through the console that draws the bars.
    output = errors if console.is_terminal and errors.is_terminal else console
    output = Console(quiet=True) if silent else output
    bar = progress_bar(TextColumn("{task.fields[values]}"), disable=silent)
    # The small size takes real data where they are, so the folder decides which jobs there are.
    with data_folder(data), plain_warnings(), bar as progress:
        jobs = registry.select(chosen, plan, only or ())
        if not silent:
            sweep.check_folders(jobs, results)
        log = Console(quiet=True) if silent else errors
        bars = screen.Bars(progress, jobs) if log.is_terminal else screen.Lines(log)
        if ray is not None:
            require("ray")
            from iternorm.experiments.jobs import ray_sweep

            address = None if ray == "local" else ray
            share = 1.0 if gpus_per_job is None else gpus_per_job
            outcomes = ray_sweep.run(jobs, results, options, address=address, gpus_per_job=share, progress=bars.step)
        else:
            outcomes = sweep.run(jobs, results, options, progress=bars.step)
        try:
            screen.show(outcomes, jobs, bars, output, errors, stop=bool(os.environ.get("ITERNORM_TRACEBACK")))
        except KeyboardInterrupt:
            errors.print("stopped: the same command goes on from the last checkpoint", highlight=False)
            raise typer.Exit(130) from None
