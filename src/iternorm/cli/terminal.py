"""Where the command line writes: results to stdout, errors and progress to stderr."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

console = Console()
errors = Console(stderr=True)


def progress_bar(*more: ProgressColumn, disable: bool = False) -> Progress:
    """A bar for each task on stderr, which disappears when the work is done; none if stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *more,
        console=errors,
        transient=True,
        disable=disable or not errors.is_terminal,
    )


def warn(reasons: Iterable[str]) -> None:
    """Print each reason once."""
    # Experiments that share results share what is wrong with them.
    for reason in dict.fromkeys(reasons):
        errors.print(f"warning: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print Python's warnings as `warn` does, without the line of code that gave them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: warn([str(message)])
        yield


def tell_written(path: Path) -> None:
    """Say which file was written, in a line that a terminal does not break."""
    console.print(f"Written: {path}", highlight=False, soft_wrap=True, markup=False)
