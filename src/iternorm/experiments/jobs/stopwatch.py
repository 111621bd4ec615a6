"""The time spent on a job by all processes that worked on it, killed ones included."""

import math
import threading
import time
from contextlib import suppress
from pathlib import Path

from iternorm.report.files import write_text_atomically

# The file of a job's folder that holds the seconds so far, and the time between two writes of it.
NAME = "seconds"
PERIOD_SECONDS = 1.0


class Stopwatch:
    """Continues from the time that the previous process last wrote, at its end or up to a second before a kill.

    A ``with`` block is the time of this process. A thread writes meanwhile: a job may read images, compile or evaluate
    for minutes without a step.

    Args:
        folder: Of the job.
        keeps: Whether to write: of several processes that work on a job together, the first alone does.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self._path, self._keeps = folder / NAME, keeps
        self._before = _read(self._path)
        self._begun = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)

    @property
    def seconds(self) -> float:
        """Of all processes."""
        return self._before + time.perf_counter() - self._begun

    def __enter__(self) -> "Stopwatch":
        if self._keeps:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._keeps:
            self._ended.set()
            self._thread.join()
            self._write()

    def _write_on(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            self._write()

    def _write(self) -> None:
        # A full disk loses the time of this process, not its work.
        with suppress(OSError):
            write_text_atomically(self._path, f"{self.seconds:.3f}\n")


def _read(path: Path) -> float:
    """The seconds that a file holds; 0 where there is none that can be read."""
    try:
        found = float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0
    return found if 0 <= found < math.inf else 0.0


def duration(seconds: float) -> str:
    """A length of time, for reading.

    Example:
        >>> duration(0.42), duration(59.97), duration(75), duration(7380)
        ('0.4 s', '1 min 0 s', '1 min 15 s', '2 h 3 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
