"""A whole training step of the paper's VGG with each normalization."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from iternorm.networks.models import VGG, NormFactory
from iternorm.timing.gpu.cases import LAYOUTS
from iternorm.timing.gpu.clock import Gpu, reason
from iternorm.timing.turns import in_turns

BATCH_SIZE = 256
WARMUP_STEPS, STEPS_A_TIMING = 3, 5
# Timings of a slow network, of one step each.
SLOW_ROUNDS = 3


class Setting(NamedTuple):
    """A precision and a layout that networks are trained in. bf16 is autocast: parameters stay in fp32."""

    dtype: torch.dtype
    layout: str


SETTINGS = (Setting(torch.float32, "NCHW"), Setting(torch.float32, "NHWC"), Setting(torch.bfloat16, "NHWC"))


class Norm(NamedTuple):
    """A normalization that the training step is timed with."""

    name: str
    make: NormFactory
    slow: bool = False
    # Seconds per step on a TITAN Xp, from the paper's appendix.
    paper_s: float | None = None


def norms(quick: bool = False) -> list[Norm]:
    """The normalizations of the table; with `quick`, BatchNorm and IterNorm alone."""
    from iternorm.layers.norms import DecorrelatedBatchNorm2d, IterNorm2d

    found = [Norm("BatchNorm2d", nn.BatchNorm2d), Norm("IterNorm d=64", partial(IterNorm2d, group_size=64))]
    if not quick:
        # The paper whitens all channels of a layer together.
        found.append(Norm("IterNorm full", partial(IterNorm2d, group_size=None), paper_s=0.343))
        decorrelated = partial(DecorrelatedBatchNorm2d, group_size=16)
        # By eigendecomposition, as the paper's, and by our kernels.
        found.append(Norm("DBN d=16", partial(decorrelated, impl="torch"), slow=True, paper_s=1.366))
        found.append(Norm("DBN d=16 kernels", decorrelated))
    return found


class TrainingStep:
    """A network, its optimizer and one batch of random images."""

    def __init__(
        self,
        norm: NormFactory,
        setting: Setting,
        device: torch.device,
        network: Callable[..., nn.Module] = VGG,
        batch_size: int = BATCH_SIZE,
        image_size: int = 32,
        compile_mode: str | None = None,
    ):
        generator = torch.Generator(device).manual_seed(0)
        memory_format = torch.channels_last if LAYOUTS[setting.layout] else torch.contiguous_format
        images = torch.randn(batch_size, 3, image_size, image_size, device=device, generator=generator)
        self.images = images.contiguous(memory_format=memory_format)
        self.labels = torch.randint(10, (batch_size,), device=device, generator=generator)
        torch.manual_seed(0)
        model = network(num_classes=10, norm=norm)
        model.to(device, memory_format=memory_format).train()  # pyright: ignore[reportCallIssue]
        self.model = model
        self._forward = model if compile_mode is None else torch.compile(model, mode=compile_mode)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16)
        if setting.dtype != torch.bfloat16:
            self._autocast = nullcontext

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = nn.functional.cross_entropy(self._forward(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def run_setting(
    setting: Setting, candidates: Sequence[Norm], gpu: Gpu, rounds: int, network: Callable[..., nn.Module] = VGG
) -> dict:
    """Time a step of every network of one setting, interleaved. What fails is in the result, with the reason."""
    rows, steps = [], {}
    with torch.random.fork_rng(devices=[]):
        for norm in candidates:
            row = {"name": norm.name, "failed": None, "peak_bytes": None, "samples_ms": [], "paper_s": norm.paper_s}
            rows.append(row)
            try:
                base = gpu.allocated_bytes()
                step = TrainingStep(norm.make, setting, gpu.device, network)
                for _ in range(1 if norm.slow else WARMUP_STEPS):
                    step()
                row["peak_bytes"] = gpu.peak_bytes(step, base)
                steps[norm.name] = step
            except Exception as error:
                row["failed"] = reason(error)
    _time(rows, {norm.name: norm.slow for norm in candidates}, steps, gpu, rounds)
    by_name = {row["name"]: row for row in rows}
    batch_norm = by_name.get("BatchNorm2d", {})
    for row in rows:
        row["step_ms"] = statistics.median(row["samples_ms"]) if row["samples_ms"] and row["failed"] is None else None
        row["ratio_to_batch_norm"] = _ratio(row["step_ms"], batch_norm.get("step_ms"))
        row["memory_ratio_to_batch_norm"] = _ratio(row["peak_bytes"], batch_norm.get("peak_bytes"))
    return {
        "dtype": str(setting.dtype).removeprefix("torch."),
        "layout": setting.layout,
        "batch_size": BATCH_SIZE,
        "networks": rows,
    }


def _time(rows: list[dict], slow: dict[str, bool], steps: dict, gpu: Gpu, rounds: int) -> None:
    for round_index, row in in_turns(rows, rounds, warmup=1):
        name = row["name"]
        if row["failed"] is not None or (slow[name] and not 0 <= round_index < SLOW_ROUNDS):
            continue
        try:
            elapsed = gpu.eager_ms(steps[name], 1 if slow[name] else STEPS_A_TIMING)
        except Exception as error:
            row["failed"] = reason(error)
            continue
        if round_index >= 0:
            row["samples_ms"].append(elapsed)
    for row in rows:
        if row["failed"] is not None:
            continue
        try:
            loss = steps[row["name"]]().item()
        except Exception as error:
            row["failed"] = reason(error)
            continue
        if not math.isfinite(loss):
            row["failed"] = f"the loss became {loss}: its times mean nothing"


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other
