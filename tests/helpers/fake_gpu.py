"""A GPU's clocks without a GPU, and candidates and networks small enough for them."""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from iternorm.networks.models import VGG
from iternorm.timing.gpu import clock as timing
from iternorm.timing.gpu.cases import CudaCandidate

TINY = (6, 8, 4, 4)


class FakeGpu(timing.Gpu):
    """Runs steps on the CPU and answers with times that the test chose, by the candidate's name and layout."""

    def __init__(self, times=None):
        super().__init__("cpu")
        self.times = times or {}
        self.log = []
        self.precisions = {}

    def _note(self, what, step):
        entry = getattr(step, "__self__", None)
        key = (entry.candidate.name, entry.layout) if entry is not None else "network"
        self.log.append((what, key))
        self.precisions.setdefault(key, set()).add(torch.get_float32_matmul_precision())
        return self.times.get(key, 1.0)

    def synchronize(self):
        pass

    def eager_ms(self, step, repeats):
        step()
        return 2 * self._note("eager", step)

    def capture(self, step, repeats):
        step()
        self._note("capture", step)
        return step

    def warm_up(self, graph, replays):
        self.log.append(("warm", None))

    def replay_ms(self, graph, repeats):
        return self._note("replay", graph)

    def allocated_bytes(self):
        return 0

    def peak_bytes(self, step, base=None):
        step()
        self._note("peak", step)
        return 1000

    def release(self):
        pass

    def copy_gb_per_s(self, num_bytes=0, rounds=0):
        return 4000.0


def tiny_candidates(shape=TINY, dtype=torch.float32, quick=False):
    from iternorm.layers.norms import IterNorm2d

    whitening = partial(IterNorm2d, 8, group_size=4)
    return [
        CudaCandidate("conv3x3", partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False)),
        CudaCandidate("BatchNorm2d", partial(nn.BatchNorm2d, 8)),
        CudaCandidate("IterNorm T=5 d=64", whitening),
        CudaCandidate("IterNorm T=5 d=64 exact", whitening, exact=True),
        CudaCandidate("DBN d=16", whitening, slow=True, no_graph="it waits"),
    ]


class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such thing\nand more")


def tiny_vgg(num_classes, norm):
    return VGG(num_classes, norm, blocks=((8, 1), (8, 1), (8, 1), (8, 1), (8, 1)))


class FakeCuda:
    """Stands in for `torch.cuda`: a clock that every replay and copy moves by 6 ms, and a log of what was called."""

    def __init__(self, monkeypatch):
        self.log, self.clock, self.allocated, self.peak = [], 0.0, 500, 0
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = outer.clock

            def synchronize(self):
                outer.log.append("wait")

            def elapsed_time(self, end):
                return end.time - self.time

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_stream(self, other):
                outer.log.append("wait_stream")

        class Graph:
            def replay(self):
                outer.log.append("replay")
                outer.clock += 6.0

        @contextmanager
        def section(name, *_):
            outer.log.append(f"{name} begins")
            yield
            outer.log.append(f"{name} ends")

        def allocate(device):
            return self.allocated

        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "stream": partial(section, "stream"),
            "graph": partial(section, "graph"),
            "synchronize": lambda device: None,
            "memory_allocated": allocate,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: self.log.append("empty_cache"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: self.log.append("cublas"), raising=False)
