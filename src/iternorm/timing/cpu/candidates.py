"""What the layers are timed against: a convolution, BatchNorm, and whitening as it was first written for PyTorch.

A candidate is a name and a function that makes a module, so a table is a list of candidates and a new row is one line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

# The paper's Table A1: ms for forward and backward on a TITAN Xp, of 64 samples of C channels of 32x32, by C.
PAPER_MS = {
    "cudnn convolution": {64: 5.65, 128: 13.62},
    "nn convolution": {64: 8.89, 128: 17.46},
    "DBN": {64: 15.92, 128: 35.02},
    "IterNorm, T=3": {64: 6.59, 128: 13.32},
    "IterNorm, T=5": {64: 7.40, 128: 13.92},
    "IterNorm, T=7": {64: 8.21, 128: 14.68},
}


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes:
        name: What the row is called.
        make: Makes the module; it maps ``[N, C, H, W]`` to the same shape and trains.
        paper: The row of `PAPER_MS` that measured the same thing, or None.
    """

    name: str
    make: Callable[[], nn.Module]
    paper: str | None = None


def standard_candidates(
    num_channels: int,
    *,
    group_sizes: Sequence[int] = (64, 128),
    dbn_group_sizes: Sequence[int] = (16, 64),
    num_iters: Sequence[int] = (3, 5, 7),
) -> list[Candidate]:
    """The candidates of the paper's Table A1 and of today. Groups larger than `num_channels` are left out.

    The paper whitens all channels together, so its IterNorm figures are in the rows whose group is all channels. It
    does not state the group size of its DBN; that figure is in the row of groups of 16, which DBN is used with.
    """
    from iternorm.layers.norms import DecorrelatedBatchNorm2d, IterNorm2d

    conv = partial(nn.Conv2d, num_channels, num_channels, kernel_size=3, padding=1, bias=False)
    candidates = [
        Candidate("conv3x3", conv, "cudnn convolution"),
        Candidate("BatchNorm2d", partial(nn.BatchNorm2d, num_channels)),
    ]
    for index, group_size in enumerate(size for size in dbn_group_sizes if size <= num_channels):
        make = partial(DecorrelatedBatchNorm2d, num_channels, group_size=group_size)
        candidates.append(Candidate(f"DBN d={group_size}", make, "DBN" if index == 0 else None))
    fitting = [size for size in group_sizes if size <= num_channels]
    for group_size in fitting:
        for steps in num_iters:
            make = partial(IterNorm2d, num_channels, group_size=group_size, num_iters=steps)
            paper = f"IterNorm, T={steps}" if group_size == num_channels else None
            candidates.append(Candidate(f"IterNorm T={steps} d={group_size}", make, paper))
    for group_size in fitting:
        make = partial(CopyingIterNorm, num_channels, group_size=group_size, num_iters=5)
        candidates.append(Candidate(f"authors' T=5 d={group_size}", make))
    return candidates


class CopyingIterNorm(nn.Module):
    """Whitening with the copies that the first PyTorch code of 2019 makes, written from the paper's equations.

    The activation is copied into ``[g, d, m]``, centred into a second copy, whitened and copied back; the backward does
    the same again. Every Newton iterate is stored. It keeps no running statistics: it is here to be timed in training.

    Args:
        num_features: The number of channels, a multiple of `group_size`.
        group_size: The number of channels whitened together.
        num_iters: The paper's T.
        eps: Added to the diagonal of the covariance.
    """

    def __init__(self, num_features: int, *, group_size: int = 64, num_iters: int = 5, eps: float = 1e-5):
        super().__init__()
        if num_features % group_size:
            raise ValueError(f"num_features={num_features} is not a multiple of group_size={group_size}")
        self.group_size, self.num_iters, self.eps = group_size, num_iters, eps
        self.weight = nn.Parameter(torch.ones(1, num_features, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, num_features, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return _copying_whiten(x, self.group_size, self.num_iters, self.eps) * self.weight + self.bias


class _CopyingWhiten(torch.autograd.Function):
    """Algorithms 1 and 2 of the paper; the backward of the iteration is its Equations 6 and 7."""

    @staticmethod
    def forward(ctx, x: Tensor, group_size: int, num_iters: int, eps: float) -> Tensor:
        grouped = _channels_first(x, group_size)  # [g, d, m]
        centered = grouped - grouped.mean(-1, keepdim=True)
        g, d, m = centered.shape
        identity = torch.eye(d, dtype=x.dtype, device=x.device).expand(g, d, d)
        covariance = torch.baddbmm(identity, centered, centered.mT, beta=eps, alpha=1 / m)
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        normalized = covariance / trace
        iterates = [identity]
        for _ in range(num_iters):
            P = iterates[-1]
            iterates.append(torch.baddbmm(P, P @ P @ P, normalized, beta=1.5, alpha=-0.5))
        whitening = iterates[-1] * trace.rsqrt()
        ctx.save_for_backward(centered, trace, normalized, *iterates)
        return _channels_second(whitening @ centered, x.shape)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad_output,) = grad_outputs
        centered, trace, normalized, *iterates = ctx.saved_tensors
        _, d, m = centered.shape
        last = iterates.pop()
        grad = _channels_first(grad_output, d)
        grad_whitening = grad @ centered.mT
        grad_P = grad_whitening * trace.rsqrt()
        grad_normalized = torch.zeros_like(grad_P)
        for P in reversed(iterates):
            squared = P @ P
            grad_normalized.baddbmm_((squared @ P).mT, grad_P, alpha=-0.5)
            grad_P = 1.5 * grad_P - 0.5 * (
                grad_P @ (squared @ normalized).mT
                + squared.mT @ grad_P @ normalized.mT
                + P.mT @ grad_P @ (P @ normalized).mT
            )
        on_diagonal = (grad_normalized * normalized).sum((-2, -1), keepdim=True) / trace
        on_diagonal += (grad_whitening * last).sum((-2, -1), keepdim=True) * trace.pow(-1.5) / 2
        identity = torch.eye(d, dtype=grad.dtype, device=grad.device)
        grad_covariance = grad_normalized / trace - on_diagonal * identity
        grad_x = (last * trace.rsqrt()) @ (grad - grad.mean(-1, keepdim=True))
        grad_x.baddbmm_(grad_covariance + grad_covariance.mT, centered, alpha=1 / m)
        return _channels_second(grad_x, grad_output.shape), None, None, None


def _copying_whiten(x: Tensor, group_size: int, num_iters: int, eps: float) -> Tensor:
    return _CopyingWhiten.apply(x, group_size, num_iters, eps)  # pyright: ignore[reportReturnType]


def _channels_first(x: Tensor, group_size: int) -> Tensor:
    """``[N, C, ...]`` copied to ``[g, d, m]``."""
    return x.transpose(0, 1).contiguous().view(x.shape[1] // group_size, group_size, -1)


def _channels_second(x: Tensor, shape: torch.Size) -> Tensor:
    """``[g, d, m]`` copied back to ``[N, C, ...]``."""
    return x.view(shape[1], shape[0], *shape[2:]).transpose(0, 1).contiguous()
