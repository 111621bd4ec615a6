"""Newton's iteration in C: `iternorm.solvers.newton` and its backward for small groups, each in one thread.

The products of so small matrices are done before a second thread has woken up, and where another process has its core,
a step would wait for it at every product. Threads share groups where there are many.
"""

import ctypes

import torch
from torch import Tensor

from iternorm import solvers
from iternorm.backends.native import build, verbs
from iternorm.whitening import modes

# Below, torch multiplies in its own loops and in one thread. Above, its products in two threads are faster than ours
# in one, by their minimum on two cores of an AMD EPYC with AVX-512: for 128 channels 1.3 ms against 1.0 for forward and
# backward at T=5, for 192 about the same.
_LEAST_SIZE, _MOST_SIZE = 8, 128


class _Iteration(ctypes.Structure):
    _fields_ = (
        ("groups", ctypes.c_long),
        ("group_size", ctypes.c_long),
        ("steps", ctypes.c_long),
        ("unwatched", ctypes.c_long),
        ("threads", ctypes.c_int),
    )


def is_worthwhile(group_size: int) -> bool:
    """Whether the kernels are faster than torch on groups of so many channels."""
    return _LEAST_SIZE <= group_size <= _MOST_SIZE


def solve(covariance: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """The whitening matrices of covariances ``[G, d, d]`` with eps, and what the backward needs.

    That is what `solvers.solve` keeps, as one tensor. Where calls are recorded, torch computes it.
    """
    if modes.is_recorded(covariance):
        whitening, saved = solvers.solve(covariance, "newton", num_iters, keep=True)
        return whitening, torch.stack(saved) if saved else covariance.new_empty(0)
    library, iteration = build.library(covariance.dtype), _iteration(covariance, num_iters)
    covariance = covariance.contiguous()
    whitening = torch.empty_like(covariance)
    kept = covariance.new_empty(2 * max(iteration.steps - 1, 0), *covariance.shape)
    workspace = verbs.workspace_for(library.newton_workspace, iteration)
    library.newton(ctypes.byref(iteration), *map(verbs.address_of, (covariance, workspace, whitening, kept)))
    return whitening, kept


def solve_backward(grad: Tensor, covariance: Tensor, whitening: Tensor, kept: Tensor, num_iters: int) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix (math.md, Eq. 10-12)."""
    if modes.is_recorded(grad):
        return solvers.solve_backward(grad, covariance, whitening, tuple(kept), "newton", num_iters)
    library, iteration = build.library(covariance.dtype), _iteration(covariance, num_iters)
    given = [tensor.contiguous() for tensor in (grad, covariance, whitening, kept)]
    result = torch.empty_like(given[1])
    workspace = verbs.workspace_for(library.newton_workspace, iteration)
    library.newton_backward(ctypes.byref(iteration), *map(verbs.address_of, (*given, workspace, result)))
    return result


def _iteration(covariance: Tensor, num_iters: int) -> _Iteration:
    steps = solvers.steps_of(covariance, num_iters)
    return _Iteration(*covariance.shape[:2], steps, solvers.UNWATCHED_STEPS, verbs.num_threads())
