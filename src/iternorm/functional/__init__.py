"""The layers as functions, in the manner of `torch.nn.functional.batch_norm`.

`impl` says what computes them. "auto" takes the fastest that can run: Triton kernels on NVIDIA GPUs, C kernels in
training on a CPU, torch for everything else (docs/other-machines.md). "triton", "native" (C), "torch" and "reference"
ask for one by name, and raise where it cannot run.
"""

from iternorm.functional.batch import decorrelated_batch_norm, iter_norm
from iternorm.functional.samples import group_whitening, instance_whitening

__all__ = ["decorrelated_batch_norm", "group_whitening", "instance_whitening", "iter_norm"]
