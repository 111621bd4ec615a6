"""What a run needs around it: a device, an accelerator, and torch's global switches, set for a while."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe
from iternorm.layers.base import SmallBatchWarning

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def environment(recipe: Recipe, context: Context) -> Iterator["Accelerator"]:
    """Make the accelerator of a run and set torch's switches as its recipe asks; all are put back at the end.

    Raises:
        ValueError: The device is not there.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from iternorm.timing.gpu.clock import matmul_precision

    device = torch.device(context.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={context.device!r} is not supported in training: use 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={context.device!r} needs a CUDA device and torch sees none: use device='cpu'")
    with ExitStack() as stack:
        # Small batches are what some of the experiments are about.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SmallBatchWarning)
        if device.type == "cuda":
            # Accelerate takes the current device.
            stack.enter_context(torch.cuda.device(device))
            benchmark = torch.backends.cudnn.benchmark
            stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
            torch.backends.cudnn.benchmark = True
        # Under bf16 the only fp32 products are those that whiten large groups, and TF32 is more accurate than bf16.
        if recipe.precision != "fp32":
            stack.enter_context(matmul_precision("high"))
        # Its state is global, and would keep the device and the precision of the previous run.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        tracking: dict[str, Any] = {}
        if context.tensorboard is not None:
            tracking = {"log_with": "tensorboard", "project_dir": context.tensorboard}
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="bf16" if recipe.precision == "bf16" else "no",
            dynamo_backend="inductor" if context.compile else "no",
            **tracking,
        )
        gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        try:
            yield accelerator
        finally:
            # Not `end_training`, which would end the process group too: there may be another run.
            for tracker in accelerator.trackers:
                tracker.finish()
