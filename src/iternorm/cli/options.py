"""Options that several verbs have, and what a shell completes them with."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """What a shell completes an option's value with."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def experiment_ids(incomplete: str) -> list[str]:
    """The experiments that an incomplete word may become."""
    from iternorm.experiments.jobs.registry import EXPERIMENTS

    return one_of(*EXPERIMENTS, "all")(incomplete)


def data_sets(incomplete: str) -> list[str]:
    """The data sets that an incomplete word may become."""
    from iternorm.experiments.data.datasets import DATA_SETS

    return one_of(*DATA_SETS)(incomplete)


Device = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=one_of("cpu", "cuda"))]
Experiments = Annotated[
    list[str],
    typer.Argument(
        metavar="ID",
        help="Ids that `iternorm ls` lists, or all; or a study of your own, ./study.py.",
        autocompletion=experiment_ids,
    ),
]
Results = Annotated[Path, typer.Option("--results", file_okay=False, help="The folder of results.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="The small size: all experiments in a minute or two.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", file_okay=False, help="The folder of data sets; $ITERNORM_DATA unless given."),
]


@contextmanager
def data_folder(folder: Path | None) -> Iterator[None]:
    """ITERNORM_DATA in the environment, for a while, where there is a folder.

    Raises:
        ValueError: The folder does not exist.
    """
    if folder is not None and not folder.exists():
        raise ValueError(
            f"--data {folder} does not exist: name the folder of data sets, or make it, and what can be downloaded is"
        )
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
