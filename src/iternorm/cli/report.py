"""`iternorm report`."""

from pathlib import Path
from typing import Annotated

import typer

from iternorm.cli.errors import check_outputs, require
from iternorm.cli.options import Results
from iternorm.cli.terminal import tell_written, warn


def report(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="A report of these alone; a study of your own is ./study.py."),
    ] = None,
    results: Results = Path("results"),
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The folder for reproduction.md and .html, or ID.md and .html.")
    ] = Path("docs"),
) -> None:
    """Write the report: the paper's claims and numbers beside ours, for every figure and table."""
    require("matplotlib")
    from iternorm.experiments.evidence import reproduction
    from iternorm.experiments.jobs import overview, registry

    if not results.is_dir():
        raise ValueError(f"--results {results} is no folder: `iternorm run` makes it")
    chosen = registry.get_all(experiments) if experiments else None
    check_outputs(out / f"{reproduction.name_of(chosen)}.md")
    for path in reproduction.write(results, out, chosen):
        tell_written(path)
    for experiment in chosen or ():
        state = overview.survey(experiment, results)
        warn(state.unusable + state.notes)
