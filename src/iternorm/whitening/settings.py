"""What is asked of a normalization: one object, made where a call enters, and handed on from there."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm.solvers import most_steps
from iternorm.whitening.processes.collective import Group

# Newton's steps to convergence, 24. A step multiplies a small eigenvalue of the normalized covariance by 9/4, so that
# they reach everything above 1e-8 of the trace: what lies below is rounding in the covariance itself.
ZCA_STEPS = most_steps(torch.float32)


class Settings(NamedTuple):
    """The options of a layer or a function, checked.

    Attributes:
        group_size: Channels of a full group, at most as many as the input has.
        solver: "newton", "zca", "pca" or "cholesky".
        num_iters: Newton's steps; 0 for the other solvers.
        eps: Added to the diagonal of the covariance.
        activation: None, or "relu".
        impl: What the user asked to compute it: see `iternorm.whitening.dispatch`.
        process_group: The processes whose batches are one; None is this process alone.
        correction: What the number of samples is reduced by where the covariance is divided by it.
        shrinkage: How far the covariance is moved towards the identity, from 0 to 1.
    """

    group_size: int
    solver: str = "newton"
    num_iters: int = 5
    eps: float = 1e-5
    activation: str | None = None
    impl: str = "auto"
    process_group: Group | None = None
    correction: int = 0
    shrinkage: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of the iteration in kernels, for which ZCA is the iteration run to convergence."""
        return ZCA_STEPS if self.solver == "zca" else min(self.num_iters, ZCA_STEPS)

    @property
    def exact(self) -> bool:
        """Whether the iteration's products have fp32's accuracy whatever the user allows."""
        return self.solver == "zca"

    @property
    def relu(self) -> bool:
        return self.activation == "relu"


class Running(NamedTuple):
    """The running statistics that a layer keeps.

    Attributes:
        mean: ``[C]``.
        matrix: ``[G, d, d]``, the whitening matrices or the covariances.
        num_batches: A counter of batches, or None.
        momentum: The share of a batch; None is the cumulative average.
        is_covariance: What `matrix` is.
    """

    mean: Tensor
    matrix: Any  # a tensor
    num_batches: Tensor | None
    momentum: float | None
    is_covariance: bool


# Functions, because the compiler of torch 2.6 does not look into methods of a named tuple.
def unbiased(covariance: Tensor, num_samples: Any, settings: Settings) -> Tensor:
    """The covariance of so many samples (a number, or a tensor), divided by their number less `correction`."""
    correction = settings.correction
    return covariance * (num_samples / (num_samples - correction)) if correction else covariance


def regularized(covariance: Tensor, settings: Settings) -> Tensor:
    """(1 - shrinkage) Σ + (shrinkage + eps) I."""
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    if settings.shrinkage:
        covariance = (1 - settings.shrinkage) * covariance
    return covariance + (settings.shrinkage + settings.eps) * identity
