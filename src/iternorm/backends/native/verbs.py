"""The four verbs of `iternorm.backends.torch.verbs` in C: the same functions, for activations in fp32 and fp64.

The kernels read planes and rows (`_is_rows`); an activation that lies otherwise is copied.

`moments` always subtracts a pilot, the mean of the first positions of a chunk, and `cross_moments` the mean itself, so
that a large mean costs no accuracy. Results do not depend on the number of threads.
"""

import ctypes
import os

import torch
from torch import Tensor

from iternorm.backends.native import build
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import groups

# The smallest groups that the kernels are faster on than torch, by layout: measured on 32x128x28x28, one core of an AMD
# EPYC with AVX-512. Smaller ones fill no vector.
_LEAST_PLANES, _LEAST_ROWS = 4, 32
# The smallest activation that is worth the second or two that compiling takes, once on a machine: 256 KB of fp32.
_LEAST_ELEMENTS = 1 << 16

# A child of fork has none of the threads that its parent's OpenMP would wait for.
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Shape(ctypes.Structure):
    _fields_ = (
        ("samples", ctypes.c_long),
        ("channels", ctypes.c_long),
        ("length", ctypes.c_long),
        ("group_size", ctypes.c_long),
        ("rows", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


class _Terms(ctypes.Structure):
    _fields_ = (("inputs", ctypes.c_void_p * 2), ("matrices", ctypes.c_void_p * 2), ("count", ctypes.c_int))


def unsupported(x: Tensor) -> str | None:
    """Why the kernels cannot read `x`, or None. Whether they can be built is another question."""
    if x.device.type != "cpu":
        return f"the C kernels run on the CPU, the input is on {x.device}"
    if x.dtype not in build.REALS:
        return f"the C kernels compute in float32 and float64, the input is {x.dtype}"
    if x.layout != torch.strided:
        return f"the C kernels read dense tensors, the input is of layout {x.layout}"
    return None


def _is_rows(x: Tensor) -> bool | None:
    """Whether the channels of a position lie together (True) or its positions (False), or None where neither does."""
    if x.is_contiguous():
        # Planes of one position are rows of channels.
        return x.numel() == x.shape[0] * x.shape[1]
    return True if torch_verbs.is_rows(x) else None


def _laid_out_as(x: Tensor, grad: Tensor) -> Tensor:
    # A gradient of zeros may have no memory: the backward of `torch.sgn` makes such ones.
    is_readable = _is_rows(grad) == _is_rows(x) and not grad._is_zerotensor()
    return grad if is_readable else torch.empty_like(x).copy_(grad)


def can_run(*activations: Tensor) -> bool:
    """Whether the kernels can take these and can be built, which is tried at the first call."""
    return all(unsupported(x) is None for x in activations) and build.is_available(activations[0].dtype)


def is_worth_compiling(x: Tensor) -> bool:
    """Whether the kernels are wanted, and `x` is large enough to compile them for."""
    return x.device.type == "cpu" and x.numel() >= _LEAST_ELEMENTS and os.environ.get("ITERNORM_NATIVE") != "0"


def is_worthwhile(x: Tensor, group_size: int) -> bool:
    """Whether the kernels are faster on `x` than torch, and `x` is large enough to compile them for."""
    if not is_worth_compiling(x):
        return False
    rows = x.numel() == x.shape[0] * x.shape[1] or torch_verbs.is_rows(x)
    return group_size >= (_LEAST_ROWS if rows else _LEAST_PLANES)


def moments(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Mean ``[C]`` and biased covariance ``[G, d, d]`` (math.md, Eq. 3-4)."""
    x = torch_verbs.laid_out(x)
    library, shape = build.library(x.dtype), _shape(x, group_size)
    mean, covariance = _results(x, shape)
    workspace = workspace_for(library.sums_workspace, shape)
    library.moments(ctypes.byref(shape), address_of(x), address_of(workspace), address_of(mean), address_of(covariance))
    return mean, covariance


def cross_moments(grad: Tensor, x: Tensor, mean: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Σ dy ``[C]`` and Σ dy (x - mean)ᵀ ``[G, d, d]`` (math.md, Eq. 21)."""
    x = torch_verbs.laid_out(x)
    grad = _laid_out_as(x, grad)
    library, shape = build.library(x.dtype), _shape(x, group_size)
    total, cross = _results(x, shape)
    workspace, mean = workspace_for(library.sums_workspace, shape), mean.contiguous()
    library.cross_moments(
        ctypes.byref(shape),
        address_of(grad),
        address_of(x),
        address_of(mean),
        address_of(workspace),
        address_of(total),
        address_of(cross),
    )
    return total, cross


def apply(x: Tensor, matrix: Tensor, offset: Tensor, group_size: int) -> Tensor:
    """y = A x + c for each group: A ``[G, d, d]``, c ``[C]`` (math.md, Eq. 2)."""
    return _map([torch_verbs.laid_out(x)], [matrix], offset, group_size)


def apply_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor, offset: Tensor, group_size: int) -> Tensor:
    """dx = A dy + B x + c for each group, in the memory format of x (math.md, Eq. 24)."""
    x = torch_verbs.laid_out(x)
    return _map([x, _laid_out_as(x, grad)], [second, first], offset, group_size)


def _map(inputs: list[Tensor], matrices: list[Tensor], offset: Tensor, group_size: int) -> Tensor:
    x = inputs[0]
    library, shape = build.library(x.dtype), _shape(x, group_size)
    result = torch_verbs.empty_output(x)
    # Kept until the call is over: the kernels know addresses only.
    matrices, offset = [m.contiguous() for m in matrices], offset.contiguous()
    terms = _Terms(count=len(inputs))
    for i, (tensor, matrix) in enumerate(zip(inputs, matrices, strict=True)):
        terms.inputs[i], terms.matrices[i] = tensor.data_ptr(), matrix.data_ptr()
    workspace = workspace_for(library.map_workspace, shape, ctypes.c_long(len(inputs)))
    library.map(ctypes.byref(shape), ctypes.byref(terms), address_of(offset), address_of(workspace), address_of(result))
    return result


def _shape(x: Tensor, group_size: int) -> _Shape:
    samples, channels = x.shape[:2]
    size = groups.effective_size(channels, group_size)
    return _Shape(samples, channels, x.numel() // (samples * channels), size, bool(_is_rows(x)), num_threads())


def num_threads() -> int:
    """As many as torch uses."""
    return 1 if _forked else torch.get_num_threads()


def _results(x: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    size = shape.group_size
    return x.new_empty(shape.channels), x.new_empty(groups.num_groups(shape.channels, size), size, size)


def workspace_for(size_of, shape: ctypes.Structure, *args) -> Tensor:
    """Memory that a kernel needs while it runs."""
    size_of.restype = ctypes.c_long
    # Here, and not on torch's default device.
    return torch.empty(size_of(ctypes.byref(shape), *args), dtype=torch.uint8, device="cpu")


def address_of(tensor: Tensor) -> ctypes.c_void_p:
    """Where it begins. The caller keeps the tensor until the kernel is done: it knows addresses only."""
    return ctypes.c_void_p(tensor.data_ptr())
