"""How many floating-point operations the operators take, for `torch.utils.flop_counter`.

A multiplication and its addition are two, as torch counts them. Symmetry is not made use of, although kernels do.
`torch.utils.flop_counter` imports triton, so it is not imported here: its counters are found while they are at work.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from iternorm.whitening import groups


def _blocks(num_features: int, group_size: int, power: int) -> int:
    """Σ d^power over the groups."""
    return sum(part.count * part.size**power for part in groups.parts(num_features, group_size))


def _product(x: Tensor, group_size: int) -> int:
    """One product with a matrix ``[d, d]``, or of the group with itself, for every sample."""
    return 2 * (x.numel() // x.shape[1]) * _blocks(x.shape[1], group_size, 2)


def _iteration(x: Tensor, group_size: int, num_iters: int, products: int) -> int:
    """The first step of Newton's iteration takes no product."""
    return 2 * max(num_iters - 1, 0) * products * _blocks(x.shape[1], group_size, 3)


def _moments(x, group_size, *_, out_val=None, **__) -> int:
    return _product(x, group_size)


def _cross_moments(grad, x, mean, group_size, *_, out_val=None, **__) -> int:
    return _product(x, group_size)


def _affine(x, matrix, offset, group_size, *_, out_val=None, **__) -> int:
    return _product(x, group_size)


def _affine_pair(grad, x, first, second, offset, group_size, *_, out_val=None, **__) -> int:
    return 2 * _product(x, group_size)


def _fused_forward(
    x, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance, group_size, num_iters, *_,
    out_val=None, **__,
) -> int:  # fmt: skip
    return 2 * _product(x, group_size) + _iteration(x, group_size, num_iters, 3)


def _fused_backward(
    grad,
    more,
    x,
    weight,
    state,
    output,
    group_size,
    num_iters,
    eps,
    exact,
    needs_input,
    needs_residual,
    *,
    out_val=None,
) -> int:
    if not needs_input:
        return _product(x, group_size)
    return 3 * _product(x, group_size) + _iteration(x, group_size, num_iters, 4)


def _sync_whiten(
    x, gathered, weight, bias, residual, mean, matrix, num_batches, momentum, is_covariance, group_size, num_iters, *_,
    out_val=None, **__,
) -> int:  # fmt: skip
    return _product(x, group_size) + _iteration(x, group_size, num_iters, 3)


def _sync_cross_moments(grad, x, weight, state, output, group_size, *_, out_val=None, **__) -> int:
    return _product(x, group_size)


def _sync_input_gradient(
    grad, x, weight, state, total, output, group_size, num_iters, *_, out_val=None, **__
) -> int:  # fmt: skip
    return 2 * _product(x, group_size) + _iteration(x, group_size, num_iters, 4)


def formulas() -> dict[Any, Callable[..., int]]:
    """By operator. Each is called as the operator is."""
    ops = torch.ops.iternorm
    return {
        ops.moments: _moments,
        ops.cross_moments: _cross_moments,
        ops.affine: _affine,
        ops.affine_pair: _affine_pair,
        ops.fused_forward: _fused_forward,
        ops.fused_backward: _fused_backward,
        ops.sync_moments: _moments,
        ops.sync_whiten: _sync_whiten,
        ops.sync_cross_moments: _sync_cross_moments,
        ops.sync_input_gradient: _sync_input_gradient,
    }


def announce() -> None:
    """Tell the counters that are looking at this call, and those to come, how to count."""
    if torch.compiler.is_compiling():
        return
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    registries = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        # A counter copies the formulas when it is made.
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registries.append(registry)
    for registry in registries:
        if torch.ops.iternorm.moments not in registry:
            registry.update(formulas())
