"""Training steps of whole networks as people run them: eager, compiled, and compiled with CUDA graphs."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from iternorm.networks.models import VGG, NormFactory
from iternorm.timing.gpu.clock import Gpu, reason
from iternorm.timing.gpu.training import Setting, TrainingStep
from iternorm.timing.turns import in_turns

# None is eager.
MODES = (None, "default", "reduce-overhead")
SETTING = Setting(torch.bfloat16, "NHWC")
WARMUP_STEPS, STEPS_A_TIMING = 5, 5


class Network(NamedTuple):
    """A network, the batch it is trained with, and the ways it is run."""

    name: str
    make: Callable[..., nn.Module]
    batch_size: int
    image_size: int
    modes: tuple[str | None, ...] = MODES


def resnet50(num_classes: int, norm: NormFactory) -> nn.Module:
    """Torchvision's, with this normalization."""
    from torchvision.models import resnet50  # pyright: ignore[reportMissingImports]

    return resnet50(num_classes=num_classes, norm_layer=norm)


def networks(quick: bool = False) -> list[Network]:
    """VGG, and ResNet-50 where torchvision is installed."""
    found = [Network("VGG", VGG, 256, 32)]
    if not quick and importlib.util.find_spec("torchvision") is not None:
        found += [Network("ResNet-50", resnet50, 256, 224), Network("ResNet-50", resnet50, 32, 224, (None,))]
    return found


def norms() -> dict[str, NormFactory]:
    """The baseline, and ours."""
    from iternorm.layers.norms import IterNorm2d

    return {"BatchNorm2d": nn.BatchNorm2d, "IterNorm d=64": partial(IterNorm2d, group_size=64)}


def run_network(network: Network, mode: str | None, candidates: dict[str, NormFactory], gpu: Gpu, rounds: int) -> dict:
    """Time a step with each normalization, interleaved. What fails is in the result, with the reason."""
    rows, steps = [], {}
    torch.compiler.reset()
    with torch.random.fork_rng(devices=[]):
        for name, norm in candidates.items():
            row = {"name": name, "failed": None, "peak_bytes": None, "samples_ms": []}
            rows.append(row)
            try:
                base = gpu.allocated_bytes()
                sizes = network.batch_size, network.image_size
                step = TrainingStep(norm, SETTING, gpu.device, network.make, *sizes, compile_mode=mode)
                for _ in range(WARMUP_STEPS):
                    step()
                row["peak_bytes"] = gpu.peak_bytes(step, base)
                steps[name] = step
            except Exception as error:
                row["failed"] = reason(error)
    for round_index, row in in_turns(rows, rounds, warmup=1):
        if row["failed"] is None:
            elapsed = gpu.eager_ms(steps[row["name"]], STEPS_A_TIMING)
            if round_index >= 0:
                row["samples_ms"].append(elapsed)
    _compare(rows)
    return {
        "network": network.name,
        "batch_size": network.batch_size,
        "mode": "eager" if mode is None else mode,
        "dtype": "bfloat16",
        "layout": SETTING.layout,
        "rows": rows,
    }


def _compare(rows: Sequence[dict]) -> None:
    for row in rows:
        row["step_ms"] = statistics.median(row["samples_ms"]) if row["samples_ms"] else None
    baseline = rows[0]["step_ms"]
    for row in rows:
        step = row["step_ms"]
        row["ratio_to_batch_norm"] = None if step is None or baseline is None else step / baseline
