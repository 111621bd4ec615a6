"""The local part of a synchronized layer: a training step in a process group whose ranks are not there."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from iternorm.timing.gpu.cases import Shape
from iternorm.timing.gpu.clock import Gpu
from iternorm.timing.gpu.comparison import eager_rounds
from iternorm.timing.gpu.networks import timed
from iternorm.whitening import groups

STEPS_A_TIMING = 20


@contextmanager
def absent_ranks(size: int, device: str = "cpu") -> Iterator[None]:
    """A process group of so many ranks, of which this is the first.

    On a CPU all have the batch of this one. On a GPU collectives do nothing, so moments of all ranks are arbitrary.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group is initialized already; run the benchmark without torchrun")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        if device == "cuda":
            _silent().silence(dist.distributed_c10d._get_default_group().group_name)
        yield
    finally:
        dist.destroy_process_group()


def _silent() -> Any:
    """The functions of `silent.cpp`. torch's "fake" group launches a copy for each rank that it gathers from."""
    from iternorm.backends.native import build
    from iternorm.backends.triton.eager import library

    return build.find_or_build(library.source(Path(__file__).with_name("silent.cpp")))


class LayerStep:
    """Forward and backward of a layer, in bfloat16 and channels_last."""

    def __init__(self, shape: Shape, device: torch.device, make: Callable[[int], nn.Module]):
        generator = torch.Generator(device).manual_seed(0)
        tensors = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
        self.x, self.grad = (t.bfloat16().contiguous(memory_format=torch.channels_last) for t in tensors)
        self.x.requires_grad_()
        self.layer = make(shape[1]).to(device)
        self.parameters = tuple(self.layer.parameters())

    def __call__(self) -> None:
        torch.autograd.grad(self.layer(self.x), (self.x, *self.parameters), self.grad)


def run_layers(shape: Shape, size: int, gpu: Gpu, rounds: int) -> dict:
    """Time a step of SyncBatchNorm, IterNorm and SyncIterNorm, eager and interleaved, in a group of so many ranks."""
    from iternorm.layers.norms import IterNorm2d
    from iternorm.layers.sync import SyncIterNorm

    group_size = 64
    makers = {
        "SyncBatchNorm": nn.SyncBatchNorm,
        "IterNorm": partial(IterNorm2d, group_size=group_size),
        "SyncIterNorm": partial(SyncIterNorm, group_size=group_size),
    }
    steps = {name: partial(LayerStep, shape, gpu.device, make) for name, make in makers.items()}
    with absent_ranks(size, gpu.device.type):
        rows = timed(steps, gpu, eager_rounds(rounds, 2 * math.prod(shape)), STEPS_A_TIMING)
    alone = rows[1]["step_ms"]
    for row in rows:
        row["ratio_to_iter_norm"] = None if row["step_ms"] is None or alone is None else row["step_ms"] / alone
    return {
        "shape": list(shape),
        "ranks": size,
        "dtype": "bfloat16",
        "layout": "NHWC",
        "sent_bytes": sent_bytes(shape[1], group_size),
        "rows": rows,
    }


def sent_bytes(channels: int, group_size: int) -> dict[str, int]:
    """What a rank contributes to each collective: fp32 moments, and forward a count."""
    matrices = groups.num_groups(channels, group_size) * groups.effective_size(channels, group_size) ** 2
    return {"all_gather": 4 * (1 + channels + matrices), "all_reduce": 4 * (channels + matrices)}
