"""`iternorm plot`."""

from pathlib import Path
from typing import Annotated

import typer

from iternorm.cli.errors import check_outputs, require
from iternorm.cli.options import Data, Experiments, Results, Smoke, data_folder
from iternorm.cli.terminal import console, warn


def plot(
    experiments: Experiments,
    smoke: Smoke = False,
    data: Data = None,
    results: Results = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The figure's file (.png, .svg or .pdf); beside the results unless given."),
    ] = None,
) -> None:
    """Draw an experiment's figure from the results that are there."""
    require("matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    from iternorm.experiments.jobs import overview, registry

    chosen = registry.get_all(experiments)
    if out is not None and len(chosen) > 1:
        raise ValueError(f"--out {out} is one file, for one experiment: {len(chosen)} are given")
    if out is not None and out.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"--out {out} does not say the kind of figure: end its name with .png, .svg or .pdf")
    check_outputs(out)
    without: list[str] = []
    with data_folder(data):
        for experiment in chosen:
            try:
                path, state = overview.draw(experiment, results, smoke=smoke, out=out)
            except overview.NothingFinishedError as error:
                # Those behind it may have results.
                without.append(str(error))
                continue
            warn(state.unusable + state.notes)
            part = f"  ({state})" if state.missing else ""
            console.print(f"Written: {path}{part}", highlight=False, soft_wrap=True, markup=False)
    if without:
        raise ValueError("; ".join(without))
