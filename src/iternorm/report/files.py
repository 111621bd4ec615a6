"""Atomic writes: a file is complete or absent."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What fails in the block is an error that names `path` and a remedy.

    Raises:
        OSError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}: make room, change permissions or move away what is "
            "there, or name another folder"
        ) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """See whether a file can be written there, missing folders being made. Nothing is left behind.

    Raises:
        OSError: It cannot.
    """
    target = Path(path)
    with writing(target):
        folder = target.parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        # On a full disk a file can be made, but nothing can be written to it.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\n")


def write_text_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8 so that `path` holds either its old content or all of the new. Makes missing folders.

    Raises:
        OSError: It cannot be written.
    """
    return _write_atomically(Path(path), text.encode())


def write_figure_atomically(path: str | os.PathLike[str], figure: "Figure") -> Path:
    """Write a figure in the format of the suffix of `path`, as `write_text_atomically` writes a text.

    Raises:
        OSError: It cannot be written.
        ValueError: Matplotlib has no format of this suffix.
    """
    target, buffer = Path(path), BytesIO()
    figure.savefig(buffer, format=target.suffix.removeprefix("."), dpi=110)
    return _write_atomically(target, buffer.getvalue())


def _write_atomically(target: Path, content: bytes) -> Path:
    # In the same folder, because a rename is atomic only within one file system.
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target
