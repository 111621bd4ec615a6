"""`iternorm demo`."""

from pathlib import Path
from typing import Annotated

import typer

from iternorm.cli.errors import check_outputs, require
from iternorm.cli.terminal import console, progress_bar


def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder for report.html and results.json.")] = Path(
        "iternorm-demo"
    ),
    epochs: Annotated[int, typer.Option(help="Passes over the training set, each one full-batch step.")] = 60,
    seed: Annotated[int, typer.Option(help="The first seed, which decides the initial weights.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds to average over.")] = 5,
) -> None:
    """Train the paper's MLP on handwritten digits with four normalizations and write a report (less than a minute)."""
    require("sklearn", "matplotlib")
    from iternorm.experiments.demo import page as demo_report
    from iternorm.experiments.demo import runs as experiment

    experiment.check_arguments(epochs, seed, seeds)
    check_outputs(out / "report.html")
    with progress_bar() as progress:
        task = progress.add_task("training", total=experiment.count_steps(epochs, seeds))

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        results = experiment.run(epochs=epochs, seed=seed, num_seeds=seeds, progress=step)
    try:
        page = demo_report.write(results, out)
    finally:
        # The table is what is left if the disk is full.
        console.print(demo_report.table(results))
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)
