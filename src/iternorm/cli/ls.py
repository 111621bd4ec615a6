"""`iternorm ls`."""

from pathlib import Path

from iternorm.cli.options import Data, Results, Smoke, data_folder
from iternorm.cli.terminal import console, warn


def ls(smoke: Smoke = False, data: Data = None, results: Results = Path("results")) -> None:
    """List the experiments, one for each figure and table of the paper, and how much of each is done here."""
    from rich.table import Table

    from iternorm.experiments.jobs import registry

    table = Table("id", "what", "cost", "results", box=None, pad_edge=False)
    unusable: list[str] = []
    with data_folder(data):
        for name in registry.EXPERIMENTS:
            experiment = registry.get(name)
            state = registry.survey(experiment, results, smoke=smoke)
            unusable += state.unusable
            table.add_row(name, experiment.title.rstrip("."), experiment.cost, str(state))
    warn(unusable)
    console.print(table, highlight=False)
