"""The activations, and how the time and the memory of one forward and backward are measured on a CPU."""

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from iternorm.timing.cpu.candidates import Candidate


@dataclass(frozen=True)
class Case:
    """One activation that all candidates are timed on."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def make(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A correlated activation, as a network has them, and a gradient for the output.

        Always the same values on one kind of device.
        """
        generator = torch.Generator(device).manual_seed(0)
        randn = partial(torch.randn, device=device, generator=generator)
        channels = self.shape[1]
        mixing = randn(channels, channels) / channels**0.5
        x = randn(self.shape)
        x = torch.einsum("dc,nchw->ndhw", mixing + torch.eye(channels, device=device), x)
        x += randn(channels, 1, 1)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        tensors = [tensor.to(device, self.dtype).contiguous(memory_format=layout) for tensor in (x, randn(self.shape))]
        return tensors[0].requires_grad_(), tensors[1]


class Entry:
    """A candidate's module with the tensors it is run on. `step` is what is timed."""

    def __init__(self, candidate: Candidate, case: Case, device: torch.device, x: Tensor, grad_output: Tensor):
        self.candidate = candidate
        torch.manual_seed(0)
        layout = torch.channels_last if case.channels_last else torch.contiguous_format
        self.module: nn.Module = candidate.make().to(device, case.dtype, memory_format=layout).train()  # pyright: ignore
        self._x, self._grad_output = x, grad_output

    def step(self) -> Tensor:
        """One forward and one backward. The output is returned so that it lives to the end, as in a network."""
        output = self.module(self._x)
        output.backward(self._grad_output)
        return output

    def clear(self) -> None:
        """Drop the gradients, so that the next step allocates them afresh, as after `zero_grad()`."""
        self._x.grad = None
        self.module.zero_grad(set_to_none=True)


class CpuDevice:
    """Wall-clock time, and memory from the profiler's record of every allocation and release in order."""

    def milliseconds(self, entry: Entry) -> float:
        entry.clear()
        start = time.perf_counter()
        output = entry.step()
        elapsed = time.perf_counter() - start
        del output
        return 1e3 * elapsed

    def peak_bytes(self, entry: Entry) -> int:
        from torch.profiler import ProfilerActivity, profile

        entry.clear()
        with _silenced_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            output = entry.step()
        del output
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        changes = sorted(
            ((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"),
            key=lambda change: change[0],
        )
        if not changes:
            raise RuntimeError(f"torch's profiler recorded no allocation for {entry.candidate.name}")
        peak = allocated = 0
        for _, size in changes:
            allocated += size
            peak = max(peak, allocated)
        return peak


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Drop what is written to the process's standard error.

    The profiler of torch 2.13 announces its start and its end there, at every log level.
    """
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def set_malloc_thresholds() -> bool:
    """Tell glibc to keep large blocks instead of returning them to the system. False where that is not possible.

    glibc maps a large block afresh at each allocation and the system fills it with zeros page by page, which costs
    candidates that copy a lot more than others, and depends on what ran before. It stays set for the rest of the
    process.
    """
    mmap_threshold, trim_threshold = -3, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return mallopt(mmap_threshold, 1 << 30) == 1 and mallopt(trim_threshold, (1 << 31) - 1) == 1
