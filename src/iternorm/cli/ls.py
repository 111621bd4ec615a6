"""`iternorm ls`."""

from pathlib import Path
from typing import Annotated

import typer

from iternorm.cli.options import Data, Results, Smoke, data_folder, experiment_ids
from iternorm.cli.terminal import console, warn


def ls(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", help="These alone; a study of your own is ./study.py.", autocompletion=experiment_ids
        ),
    ] = None,
    smoke: Smoke = False,
    data: Data = None,
    results: Results = Path("results"),
) -> None:
    """List the experiments, one for each figure and table of the paper, and how much of each is done here."""
    from rich.table import Table

    from iternorm.experiments.jobs import overview, registry

    table = Table("id", "what", "cost", "results", box=None, pad_edge=False)
    warnings: list[str] = []
    with data_folder(data):
        for experiment in registry.get_all(experiments or ["all"]):
            state = overview.survey(experiment, results, smoke=smoke)
            warnings += state.unusable + state.notes
            table.add_row(experiment.id, experiment.title.rstrip("."), experiment.cost, str(state))
    warn(warnings)
    console.print(table, highlight=False)
