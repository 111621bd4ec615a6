"""What the user did wrong, in one line, and before the work where it can be known."""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from iternorm.cli.terminal import errors
from iternorm.experiments.jobs.mistakes import StudyError

# The extra that brings a package the command line's verbs may miss.
_EXTRA_OF = {"sklearn": "demo", "matplotlib": "demo", "ray": "ray"}
_EXTRA_OF |= dict.fromkeys(("accelerate", "safetensors", "pooch", "PIL", "tensorboard"), "experiments")


def with_plain_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; a ValueError, an OSError or a missing package is printed as one line and ends with exit code 2.

    With ITERNORM_TRACEBACK=1 in the environment it is raised.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if os.environ.get("ITERNORM_TRACEBACK"):
                raise
            message = str(error)
            if isinstance(error, StudyError) or isinstance(error.__cause__, StudyError):
                message += " (ITERNORM_TRACEBACK=1 shows all)"
            missing = error.__cause__ if isinstance(error, StudyError) else error
            if isinstance(missing, ModuleNotFoundError):
                extra = _EXTRA_OF.get((missing.name or "").partition(".")[0])
                if extra is not None:
                    message = f"this needs {missing.name}: pip install 'iternorm[{extra}]'"
                elif missing is error:
                    raise
            errors.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None

    return wrapped


def require(*packages: str) -> None:
    """Fail before the work, not after it, where a package it needs is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def check_outputs(*paths: Path | None) -> None:
    """Fail before the work, not after it, where a file cannot be written, or two outputs have one file."""
    from iternorm.report.files import check_writable

    seen = set()
    for path in paths:
        if path is not None:
            if path.resolve() in seen:
                raise ValueError(f"{path} is named twice, but each output needs a file of its own")
            seen.add(path.resolve())
            check_writable(path)
