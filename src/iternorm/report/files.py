"""Atomic writes: a file is complete or absent."""

import os
import tempfile
from pathlib import Path


def check_writable(path: str | os.PathLike[str]) -> None:
    """See whether a file can be written there, missing folders being made. Nothing is left behind.

    Raises:
        OSError: It cannot.
    """
    target = Path(path)
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(f"{target} cannot be written: {folder} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"{target} cannot be written: {error.strerror} in {folder.absolute()}") from error


def write_text_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8 so that `path` holds either its old content or all of the new. Makes missing folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system.
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target
