"""Arguments that layers and functions have in common: each is checked in one place, with one message."""

import numbers
import operator
from typing import Any

import torch
from torch import Tensor

IMPLS = ("auto", "triton", "native", "torch", "reference")
ACTIVATIONS = ("relu",)


def check_input(x: Tensor) -> None:
    """Raise unless the input is a floating-point tensor ``[N, C, ...]`` of a dtype and rank that layers take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"input has dtype {x.dtype}; convert it to a floating-point dtype, e.g. input.float()")
    if not 2 <= x.ndim <= 5:
        raise ValueError(f"expected an input of 2 to 5 dimensions [N, C, ...], got {x.ndim}: shape {list(x.shape)}")
    if x.shape[1] == 0:
        raise ValueError(f"input has no channels: shape {list(x.shape)}; the second dimension must be at least 1")


def check_residual(residual: Tensor | None, x: Tensor) -> None:
    """What is added to the output has to be like the output, which is like the input."""
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual must be a tensor or None, got {type(residual).__name__}")
    for name, own, expected, remedy in (
        ("shape", tuple(residual.shape), tuple(x.shape), "project or expand it first"),
        ("dtype", residual.dtype, x.dtype, "use residual.to(input.dtype)"),
        ("device", residual.device, x.device, "use residual.to(input.device)"),
        ("layout", residual.layout, torch.strided, "use residual.to_dense()"),
    ):
        if own != expected:
            raise ValueError(f"residual has {name} {own}, the output it is added to has {expected}; {remedy}")


def integer(name: str, value: Any, meaning: str) -> int:
    """A Python int of anything that counts as one (numpy's integers do), but not of a bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}={value!r} is not an integer; give {meaning}")


def number(name: str, value: Any, meaning: str) -> float:
    """A Python float of a real number (numpy's are), but not of a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is not a number; give {meaning}")
    return float(value)


def check_group_size(group_size: Any) -> int | None:
    """The group size as an int of at least 1, or None for all channels."""
    if group_size is None:
        return None
    result = integer("group_size", group_size, "the number of channels a group, or None")
    if result < 1:
        raise ValueError(f"group_size={group_size} must be at least 1; use None to whiten all channels together")
    return result


def check_num_iters(num_iters: Any) -> int:
    """The number of Newton steps as an int of at least 0."""
    result = integer("num_iters", num_iters, "the number of Newton steps, 5 by default")
    if result < 0:
        raise ValueError(f"num_iters={num_iters} must be at least 0; the paper uses 5")
    return result


def check_solver(solver: str) -> None:
    """Raise unless an exact solver has this name."""
    if solver not in ("zca", "pca", "cholesky"):
        raise ValueError(f"solver={solver!r} is not known; choose one of 'zca', 'pca', 'cholesky'")


def check_any_solver(solver: str) -> None:
    """Newton's iteration among them."""
    if solver not in ("newton", "zca", "pca", "cholesky"):
        raise ValueError(f"solver={solver!r} is not known; choose one of 'newton', 'zca', 'pca', 'cholesky'")


def check_num_groups(num_groups: Any, num_features: int) -> int:
    """A number of groups that divides the channels."""
    result = integer("num_groups", num_groups, "the number of groups of channels, 32 by default")
    if result < 1 or num_features % result:
        raise ValueError(f"num_groups={num_groups} must divide the number of channels, {num_features}")
    return result


def check_eps(eps: Any) -> float:
    """The eps as a finite float that is not negative."""
    result = number("eps", eps, "a small one from 0 on, 1e-5 by default")
    if not 0 <= result < float("inf"):
        raise ValueError(f"eps={eps} must not be negative or infinite; it keeps the covariance regular; 1e-5 is usual")
    return result


def check_correction(correction: Any) -> int:
    """0 or 1, as an int."""
    result = integer("correction", correction, "0 or 1")
    if result not in (0, 1):
        raise ValueError(f"correction={correction} is not known; 0 is the biased covariance, 1 the unbiased one")
    return result


def check_shrinkage(shrinkage: Any) -> float:
    """The shrinkage as a float from 0 to 1."""
    result = number("shrinkage", shrinkage, "one from 0 to 1")
    if not 0 <= result <= 1:
        raise ValueError(f"shrinkage={shrinkage} must be from 0 to 1; 0 keeps the covariance, 1 is the identity")
    return result


def check_momentum(momentum: Any) -> float | None:
    """The momentum as a float from 0 to 1, or None for the average of all batches."""
    if momentum is None:
        return None
    result = number("momentum", momentum, "one from 0 to 1, or None for the average of all")
    if not 0 <= result <= 1:
        raise ValueError(f"momentum={momentum} must be from 0 to 1; None is the average of all batches")
    return result


def check_impl(impl: str) -> None:
    """Raise unless an implementation has this name."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not known; choose one of {', '.join(map(repr, IMPLS))}")


def check_activation(activation: str | None) -> None:
    """Raise unless a layer can apply this activation."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f'activation={activation!r} is not known; use "relu", or None and a module after the layer')
