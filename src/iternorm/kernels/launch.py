"""One whitening layer on the GPU: `forward`, `backward` and `infer`.

Forward and backward are four launches each (partial moments, reduction, newton, apply). A group of more than 64
channels leaves the iteration to batched matrix products, between the same moments and apply kernels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm import groups, plain, solvers
from iternorm import running as statistics
from iternorm.kernels.apply import apply_backward, apply_forward
from iternorm.kernels.launcher import Launch
from iternorm.kernels.moments import partial_moments, reduce_moments
from iternorm.kernels.newton import newton_backward, newton_forward
from iternorm.kernels.plan import (
    INTERPRETED,
    LARGEST_NEWTON,
    NEWTON_WARPS,
    dense,
    num_sms,
    parts,
    precision,
    programs,
    shape_of,
    slots_of,
    state_of,
    tiles_for,
    unsupported,
    views,
)

__all__ = ["backward", "dense", "forward", "infer", "state_of", "unsupported", "views"]


class Key(NamedTuple):
    """All that a plan depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group_size: int
    num_iters: int
    split: int
    weight: torch.dtype | None
    bias: torch.dtype | None
    running: tuple | None  # dtypes of mean and matrix, whether batches are counted, cumulative, covariance


_plans: dict[Key, "Plan"] = {}
_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def plan_for(x: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, num_iters: int, running) -> "Plan":
    key = Key(
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        group_size,
        num_iters,
        parts(x.dtype),
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None
        if running is None
        else (
            running.mean.dtype,
            running.matrix.dtype,
            running.num_batches is not None,
            running.momentum is None,
            running.is_covariance,
        ),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 4096:
            _plans.clear()
        plan = _plans[key] = Plan(key, x)
    return plan


class Plan:
    """The launches of one layer at one input shape, made once."""

    def __init__(self, key: Key, x: Tensor):
        self.key = key
        self.shape = shape = shape_of(dense(x), key.group_size)
        self.at = state_of(shape.channels, key.group_size, key.num_iters)
        self.copied = dense(x) is not x
        self.large = shape.padded > LARGEST_NEWTON
        self.quick = x.is_cuda and not INTERPRETED
        # A layer uses few of these: each is compiled when it is first launched.
        self._launches: dict[str, Launch] = {}
        self._sizes: dict[str, int] = {}

    def launch(self, name: str) -> Launch:
        found = self._launches.get(name)
        if found is None:
            found = self._launches[name] = getattr(self, "_" + name)()
        return found

    def _passes(self, kernel: str, function, pointers: tuple, constants: dict[str, Any], whole_batch: bool) -> Launch:
        """A kernel that goes over the activation."""
        shape = self.shape
        tiles = tiles_for(kernel, shape, self.key.split)
        count, each = programs(shape, tiles, num_sms(self.key.device))
        integers = (shape.samples, shape.channels, shape.length, each, *((count,) if whole_batch else ()))
        common = {"D": shape.group_size, "BD": shape.padded, "BL": tiles.block, "ROWS": shape.rows}
        last = {"PARTS": self.key.split, "BIG": shape.big, "WHOLE": shape.whole, "STAGES": tiles.stages}
        grid = (count, shape.num_groups)
        return Launch(
            function,
            grid,
            pointers,
            (),
            integers,
            (1, 2),
            {**common, **constants, **last},
            tiles.warps,
            self.key.device,
        )

    def _moments(self, backward: bool = False) -> Launch:
        name = "cross_moments" if backward else "moments"
        mean = torch.float32 if backward else None
        pointers = (self.key.dtype, self.key.dtype, mean, torch.float32)
        return self._passes(name, partial_moments, pointers, {"SELF": not backward}, True)

    def _cross_moments(self) -> Launch:
        return self._moments(backward=True)

    def _reduce(self, backward: bool = False) -> Launch:
        shape = self.shape
        tiles = tiles_for("cross_moments" if backward else "moments", shape, self.key.split)
        count, each = programs(shape, tiles, num_sms(self.key.device))
        fp32 = torch.float32
        return Launch(
            reduce_moments,
            (shape.num_groups, shape.padded),
            (fp32, fp32, fp32, None if backward else fp32),
            (),
            (shape.samples, shape.channels, count, each * tiles.block),
            (1,),
            {"D": shape.group_size, "BD": shape.padded, "PB": 64, "SELF": not backward},
            4,
            self.key.device,
        )

    def _cross_reduce(self) -> Launch:
        return self._reduce(backward=True)

    def _newton(self) -> Launch:
        shape, running, fp32 = self.shape, self.key.running, torch.float32
        slots = slots_of(self.key.num_iters)
        mean, matrix, counted, cumulative, is_covariance = running or (None, None, False, False, False)
        return Launch(
            newton_forward,
            (shape.num_groups, 1),
            (fp32,) * 5 + (mean, matrix, torch.int64 if counted else None, torch.int32),
            (0.1, 0.1),
            (shape.channels,),
            (0,),
            {
                "T": self.key.num_iters,
                "D": shape.group_size,
                "BD": shape.padded,
                "SLOTS": slots,
                "RUNNING": running is not None,
                "CUMULATIVE": cumulative,
                "RUNNING_COVARIANCE": is_covariance,
                "SAVE": slots > 0,
                "PRECISION": precision(self.key.split),
            },
            NEWTON_WARPS,
            self.key.device,
        )

    def _newton_backward(self) -> Launch:
        shape, weight, fp32 = self.shape, self.key.weight, torch.float32
        return Launch(
            newton_backward,
            (shape.num_groups, 1),
            (fp32,) * 4 + (weight, None if weight is None else fp32, fp32),
            (0.1,),
            (shape.samples, shape.channels),
            (1,),
            {
                "T": self.key.num_iters,
                "D": shape.group_size,
                "BD": shape.padded,
                "SLOTS": slots_of(self.key.num_iters),
                "AFFINE": weight is not None,
                "PRECISION": precision(self.key.split),
            },
            NEWTON_WARPS,
            self.key.device,
        )

    def _apply(self) -> Launch:
        dtype, weight, bias, fp32 = self.key.dtype, self.key.weight, self.key.bias, torch.float32
        counted = self.counts
        pointers = (dtype, dtype, fp32, fp32, weight, bias, torch.int64 if counted else None)
        return self._passes(
            "apply",
            apply_forward,
            (*pointers, torch.int32 if counted else None),
            {"WEIGHT": weight is not None, "BIAS": bias is not None, "COUNT": counted},
            False,
        )

    def _apply_backward(self) -> Launch:
        dtype, weight, fp32 = self.key.dtype, self.key.weight, torch.float32
        return self._passes(
            "apply_backward",
            apply_backward,
            (dtype,) * 3 + (fp32,) * 4 + (weight,),
            {"WEIGHT": weight is not None},
            False,
        )

    @property
    def counts(self) -> bool:
        """Whether the apply kernel moves the counter of batches."""
        return self.key.running is not None and self.key.running[2] and not self.large

    def workspace(self, x: Tensor, name: str, stream: int | None) -> Tensor:
        """Room for the partial sums of all programs, and backward for two matrices a group.

        Launches of one stream follow each other, so its layers share one buffer. A captured graph may be replayed on
        another stream, and gets its own.
        """
        size = self._sizes.get(name)
        if size is None:
            padded, count = self.shape.padded, self.shape.num_groups
            size = self._sizes[name] = (self.launch(name).grid[0] * (padded + 2) + 2 * padded) * count * padded
        if stream is None or torch.cuda.is_current_stream_capturing():
            return x.new_empty(size, dtype=torch.float32)
        shared = _workspaces.get((self.key.device, stream))
        if shared is None or shared.numel() < size:
            shared = _workspaces[self.key.device, stream] = x.new_empty(size, dtype=torch.float32)
        return shared

    def stream(self, *tensors: Tensor | None) -> int | None:
        """The current stream, or None where the tensors must be handed to Triton themselves."""
        if not self.quick or any(t is not None and t.data_ptr() & 15 for t in tensors):
            return None
        return torch._C._cuda_getCurrentRawStream(self.key.device.index)


def _address(tensor: Tensor | None, offset: int = 0) -> int | None:
    return None if tensor is None else tensor.data_ptr() + 4 * offset


def _slice(tensor: Tensor | None, offset: int = 0) -> Tensor | None:
    return tensor if tensor is None or offset == 0 else tensor[offset:]


def forward(x, weight, bias, group_size, num_iters, eps, running=None, zeroed=False) -> tuple[Tensor, Tensor]:
    """Whiten a batch, and update `running` (an `iternorm.ops.Running`, or None).

    `zeroed` clears the state first: its parts have gaps between them, and an operator's outputs must not be arbitrary.

    Returns:
        y, and the state that `backward` needs (`views` shows what is in it).
    """
    plan = plan_for(x, weight, bias, group_size, num_iters, running)
    if plan.copied:
        x = dense(x)
        plan = plan_for(x, weight, bias, group_size, num_iters, running)
    at = plan.at
    mean, matrix, num_batches, momentum, _ = running or (None, None, None, None, None)
    stream = plan.stream(x, weight, bias, mean, matrix)
    state = (x.new_zeros if zeroed else x.new_empty)(at.size, dtype=torch.float32)
    workspace = plan.workspace(x, "moments", stream)
    y = torch.empty_like(x)
    ptr = _slice if stream is None else _address
    plan.launch("moments")(stream, (ptr(x), ptr(x), None, ptr(workspace)))
    covariance, whitening = ptr(state, at.covariance), ptr(state, at.whitening)
    batch_mean, variance = ptr(state, at.mean), ptr(state, at.variance)
    plan.launch("reduce")(stream, (ptr(workspace), covariance, batch_mean, variance))
    finite = ptr(state, at.finite) if stream is not None else state[at.finite :].view(torch.int32)
    if plan.large:
        _large_newton(state, plan, eps, running)
    else:
        iterates = ptr(state, at.iterates) if stream is not None or at.iterates < at.size else ptr(state)
        outputs = (covariance, batch_mean, variance, whitening, iterates)
        buffers = (ptr(mean), ptr(matrix), ptr(num_batches), finite)
        plan.launch("newton")(stream, (*outputs, *buffers), eps, 0.0 if momentum is None else momentum)
    counter = (ptr(num_batches), finite) if plan.counts else (None, None)
    plan.launch("apply")(stream, (ptr(x), ptr(y), whitening, batch_mean, ptr(weight), ptr(bias), *counter))
    return y, state


def backward(grad, x, weight, state, group_size, num_iters, eps, needs_input):
    """Gradients for x (None unless `needs_input`), weight (None without one) and bias."""
    x = dense(x)
    if grad.stride() != x.stride():
        grad = torch.empty_like(x).copy_(grad)
    plan = plan_for(x, weight, None, group_size, num_iters, None)
    shape, at = plan.shape, plan.at
    stream = plan.stream(x, grad, weight)
    grad_bias = x.new_empty(shape.channels, dtype=torch.float32)
    grad_weight = None if weight is None else torch.empty_like(grad_bias)
    workspace = plan.workspace(x, "cross_moments", stream)
    ptr = _slice if stream is None else _address
    # The first part of the workspace is for the reduced matrix and for B, the rest for the partials.
    half = shape.num_groups * shape.padded**2
    cross, second, partials = ptr(workspace), ptr(workspace, half), ptr(workspace, 2 * half)
    covariance, whitening = ptr(state, at.covariance), ptr(state, at.whitening)
    mean, grad_sum = ptr(state, at.mean), ptr(grad_bias)
    plan.launch("cross_moments")(stream, (ptr(grad), ptr(x), mean, partials))
    plan.launch("cross_reduce")(stream, (partials, cross, grad_sum, None))
    matrices = workspace[: 2 * half] if plan.large else None
    if matrices is not None:
        grad_weight = _large_newton_backward(matrices, state, weight, plan, eps)
    else:
        iterates = ptr(state, at.iterates) if stream is not None or at.iterates < at.size else ptr(state)
        inputs = (cross, covariance, whitening, iterates, ptr(weight))
        plan.launch("newton_backward")(stream, (*inputs, ptr(grad_weight), second), eps)
    if not needs_input:
        return None, grad_weight, grad_bias
    if matrices is not None and plan.key.split == 3:
        # Two matrices of 128x128 in three parts each ask for more shared memory than there is.
        return _large_apply_backward(grad, x, matrices, state, grad_bias, weight, plan), grad_weight, grad_bias
    dx = torch.empty_like(x)
    inputs = (ptr(grad), ptr(x), ptr(dx), whitening, second, mean, grad_sum, ptr(weight))
    plan.launch("apply_backward")(stream, inputs)
    return dx, grad_weight, grad_bias


def infer(x, whitening, mean, weight, bias, group_size) -> Tensor:
    """y = diag(γ) W (x - μ) + β from given fp32 statistics: one launch."""
    x = dense(x)
    plan = plan_for(x, weight, bias, group_size, 0, None)
    y = torch.empty_like(x)
    stream = plan.stream(x, whitening, mean, weight, bias)
    ptr = _slice if stream is None else _address
    inputs = (ptr(x), ptr(y), ptr(whitening), ptr(mean), ptr(weight), ptr(bias), None, None)
    plan.launch("apply")(stream, inputs)
    return y


def _inside(plan: Plan, like: Tensor) -> Tensor:
    """1 where a matrix ``[G, d, d]`` belongs to its group, 0 in the padding of a smaller last one."""
    members = groups.pad_vector(like.new_ones(plan.shape.channels), plan.shape.group_size)
    return members[:, :, None] * members[:, None, :]


def _regularized(covariance: Tensor, plan: Plan, eps: float) -> Tensor:
    """Covariance ``[G, d, d]`` with eps on the diagonal of what belongs to a group."""
    size = plan.shape.group_size
    members = groups.pad_vector(covariance.new_full((plan.shape.channels,), eps), size)
    return covariance[:, :size, :size] + torch.diag_embed(members)


def _large_newton(state: Tensor, plan: Plan, eps: float, running) -> None:
    """The iteration of groups above 64 by batched products."""
    key, size = plan.key, plan.shape.group_size
    mean, covariance, whitening = views(state, plan.shape.channels, key.group_size, key.num_iters)
    solved, _ = solvers.solve(_regularized(covariance, plan, eps), "newton", key.num_iters)
    whitening.copy_(solved * _inside(plan, solved))
    if running is not None:
        value = covariance[:, :size, :size] if running.is_covariance else whitening
        statistics.update(running.mean, running.matrix, running.num_batches, mean, value, running.momentum)


def _large_newton_backward(matrices: Tensor, state: Tensor, weight, plan: Plan, eps: float) -> Tensor | None:
    """Fill the second half of `matrices` with B; returns d(weight)."""
    key, shape, size = plan.key, plan.shape, plan.shape.group_size
    _, covariance, whitening = views(state, shape.channels, key.group_size, key.num_iters)
    cross, second = matrices.view(2, shape.num_groups, shape.padded, shape.padded)
    gradient = cross[:, :size, :size]
    grad_weight = None
    if weight is not None:
        grad_weight = groups.unpad_vector((gradient * whitening).sum(-1), shape.channels)
        gradient = gradient * groups.pad_vector(weight.to(gradient.dtype), size)[:, :, None]
    regularized = _regularized(covariance, plan, eps)
    result = solvers.solve_backward(gradient, regularized, whitening, (), "newton", key.num_iters)
    second.zero_()
    second[:, :size, :size] = result * _inside(plan, result) * (2 / shape.samples)
    return grad_weight


def _large_apply_backward(grad, x, matrices: Tensor, state: Tensor, grad_sum, weight, plan: Plan) -> Tensor:
    key, shape, size = plan.key, plan.shape, plan.shape.group_size
    mean, _, whitening = views(state, shape.channels, key.group_size, key.num_iters)
    scale = 1 if weight is None else groups.pad_vector(weight.to(whitening.dtype), size)[:, :, None]
    first = (whitening * scale).mT
    second = matrices.view(2, shape.num_groups, shape.padded, shape.padded)[1, :, :size, :size]
    vectors = [groups.pad_vector(v, size)[:, :, None] for v in (grad_sum / shape.samples, mean)]
    offset = groups.unpad_vector(-(first @ vectors[0]) - second @ vectors[1], shape.channels)
    return plain.affine_pair(grad, x, first, second, offset, size)
