"""What a user's study raises, as one sentence that names the place in the study's file."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StudyError(ValueError):
    """A study's file raised, or returned what it must not; the cause is what it raised."""


@contextmanager
def located(path: Path | None, function: str = "") -> Iterator[None]:
    """Raise what a study raises as a `StudyError`; ``sys.exit`` too, which would end everything without a word.

    Args:
        path: The study's file; with None, for the experiments of the package, errors pass as they are.
        function: The function of the file that is called; empty while the file is imported.

    Raises:
        StudyError: The study raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if path is None:
            raise
        raise StudyError(_sentence(error, path, function)) from error


def _sentence(error: BaseException, path: Path, function: str) -> str:
    """``mine.py, line 12, in jobs: KeyError: 'x'``, the line being the last one in the study's file."""
    file, text = str(path.resolve()), str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == file:
        line, text = error.lineno, error.msg
    # Comprehensions and lambdas have no name to look for.
    names = [frame.name for frame in frames if not frame.name.startswith("<")]
    function = names[-1] if names else function
    place = f"{path}" + (f", line {line}" if line else "") + (f", in {function}" if function else "")
    return f"{place}: {type(error).__name__}" + (f": {text}" if text else "")
