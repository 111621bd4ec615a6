"""The reference as a backend: the paper in plain operators, which autograd differentiates."""

import torch
from torch import Tensor

from iternorm import reference
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import groups
from iternorm.whitening.autograd import centered_moments
from iternorm.whitening.settings import Settings, regularized, unbiased


def whiten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `iternorm.whitening.autograd.whiten` returns."""
    group_size, solver = settings.group_size, getattr(reference, settings.solver)
    count = x.numel() // x.shape[1]

    def solve(covariance: Tensor) -> Tensor:
        covariance = regularized(unbiased(covariance, count, settings), settings)
        return solver(covariance, settings.num_iters) if settings.solver == "newton" else solver(covariance)

    whitened, mean, matrices = reference.whiten(
        x.to(torch_verbs.compute_dtype(x.dtype)),
        solve,
        group_size,
        eps=0.0,
    )
    y = torch_verbs.empty_output(x).copy_(reference.scale_and_shift(whitened, weight, bias))
    parts = groups.parts(x.shape[1], group_size)
    whitening = groups.pad([torch.stack(matrices[p.first : p.first + p.count]) for p in parts])
    covariance = unbiased(centered_moments(x.detach(), group_size)[2], count, settings)
    return y, mean.detach(), covariance, whitening.detach()
