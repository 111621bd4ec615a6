"""What is timed on a GPU: the activations, and the candidates on each."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from iternorm.timing.cpu.candidates import Candidate, CopyingIterNorm

Shape = tuple[int, int, int, int]

TABLE_A1: tuple[Shape, ...] = ((64, 64, 32, 32), (64, 128, 32, 32))
# ResNet-50's first normalization at batch 256.
STEM: Shape = (256, 64, 112, 112)
# Table A1's, the first and the fourth block of VGG, a block of WRN-28-10, ResNet-50's stem.
SHAPES: tuple[Shape, ...] = (*TABLE_A1, (256, 64, 32, 32), (256, 512, 4, 4), (128, 160, 32, 32), STEM)
QUICK_SHAPES: tuple[Shape, ...] = (TABLE_A1[0], STEM)
# torch.compile takes 10 to 20 s a layer: where BatchNorm itself is slow.
COMPILED_SHAPES: tuple[Shape, ...] = ((256, 64, 32, 32), STEM)
DTYPES = (torch.float32, torch.bfloat16)
# A layout's name, and whether it is channels_last.
LAYOUTS = {"NCHW": False, "NHWC": True}

CONVOLUTION, BATCH_NORM, COMPILED_BATCH_NORM = "conv3x3", "BatchNorm2d", "BatchNorm2d compiled"
ITER_NORM, EXACT_ITER_NORM = "IterNorm T=5 d=64", "IterNorm T=5 d=64 exact"


@dataclass(frozen=True)
class CudaCandidate(Candidate):
    """A candidate and how it is run.

    Attributes:
        exact: Without TF32 in matrix products.
        compiled: By torch.compile, with static shapes.
        slow: Few timings are enough, and all there is time for.
        no_graph: Why it cannot be captured in a CUDA graph; None where it can.
    """

    exact: bool = False
    compiled: bool = False
    slow: bool = False
    no_graph: str | None = None

    @property
    def compiles(self) -> bool:
        """Whether its first step has to compile something."""
        return self.compiled or self.name.startswith("IterNorm") or self.name.endswith("kernels")


def candidates_for(shape: Shape, dtype: torch.dtype, quick: bool = False) -> list[CudaCandidate]:
    """The candidates on one activation, the same for both layouts."""
    from iternorm.layers.norms import DecorrelatedBatchNorm2d, IterNorm2d

    channels = shape[1]
    single = dtype == torch.float32

    def whitening(group_size: int, num_iters: int = 5, exact: bool = False) -> CudaCandidate:
        make = partial(IterNorm2d, channels, group_size=group_size, num_iters=num_iters)
        return CudaCandidate(f"IterNorm T={num_iters} d={group_size}{' exact' if exact else ''}", make, exact=exact)

    batch_norm = partial(nn.BatchNorm2d, channels)
    candidates = [
        CudaCandidate(CONVOLUTION, partial(nn.Conv2d, channels, channels, kernel_size=3, padding=1, bias=False)),
        CudaCandidate(BATCH_NORM, batch_norm),
        whitening(64),
    ]
    if single:
        candidates.append(whitening(64, exact=True))
    if shape in COMPILED_SHAPES and not quick:
        candidates.insert(2, CudaCandidate(COMPILED_BATCH_NORM, batch_norm, compiled=True))
    if channels % 64:
        # The last group of 64 would be smaller here; 32 divides the channels evenly.
        candidates.append(whitening(32))
    if channels > 128 and not quick:
        # All channels together, as in the paper.
        candidates.append(whitening(channels))
    if shape in TABLE_A1 and not quick:
        candidates += [whitening(64, num_iters=3), whitening(64, num_iters=7)]
        if channels > 64:
            # All together, as the paper timed them.
            candidates += [whitening(channels, num_iters) for num_iters in (3, 5, 7)]
        # By eigendecomposition, as the paper's, and by our kernels.
        candidates.append(
            CudaCandidate(
                "DBN d=16",
                partial(DecorrelatedBatchNorm2d, channels, group_size=16, impl="torch"),
                slow=True,
                no_graph="torch.linalg.eigh reads its error codes on the host, and a capture must not wait for it",
            )
        )
        candidates.append(CudaCandidate("DBN d=16 kernels", partial(DecorrelatedBatchNorm2d, channels, group_size=16)))
    if single and not quick and (shape in TABLE_A1 or shape == STEM):
        candidates.append(
            CudaCandidate("authors' T=5 d=64", partial(CopyingIterNorm, channels, group_size=64, num_iters=5))
        )
    return candidates
