"""The folder in which compiled kernels are kept: whose it may be, and what is read from it.

Loading a library runs its code. So a folder or a file that belongs to another user, or that others can write to, is
refused, and the content must be what was put there: each file ends with its digest.
"""

import hashlib
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


class Refused(OSError):
    """Why a folder or a file is not trusted."""


def folder() -> Path:
    """`ITERNORM_CACHE`, else `iternorm` in the user's cache folder."""
    if named := os.environ.get("ITERNORM_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "iternorm"


@contextmanager
def opened() -> Iterator[Path]:
    """`folder()`, made where it does not exist and held; raises `Refused`, or an `OSError` where it cannot be made."""
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(path) as name:
        yield name


@contextmanager
def held(path: Path) -> Iterator[Path]:
    """Another path of a folder that only this user can write to; raises `Refused` where others can.

    Users who can write to a parent of the folder can replace the folder after the check. The path that is returned goes
    through the open descriptor, so it always leads to the folder that was checked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(path, os.fstat(descriptor))
        # Not /proc/self: the compiler has to find it too.
        name = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield name if name.is_dir() else path
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result) -> None:
    # Root is trusted: root can do anything anyway, and an image may come with compiled kernels.
    if status.st_uid not in (os.geteuid(), 0):
        raise Refused(f"{path} belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")


def get(folder: Path, name: str, max_age: float = math.inf) -> bytes:
    """What was put there by that name, not longer ago than `max_age` seconds.

    Raises an `OSError` where that is nothing, or another user's, or damaged.
    """
    # A link is not followed, and a pipe does not block.
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check(folder / name, status)
        content = file.read()
    content, digest = content[:-_DIGEST], content[-_DIGEST:]
    if digest != _digest(name, content):
        raise OSError(f"{folder / name} is damaged")
    if time.time() - status.st_mtime > max_age:
        raise OSError(f"{folder / name} is out of date")
    return content


def put(folder: Path, name: str, content: bytes) -> None:
    """Keep `content` by that name, all of it or nothing. Loaders of libraries ignore the digest behind it."""
    descriptor, path = tempfile.mkstemp(prefix="build-", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content + _digest(name, content))
        os.replace(path, folder / name)
    except BaseException:
        os.unlink(path)
        raise


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
