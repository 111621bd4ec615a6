"""The time spent on a job by all processes that worked on it, killed ones included."""

import time
from contextlib import suppress
from pathlib import Path

from iternorm.report.files import write_text_atomically

# The file of a job's folder that holds the seconds so far, and the least time between two writes of it.
NAME = "seconds"
PERIOD_SECONDS = 1.0


class Stopwatch:
    """Continues from the time that the previous process last wrote, up to a second before its end.

    Args:
        folder: Of the job.
        keeps: Whether to write: of several processes that work on a job together, the first alone does.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self._path, self._keeps = folder / NAME, keeps
        try:
            self._before = float(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._before = 0.0
        self._begun = self._kept = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of all processes."""
        return self._before + time.perf_counter() - self._begun

    def keep(self) -> None:
        """Write the time if the last write is long enough ago."""
        now = time.perf_counter()
        if not self._keeps or now - self._kept < PERIOD_SECONDS:
            return
        self._kept = now
        # A full disk loses the time of this process, not its work.
        with suppress(OSError):
            write_text_atomically(self._path, f"{self.seconds:.3f}\n")


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
