"""Monitors a run while it trains, without waiting for the device: whether the loss is finite, progress, speed."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

# Iterations between two looks at the scores.
LOOK_EVERY = 100
# Between two messages of progress.
REPORT_SECONDS = 0.25


class Watch:
    """Watches the scores of the row that is being trained.

    On a GPU a look asks for a copy of the scores and reads the copy that the look before it asked for, so it waits for
    iterations that are long done. It comes at fixed iterations: a run that diverges ends at the same one each time.

    Args:
        scores: The sums of `iternorm.experiments.training.graph`, which steps add to.
        batch_size: Examples that a step adds.
        processes: How many processes have such a batch.
        total: Iterations of the whole run.
        step: Called as ``step(done, total, loss=..., error=..., rate=...)``, a few times a second at most.
    """

    def __init__(self, scores: Tensor, batch_size: float, processes: int, total: int, step: Callable[..., None]):
        self._scores = scores
        self._batch_size = batch_size
        self._processes = processes
        self._total = total
        self._step = step
        self._on_gpu = scores.device.type == "cuda"
        if self._on_gpu:
            self._copy = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._reported, self._last = 0.0, -1

    def begin(self, done: int) -> None:
        """A row begins after so many iterations of the run."""
        self._done, self._asked = done, 0
        self._values: dict[str, float] = {}
        self._begun = time.perf_counter()

    def __call__(self, taken: int) -> bool:
        """Look, if it is time to. Returns False where the loss is not finite.

        Args:
            taken: Iterations of the row so far.
        """
        finite = True
        if taken % LOOK_EVERY == 0:
            finite = self._look(taken)
        if time.perf_counter() - self._reported >= REPORT_SECONDS:
            if not self._on_gpu:
                self._read(self._scores, taken)
            self.report(self._done + taken, **self._values)
        return finite

    def _look(self, taken: int) -> bool:
        if not self._on_gpu:
            return self._read(self._scores, taken)
        finite = True
        if self._asked:
            self._copied.synchronize()
            finite = self._read(self._copy, self._asked)
        self._copy.copy_(self._scores, non_blocking=True)
        self._copied.record()
        self._asked = taken
        return finite

    def _read(self, scores: Tensor, iterations: int) -> bool:
        loss, wrong, _ = scores.tolist()
        examples = iterations * self._batch_size
        rate = examples * self._processes / max(time.perf_counter() - self._begun, 1e-9)
        self._values = {"loss": loss / examples, "error": 100 * wrong / examples, "rate": rate}
        return math.isfinite(loss)

    def report(self, done: int, **values: float) -> None:
        """Report how many iterations of the run are done."""
        self._reported, self._last = time.perf_counter(), done
        self._step(done, self._total, **values)

    def end(self) -> None:
        """Report that the run has ended, if that is new: it diverged, or was finished before."""
        if self._last != self._total:
            self.report(self._total)
