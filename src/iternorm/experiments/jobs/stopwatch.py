"""How long a job has been worked on, by all the processes that did: one that was killed counts too."""

import time
from contextlib import suppress
from pathlib import Path

from iternorm.report.files import write_text_atomically

# The file of a job's folder that holds the seconds so far, and the least time between two writes of it.
NAME = "seconds"
PERIOD_SECONDS = 1.0


class Stopwatch:
    """Goes on where the process before it was last seen, up to a second before its end.

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
        """Write the time, if it is long ago that it was written."""
        now = time.perf_counter()
        if not self._keeps or now - self._kept < PERIOD_SECONDS:
            return
        self._kept = now
        # A disk that is full costs the time of this process and not its work.
        with suppress(OSError):
            write_text_atomically(self._path, f"{self.seconds:.3f}\n")
