"""How time and memory are measured on a GPU."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from iternorm.backends.native.build import BuildError
from iternorm.whitening import dispatch

Step = Callable[[], Any]


class Gpu:
    """The clocks of one CUDA device. Tests substitute a fake."""

    def __init__(self, device: str | torch.device = "cuda"):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            _wait_for_compiler()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def eager_ms(self, step: Step, repeats: int) -> float:
        """Wall-clock time of one step, from `repeats` steps in a row, kernel launches included.

        Half as many untimed steps come first, because the CPU's caches hold another layer's code.
        """
        for _ in range(repeats // 2):
            step()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - start) / repeats

    def capture(self, step: Step, repeats: int) -> Any:
        """A CUDA graph of `repeats` steps."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                step()
        return graph

    def warm_up(self, graph: Any, replays: int) -> None:
        for _ in range(replays):
            graph.replay()
        self.synchronize()

    def replay_ms(self, graph: Any, repeats: int) -> float:
        """Time of one step of a graph of `repeats`, by CUDA events.

        An untimed replay keeps the GPU busy while the timed one is launched.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def allocated_bytes(self) -> int:
        self.release()
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self, step: Step, base: int | None = None) -> int:
        """The peak of allocated bytes in a step, beyond `base` or what was allocated before it.

        The workspaces that cublas keeps from step to step are dropped first, so that they count.
        """
        before = self.allocated_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        kept = step()
        self.synchronize()
        del kept
        return torch.cuda.max_memory_allocated(self.device) - (before if base is None else base)

    def release(self) -> None:
        """Free unused memory, cached workspaces included."""
        self.synchronize()
        clear_cublas = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_cublas is not None:
            clear_cublas()
        gc.collect()
        torch.cuda.empty_cache()

    def copy_gb_per_s(self, num_bytes: int = 4 * 2**30, rounds: int = 15) -> float:
        """Bandwidth of a large copy within the device, bytes read and bytes written counted."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        for _ in range(10):
            target.copy_(source)
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 2 * num_bytes / statistics.median(times) / 1e6


def _wait_for_compiler() -> None:
    """Until eager steps run as they will for the rest of a long training: see `iternorm.backends.triton.eager`."""
    if dispatch.NO_TRITON is None:
        from iternorm.backends.triton.eager import library

        with suppress(BuildError):
            library.wait()


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """torch's precision of fp32 matrix products, for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reason(error: BaseException) -> str:
    """An error in one line, for a row of the results."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
