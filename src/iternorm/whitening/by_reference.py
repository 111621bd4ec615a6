"""The reference as a backend: the paper in plain operators, which autograd differentiates."""

import torch
from torch import Tensor

from iternorm import reference
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import groups
from iternorm.whitening.autograd import centered_moments
from iternorm.whitening.settings import Settings


def whiten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `iternorm.whitening.autograd.whiten` returns."""
    group_size, solve = settings.group_size, getattr(reference, settings.solver)
    whitened, mean, matrices = reference.whiten(
        x.to(torch_verbs.compute_dtype(x.dtype)),
        (lambda covariance: solve(covariance, settings.num_iters)) if settings.solver == "newton" else solve,
        group_size,
        settings.eps,
    )
    y = torch_verbs.empty_output(x).copy_(reference.scale_and_shift(whitened, weight, bias))
    parts = groups.parts(x.shape[1], group_size)
    whitening = groups.pad([torch.stack(matrices[p.first : p.first + p.count]) for p in parts])
    covariance = centered_moments(x.detach(), group_size)[2]
    return y, mean.detach(), covariance, whitening.detach()
