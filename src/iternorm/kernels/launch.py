"""Choosing tiles and launching the kernels: `forward`, `backward` and `infer` of one whitening layer.

Forward and backward are four launches each (partial moments, reduction, newton, apply). A group of more than 64
channels leaves the iteration to batched matrix products, between the same moments and apply kernels.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from iternorm import groups, plain, solvers
from iternorm import running as statistics
from iternorm.kernels.apply import apply_backward, apply_forward
from iternorm.kernels.moments import partial_moments, reduce_moments
from iternorm.kernels.newton import newton_backward, newton_forward
from iternorm.kernels.plan import (
    LARGEST_NEWTON,
    NEWTON_WARPS,
    Shape,
    dense,
    num_sms,
    parts,
    precision,
    programs,
    shape_of,
    sizes,
    tiles_for,
    unsupported,
)

__all__ = ["backward", "dense", "forward", "infer", "sizes", "unsupported"]

_compiled: dict[tuple, Any] = {}


def _launch(kernel, grid: tuple[int, int], arguments: tuple, constants: dict[str, Any], warps: int, shape: Shape):
    """Launch a kernel, the second time without Triton's own argument handling.

    That handling costs 20 us and more a launch of these kernels, several times what the launch does. The key holds all
    that it looks at: the values that kernels are specialized for, the dtypes, and that every pointer is aligned.
    """
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    aligned = not any(t.data_ptr() & 15 for t in tensors)
    if knobs.runtime.interpret or not aligned:
        kernel[grid](*arguments, **constants, num_warps=warps)
        return
    device = tensors[0].device.index
    key = (
        kernel,
        device,
        shape.channels,
        shape.length,
        shape.samples >= 2**31,
        warps,
        *constants.values(),
        *[None if a is None else a.dtype for a in arguments if a is None or isinstance(a, Tensor)],
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **constants, num_warps=warps)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        grid[0],
        grid[1],
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *arguments,
        *constants.values(),
    )


def _moments(a: Tensor | None, x: Tensor, mean: Tensor | None, shape: Shape) -> tuple[Tensor, Tensor, Tensor | None]:
    """Matrix ``[G, BD, BD]``, vector ``[C]`` and, forward, variance ``[C]``."""
    forward = a is None
    tiles = tiles_for("moments" if forward else "cross_moments", shape, x.dtype)
    num_programs, per_program = programs(shape, tiles, num_sms(x.device))
    padded, count = shape.padded, shape.num_groups
    workspace = x.new_empty(count * num_programs * padded * (padded + 2), dtype=torch.float32)
    _launch(
        partial_moments,
        (num_programs, count),
        (
            x if a is None else a,
            x,
            mean,
            workspace,
            shape.samples,
            shape.channels,
            shape.length,
            per_program,
            num_programs,
        ),
        {
            "D": shape.group_size,
            "BD": padded,
            "BL": tiles.block,
            "ROWS": shape.rows,
            "SELF": forward,
            "PARTS": parts(x.dtype),
            "BIG": shape.big,
            "WHOLE": shape.whole,
            "STAGES": tiles.stages,
        },
        tiles.warps,
        shape,
    )
    matrix = x.new_empty((count, padded, padded), dtype=torch.float32)
    vector = x.new_empty(shape.channels, dtype=torch.float32)
    variance = x.new_empty(shape.channels, dtype=torch.float32) if forward else None
    _launch(
        reduce_moments,
        (count, padded),
        (
            workspace,
            matrix,
            vector,
            variance,
            shape.samples,
            shape.channels,
            num_programs,
            per_program * tiles.block,
        ),
        {"D": shape.group_size, "BD": padded, "PB": 64, "SELF": forward},
        4,
        shape,
    )
    return matrix, vector, variance


def _newton(covariance, mean, variance, shape, num_iters, eps, running, dtype):
    """Whitening matrices ``[G, d, d]``, the iterates for the backward, and whether the batch was finite."""
    size, padded, count = shape.group_size, shape.padded, shape.num_groups
    if padded > LARGEST_NEWTON:
        whitening = solvers.solve(_regularized(covariance, shape, eps), "newton", num_iters)[0] * _inside(shape, mean)
        if running is not None:
            value = covariance[:, :size, :size] if running.is_covariance else whitening
            statistics.update(running.mean, running.matrix, running.num_batches, mean, value, running.momentum)
        return whitening, covariance.new_empty(0), None
    slots = max(0, 2 * num_iters - 2)
    whitening = covariance.new_empty((count, size, size))
    iterates = covariance.new_empty(sizes(shape.channels, size, num_iters)[1])
    is_finite = covariance.new_empty(1, dtype=torch.int32) if running is not None else None
    momentum = None if running is None else running.momentum
    _launch(
        newton_forward,
        (count, 1),
        (
            covariance,
            mean,
            variance,
            whitening,
            iterates,
            None if running is None else running.mean,
            None if running is None else running.matrix,
            None if running is None else running.num_batches,
            is_finite,
            eps,
            0.0 if momentum is None else momentum,
            shape.channels,
        ),
        {
            "T": num_iters,
            "D": size,
            "BD": padded,
            "SLOTS": slots,
            "RUNNING": running is not None,
            "CUMULATIVE": running is not None and momentum is None,
            "RUNNING_COVARIANCE": running is not None and running.is_covariance,
            "SAVE": slots > 0,
            "PRECISION": precision(dtype),
        },
        NEWTON_WARPS,
        shape,
    )
    return whitening, iterates, is_finite


def _inside(shape: Shape, like: Tensor) -> Tensor:
    """1 where a matrix ``[G, d, d]`` belongs to its group, 0 in the padding of a smaller last one."""
    members = groups.pad_vector(like.new_ones(shape.channels), shape.group_size)
    return members[:, :, None] * members[:, None, :]


def _regularized(covariance: Tensor, shape: Shape, eps: float) -> Tensor:
    """Covariance ``[G, d, d]`` with eps on the diagonal of what belongs to a group."""
    size = shape.group_size
    members = groups.pad_vector(covariance.new_full((shape.channels,), eps), size)
    return covariance[:, :size, :size] + torch.diag_embed(members)


def _apply(x, whitening, mean, weight, bias, shape, num_batches=None, is_finite=None) -> Tensor:
    tiles = tiles_for("apply", shape, x.dtype)
    num_programs, per_program = programs(shape, tiles, num_sms(x.device))
    y = torch.empty_like(x)
    counted = num_batches is not None and is_finite is not None
    _launch(
        apply_forward,
        (num_programs, shape.num_groups),
        (
            x,
            y,
            whitening,
            mean,
            weight,
            bias,
            num_batches if counted else None,
            is_finite if counted else None,
            shape.samples,
            shape.channels,
            shape.length,
            per_program,
        ),
        {
            "D": shape.group_size,
            "BD": shape.padded,
            "BL": tiles.block,
            "ROWS": shape.rows,
            "WEIGHT": weight is not None,
            "BIAS": bias is not None,
            "COUNT": counted,
            "PARTS": parts(x.dtype),
            "BIG": shape.big,
            "WHOLE": shape.whole,
            "STAGES": tiles.stages,
        },
        tiles.warps,
        shape,
    )
    return y


def forward(x, weight, bias, group_size, num_iters, eps, running=None):
    """Whiten a batch.

    Returns:
        y, mean ``[C]``, covariance ``[G, BD, BD]`` (without eps), whitening ``[G, d, d]`` and the saved iterates.
    """
    x = dense(x)
    shape = shape_of(x, group_size)
    covariance, mean, variance = _moments(None, x, None, shape)
    whitening, iterates, is_finite = _newton(covariance, mean, variance, shape, num_iters, eps, running, x.dtype)
    num_batches = None if running is None else running.num_batches
    y = _apply(x, whitening, mean, weight, bias, shape, num_batches, is_finite)
    return y, mean, covariance, whitening, iterates


def backward(grad, x, weight, mean, covariance, whitening, iterates, group_size, num_iters, eps, needs_input):
    """Gradients for x (None unless `needs_input`), weight (None without one) and bias."""
    x = dense(x)
    grad = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    shape = shape_of(x, group_size)
    cross, grad_sum, _ = _moments(grad, x, mean, shape)
    second, grad_weight = _newton_backward(
        cross, covariance, whitening, iterates, weight, shape, num_iters, eps, x.dtype
    )
    dx = _apply_backward(grad, x, whitening, second, mean, grad_sum, weight, shape) if needs_input else None
    return dx, grad_weight, grad_sum


def _newton_backward(cross, covariance, whitening, iterates, weight, shape, num_iters, eps, dtype):
    """The matrix B ``[G, BD, BD]`` of dx = Aᵀ dy + B (x - μ) + c, and d(weight)."""
    if shape.padded > LARGEST_NEWTON:
        return _large_newton_backward(cross, covariance, whitening, weight, shape, num_iters, eps)
    grad_weight = None if weight is None else cross.new_empty(shape.channels)
    second = torch.empty_like(cross)
    _launch(
        newton_backward,
        (shape.num_groups, 1),
        (
            cross,
            covariance,
            whitening,
            iterates,
            weight,
            grad_weight,
            second,
            eps,
            shape.samples,
            shape.channels,
        ),
        {
            "T": num_iters,
            "D": shape.group_size,
            "BD": shape.padded,
            "SLOTS": max(0, 2 * num_iters - 2),
            "AFFINE": weight is not None,
            "PRECISION": precision(dtype),
        },
        NEWTON_WARPS,
        shape,
    )
    return second, grad_weight


def _large_newton_backward(cross, covariance, whitening, weight, shape, num_iters, eps):
    size = shape.group_size
    gradient = cross[:, :size, :size]
    grad_weight = None
    if weight is not None:
        grad_weight = groups.unpad_vector((gradient * whitening).sum(-1), shape.channels)
        gradient = gradient * groups.pad_vector(weight.to(gradient.dtype), size)[:, :, None]
    regularized = _regularized(covariance, shape, eps)
    result = solvers.solve_backward(gradient, regularized, whitening, (), "newton", num_iters)
    second = torch.zeros_like(cross)
    second[:, :size, :size] = result * _inside(shape, cross) * (2 / shape.samples)
    return second, grad_weight


def _apply_backward(grad, x, whitening, second, mean, grad_sum, weight, shape) -> Tensor:
    if shape.padded > LARGEST_NEWTON and parts(x.dtype) == 3:
        # Two matrices of 128x128 in three parts each ask for more shared memory than there is.
        return _large_apply_backward(grad, x, whitening, second, mean, grad_sum, weight, shape)
    tiles = tiles_for("apply_backward", shape, x.dtype)
    num_programs, per_program = programs(shape, tiles, num_sms(x.device))
    dx = torch.empty_like(x)
    _launch(
        apply_backward,
        (num_programs, shape.num_groups),
        (
            grad,
            x,
            dx,
            whitening,
            second,
            mean,
            grad_sum,
            weight,
            shape.samples,
            shape.channels,
            shape.length,
            per_program,
        ),
        {
            "D": shape.group_size,
            "BD": shape.padded,
            "BL": tiles.block,
            "ROWS": shape.rows,
            "WEIGHT": weight is not None,
            "PARTS": parts(x.dtype),
            "BIG": shape.big,
            "WHOLE": shape.whole,
            "STAGES": tiles.stages,
        },
        tiles.warps,
        shape,
    )
    return dx


def _large_apply_backward(grad, x, whitening, second, mean, grad_sum, weight, shape) -> Tensor:
    size = shape.group_size
    scale = 1 if weight is None else groups.pad_vector(weight.to(whitening.dtype), size)[:, :, None]
    first, second = (whitening * scale).mT, second[:, :size, :size]
    vectors = [groups.pad_vector(v, size)[:, :, None] for v in (grad_sum / shape.samples, mean)]
    offset = groups.unpad_vector(-(first @ vectors[0]) - second @ vectors[1], shape.channels)
    return plain.affine_pair(grad, x, first, second, offset, size)


def infer(x, whitening, mean, weight, bias, group_size) -> Tensor:
    """y = diag(γ) W (x - μ) + β from given statistics: one launch."""
    x = dense(x)
    return _apply(x, whitening, mean, weight, bias, shape_of(x, group_size))
