"""Claims: at most one process works on a job, on one machine or on several that share the results folder.

A claim is an exclusive `flock` on a file. The kernel gives it up when its holder ends, however it ends, so a dead
process keeps nothing; that the file exists means nothing.
"""

import os
import time
from pathlib import Path

from iternorm.report.files import writing

# Somebody who only looks whether a claim is held takes a shared lock for a moment: that must not read as a claim.
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.02

_held: "set[Claim]" = set()


class Claim:
    """A claim that is held, until `release` or the end of a ``with`` block."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Give it up, and remove its file. A second call does nothing."""
        if self._descriptor is not None:
            # While it is held: whoever opened the file before finds in `claim` that it is not the one at the path.
            self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def claim(path: Path) -> Claim | None:
    """Take the claim whose file is `path`, or return None where somebody holds it.

    Raises:
        OSError: The file cannot be made, or the file system has no locks.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        taken = False
        try:
            # Not locked: held, or looked at. Locked, but not the file at the path: its holder has just removed it.
            taken = _lock(descriptor, path, exclusive=True) and _is_at(descriptor, path)
        finally:
            if not taken:
                os.close(descriptor)
        if taken:
            return Claim(path, descriptor)
    return None


def is_held(path: Path) -> bool:
    """Whether somebody holds the claim whose file is `path`, this process included; False where it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor, path, exclusive=False)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, *, exclusive: bool) -> bool:
    try:
        import fcntl
    except ModuleNotFoundError as error:
        raise OSError("results are claimed with flock, which this system has not: use Linux, macOS or WSL") from error
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(f"{path} cannot be locked ({error}): use a results folder on a file system with locks") from error
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _forget_in_child() -> None:
    """A forked child shares the lock, and a data worker that outlives its parent would keep it."""
    for held in list(_held):
        held._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
