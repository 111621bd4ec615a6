"""Training steps of whole networks as people run them: eager, compiled, and compiled with CUDA graphs."""

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from iternorm.networks.models import VGG, NormFactory
from iternorm.timing.gpu.cases import Shape
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
    """Time a step with each normalization, interleaved. What fails is in the result, with the reason.

    Of ours there is one more in eager mode: ReLUs and additions are part of the layers (`iternorm.convert_batchnorm`
    with `fuse`), as a compiler makes them by itself.
    """
    sizes = network.batch_size, network.image_size
    makers = {
        name: partial(TrainingStep, norm, SETTING, gpu.device, network.make, *sizes, compile_mode=mode)
        for name, norm in candidates.items()
    }
    if mode is None:
        makers["IterNorm d=64 fused"] = partial(
            TrainingStep, nn.BatchNorm2d, SETTING, gpu.device, partial(_fused, network.make), *sizes
        )
    rows = timed(makers, gpu, rounds)
    return {
        "network": network.name,
        "batch_size": network.batch_size,
        "mode": "eager" if mode is None else mode,
        "dtype": "bfloat16",
        "layout": SETTING.layout,
        "rows": rows,
    }


def _fused(make: Callable[..., nn.Module], num_classes: int, norm: NormFactory) -> nn.Module:
    from iternorm.models.convert import convert_batchnorm

    return convert_batchnorm(make(num_classes=num_classes, norm=norm), fuse=True)


class Junction(nn.Module):
    """A layer, an addition and a ReLU, as user code has them."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """The end of a residual block."""
        return torch.relu(self.norm(x) + z)


class JunctionStep:
    """Forward and backward of a junction, in bfloat16 and channels_last."""

    def __init__(self, shape: Shape, device: torch.device, make: Callable[[int], nn.Module], compiled: bool = False):
        generator = torch.Generator(device).manual_seed(0)
        tensors = (torch.randn(shape, device=device, generator=generator) for _ in range(3))
        x, z, self.grad = (t.bfloat16().contiguous(memory_format=torch.channels_last) for t in tensors)
        self.inputs = x.requires_grad_(), z.requires_grad_()
        module = make(shape[1]).to(device)
        self.parameters = tuple(module.parameters())
        self.call = torch.compile(module) if compiled else module

    def __call__(self) -> None:
        y = self.call(*self.inputs)
        torch.autograd.grad(y, (*self.inputs, *self.parameters), self.grad)


def run_junction(shape: Shape, gpu: Gpu, rounds: int) -> dict:
    """Time layer + add + ReLU: BatchNorm and ours, eager and compiled, and ours with `residual`."""
    from iternorm.layers.norms import IterNorm2d

    def batch_norm(channels: int) -> nn.Module:
        return Junction(nn.BatchNorm2d(channels))

    def ours(channels: int) -> nn.Module:
        return Junction(IterNorm2d(channels))

    makers = {
        "BatchNorm2d": (batch_norm, False),
        "BatchNorm2d compiled": (batch_norm, True),
        "IterNorm": (ours, False),
        "IterNorm residual": (partial(IterNorm2d, activation="relu"), False),
        "IterNorm compiled": (ours, True),
    }
    steps = {name: partial(JunctionStep, shape, gpu.device, *made) for name, made in makers.items()}
    return {"shape": list(shape), "dtype": "bfloat16", "layout": "NHWC", "rows": timed(steps, gpu, rounds)}


def timed(
    makers: dict[str, Callable[[], Callable]], gpu: Gpu, rounds: int, steps_a_timing: int = STEPS_A_TIMING
) -> list[dict]:
    """A row for each, timed in turns; ratios are to the first."""
    rows, steps = [], {}
    torch.compiler.reset()
    with torch.random.fork_rng(devices=[]):
        for name, make in makers.items():
            row = {"name": name, "failed": None, "peak_bytes": None, "samples_ms": []}
            rows.append(row)
            try:
                base = gpu.allocated_bytes()
                step = make()
                for _ in range(WARMUP_STEPS):
                    step()
                row["peak_bytes"] = gpu.peak_bytes(step, base)
                steps[name] = step
            except Exception as error:
                row["failed"] = reason(error)
    for round_index, row in in_turns(rows, rounds, warmup=1):
        if row["failed"] is None:
            elapsed = gpu.eager_ms(steps[row["name"]], steps_a_timing)
            if round_index >= 0:
                row["samples_ms"].append(elapsed)
    for row in rows:
        row["step_ms"] = statistics.median(row["samples_ms"]) if row["samples_ms"] else None
    baseline = rows[0]["step_ms"]
    for row in rows:
        step = row["step_ms"]
        row["ratio_to_batch_norm"] = None if step is None or baseline is None else step / baseline
    return rows
