"""Files that are whole or not there."""

import os
from pathlib import Path


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
