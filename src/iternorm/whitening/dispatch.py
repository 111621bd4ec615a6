"""Which backend computes: the one place that decides.

`impl="auto"` takes the Triton kernels on CUDA tensors in half, bfloat16 or single precision, for Newton's iteration
with groups of up to 1024 channels, and for ZCA with groups of up to 64, which they compute by that iteration run to
convergence; for larger groups they compute the iteration alone. On the CPU it takes C kernels for training in single
and double precision, where the machine has a C compiler and they are faster, and for the iteration in any precision. It
takes torch for the rest. An implementation that is named and cannot run raises.
"""

import enum
import importlib.metadata
import re
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.native import build
from iternorm.backends.native import iteration as native_iteration
from iternorm.backends.native import verbs as native_verbs
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import modes
from iternorm.whitening.settings import Settings

# The first whose launches may depend on each other.
_LEAST_TRITON = (3, 5)


class Backend(enum.Enum):
    """What computes the normalization of one batch."""

    REFERENCE = "the paper, written plainly and differentiated by autograd"
    COMPOSED = "ordinary operators alone, for function transforms and traces"
    TRITON = "one chain of Triton kernels each way"
    TRITON_ITERATION = "torch's verbs around the iteration in Triton kernels"
    VERBS = "the verbs in C or in torch, joined by an analytic backward"


def choose(settings: Settings, x: Tensor) -> Backend:
    """What computes a batch with its own statistics.

    Raises:
        ValueError: what the user named cannot run, and why.
    """
    impl = settings.impl
    if impl == "reference":
        return Backend.REFERENCE
    if impl in ("auto", "triton"):
        reason = _why_not_triton(x, settings) if impl == "triton" or x.is_cuda else "not on a GPU"
        if reason is None:
            return Backend.COMPOSED if modes.is_transformed() else Backend.TRITON
        if impl == "triton":
            raise ValueError(f'the kernels of impl="triton" cannot run: {reason}; use impl="auto"')
    if modes.is_transformed():
        # Ordinary operators, whatever is asked for: they take every dtype and memory format.
        return Backend.COMPOSED
    if impl == "native":
        reason = native_verbs.unsupported(x)
        # A compiler of graphs cannot look into building, and a fake tensor needs none: then it is the call that raises.
        if reason is None and not modes.is_recorded(x):
            reason = build.failure(x.dtype)
        if reason is not None:
            raise ValueError(f'impl="native" cannot run: {reason}; use impl="auto"')
    return Backend.TRITON_ITERATION if impl == "auto" and _has_iteration(settings, x) else Backend.VERBS


def has_inference_kernel(backend: Backend, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether eval is one launch: that has no gradient, and what is recorded or exported wants ordinary operators."""
    if backend is not Backend.TRITON or modes.is_recorded(x):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))


def verbs_for(impl: str, group_size: int, *activations: Tensor) -> ModuleType:
    """Where moments and apply are, for these activations: in C or in torch.

    "torch" is torch. "auto" is C where it can be built and is faster. "native" is C, which raises where it cannot be
    built.
    """
    if impl == "auto":
        fast = native_verbs.is_worthwhile(activations[-1], group_size) and native_verbs.can_run(*activations)
        return native_verbs if fast else torch_verbs
    return native_verbs if impl == "native" else torch_verbs


def iteration_for(backend: Backend, settings: Settings, x: Tensor) -> ModuleType | None:
    """Where Newton's iteration on the covariances of `x` is in kernels of its own; None is `iternorm.solvers`.

    The ranks of a process group have batches of different sizes and must agree on every bit, and a compiler wants
    products that it can place: those stay with torch.
    """
    if backend is Backend.TRITON_ITERATION:
        from iternorm.backends.triton.launches import iteration

        return iteration
    if backend is not Backend.VERBS or settings.solver != "newton" or settings.process_group is not None:
        return None
    if modes.is_recorded(x) or not native_iteration.is_worthwhile(settings.group_size):
        return None
    if settings.impl == "auto" and native_verbs.is_worth_compiling(x):
        return native_iteration if build.is_available(torch_verbs.compute_dtype(x.dtype)) else None
    return native_iteration if settings.impl == "native" else None


def has_root_kernels(matrices: Tensor, p: int) -> bool:
    """Whether the minimax iteration for the inverse p-th root of ``[..., d, d]`` runs in kernels.

    They keep matrices in float16 parts. Those hold X from p = 2 on (for p = 1 it reaches 2^22), and M, which is at most
    2^p, up to 8.
    """
    if not matrices.is_cuda or matrices.dtype != torch.float32 or not 2 <= p <= 8 or NO_TRITON is not None:
        return False
    return kernels().lacking(matrices.device.index) is None


def has_moment_kernels(x: Tensor) -> bool:
    """Whether the moments of all channels of `x` together are one pass in kernels: up to 128, a tile of channels."""
    if not x.is_cuda or x.shape[1] > 128 or NO_TRITON is not None or modes.is_recorded(x):
        return False
    return kernels().unsupported(x, x.shape[1]) is None


def has_item_kernels(settings: Settings, x: Tensor, rows: int) -> bool:
    """Whether each item of `x` is whitened by itself in kernels; what is recorded is the operation on a batch."""
    if modes.is_recorded(x) or choose(settings, x) is not Backend.TRITON:
        return False
    from iternorm.backends.triton import items

    return items.supports(x, rows, settings.group_size)


def _why_not_triton(x: Tensor, settings: Settings) -> str | None:
    """Why the Triton kernels cannot normalize `x`, or None."""
    if settings.solver not in ("newton", "zca"):
        return f"the kernels compute newton's iteration and zca, not {settings.solver!r}"
    if settings.correction or settings.shrinkage:
        return "the kernels have neither correction nor shrinkage"
    return NO_TRITON if NO_TRITON is not None else kernels().unsupported(x, settings.group_size, settings.solver)


def _has_iteration(settings: Settings, x: Tensor) -> bool:
    """Whether the iteration alone runs in kernels, for groups that are too large for the others.

    A compiler sees the torch path's products, which it can place in a graph.
    """
    if not x.is_cuda or settings.solver not in ("newton", "zca") or x.dtype == torch.float64 or modes.is_recorded(x):
        return False
    if NO_TRITON is not None or settings.steps < 2 or settings.group_size < 64:
        return False
    return kernels().lacking(x.device.index) is None


def find_no_triton() -> str | None:
    """Why there is no Triton for the kernels, or None. It is not imported for that."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # A build under another name, such as those of torch's nightly versions.
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < _LEAST_TRITON:
        return f"they need triton {'.'.join(map(str, _LEAST_TRITON))} or newer, and {version} is installed"
    return None


NO_TRITON = find_no_triton()
_kernels: Any = None


def kernels() -> Any:
    """`iternorm.backends.triton.run`, imported when it is first used: it imports triton."""
    global _kernels
    if torch.compiler.is_compiling():
        # A compiler guards what a global held before, and finds the module in it that it has itself imported.
        from iternorm.backends.triton import run

        return run
    if _kernels is None:
        from iternorm.backends.triton import run

        _kernels = run
    return _kernels
