"""One whitening layer over the ranks of a process group: the chains of `run`, each with a collective in the middle.

The caller has the collectives. Before one everything is of this rank, after it of all. Eager code runs a chain in one
call. An operator runs half of it: it stops before the collective, or begins with what that gave.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from iternorm.backends.triton.launches.iteration import meeting_place
from iternorm.backends.triton.layout import placed, split_of
from iternorm.backends.triton.plan import Plan, plan_for
from iternorm.backends.triton.run import NOT_RUNNING, behind, gradient_calls, in_strides, parts_of, whitening_calls
from iternorm.backends.triton.runtime import given_to

__all__ = ["backward", "forward", "moments", "plan_for", "plan_of_state"]


def moments(x: Tensor, plan: Plan) -> Tensor:
    """Count, mean and covariance of this rank, as they are sent."""
    assert plan.exchange is not None
    x = _as_read(x, plan)
    sent = x.new_empty(1 + plan.exchange.sums, dtype=torch.float32)
    stream, given = given_to(x.device, x, plan.workspace(x, "moments"), sent)
    _run_moments(plan, stream, sent, *given)
    return sent


def _run_moments(plan: Plan, stream, sent: Tensor, source, partials, target) -> None:
    if plan.layout.samples == 0:
        sent.zero_()
        return
    plan.run(stream, *moment_calls(source, partials, target))


def moment_calls(source, partials, target) -> tuple[tuple, tuple]:
    """The launches before the collective of a forward pass, and their arguments, addresses or tensors."""
    absent = 0 if isinstance(source, int) else None
    first = (source, source, absent, absent, absent, absent, partials)
    second = (partials, target, absent, absent, absent, absent, absent, absent)
    return ("moments", "reduce"), (first, second)


def forward(
    x, weight, bias, residual, group_size, num_iters, eps, running, exact, relu, ranks: int,
    gather: Callable[[Tensor, Tensor], object] | None, gathered: Any = None, zeroed=False,
) -> tuple[Tensor, Tensor, Plan]:  # fmt: skip
    """`run.forward` over so many ranks.

    `gather` fills its first argument with the moments of all ranks, given this rank's. Without it they are `gathered`.
    """
    added = residual is not None
    plan = plan_for(x, weight, bias, group_size, num_iters, running, exact, relu, residual=added, ranks=ranks)
    assert plan.exchange is not None
    given_x, x = x, _as_read(x, plan)
    residual = in_strides(residual, x)
    running_mean, running_matrix, num_batches, momentum, _ = running or NOT_RUNNING
    state = (x.new_zeros if zeroed and not plan.at.even else x.new_empty)(plan.at.size, dtype=torch.float32)
    y = torch.empty_like(x)
    # The partial sums leave their room to the iteration.
    workspace = None if gather is None and plan.iteration is None else plan.workspace(x, "moments")
    place = None if plan.iteration is None else meeting_place(x)
    sent: Any = None
    if gather is not None:
        sent = x.new_empty(1 + plan.exchange.sums, dtype=torch.float32)
        gathered = x.new_empty(ranks * (1 + plan.exchange.sums), dtype=torch.float32)
    learned = (weight, bias, running_mean, running_matrix)
    counter = num_batches if plan.counts else None
    tensors = (x, y, state, *learned, residual, workspace, counter, place, sent, gathered)
    stream, given = given_to(x.device, *tensors)
    if gather is not None:
        source, *_, work, _, _, own, _ = given
        _run_moments(plan, stream, sent, source, work, own)
        gather(gathered, sent)
    names, arguments = forward_calls(plan, given, eps, momentum)
    if plan.iteration is not None and x.numel() == 0:
        # Nothing to apply the matrix to. In smaller groups it is computed where it is applied.
        end = names.index("operands") if "operands" in names else -1
        names, arguments = names[:end], arguments[:end]
    plan.run(stream, names, arguments)
    return _as_given(y, given_x, x), state, plan


def forward_calls(plan: Plan, given, eps: float, momentum: float | None) -> tuple[tuple, tuple]:
    """The launches after the collective of a forward pass, and their arguments.

    `given` are those of `run.forward_calls`, this rank's moments and those of all ranks.
    """
    source, target, saved, scale, shift, mean, matrix, summand, work, counter, place, _, received = given
    batch_mean, variance, batches, covariance, whitening, iterates = parts_of(saved, plan)
    names, arguments = whitening_calls(
        plan,
        (source, target, summand),
        (covariance, batch_mean, variance, whitening, iterates),
        (scale, shift, mean, matrix, counter, batches if plan.counts else counter),
        (work, place),
        eps,
        momentum,
    )
    merged = (received, covariance, batch_mean, variance, counter, batches)
    return ("merge", *names), (merged, *arguments)


def backward(
    grad, x, weight, state, plan: Plan, eps, output,
    reduce: Callable[[Tensor], object] | None, total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """What `run.backward` returns, those of weight and bias this rank's own part, and the sums that are exchanged.

    `reduce` sums over the ranks, in place. Without it there is no gradient of x. With `total`, the sums over all ranks,
    there is no other gradient.
    """
    exchange, given_x = plan.exchange, x
    assert exchange is not None
    x = _as_read(x, plan)
    grad, output = in_strides(grad, x), in_strides(output, x)
    dx = None if reduce is None and total is None else torch.empty_like(x)
    sums, grad_weight, grad_bias, passed = total, None, None, None
    if sums is None:
        make = x.new_empty if x.numel() else x.new_zeros
        sums, grad_bias = make(exchange.sums, dtype=torch.float32), make(x.shape[1], dtype=torch.float32)
        grad_weight = None if weight is None else make(x.shape[1], dtype=torch.float32)
        passed = torch.empty_like(x) if plan.keeps_gradient else None
    if x.numel() == 0:
        if reduce is not None:
            reduce(sums)
        return dx, grad_weight, grad_bias, passed, sums
    workspace = plan.workspace(x, "cross_moments")
    place = None if plan.iteration is None else meeting_place(x)
    gradients = (grad_weight, grad_bias, passed)
    tensors = (x, grad, output, state, dx, weight, *gradients, workspace, place, None, sums)
    stream, given = given_to(x.device, *tensors)
    if total is None:
        plan.run(stream, *cross_calls(plan, given))
    if reduce is not None:
        reduce(sums)
    if dx is not None:
        plan.run(stream, *backward_calls(plan, given, eps))
        dx = _as_given(dx, given_x, x)
    return dx, grad_weight, grad_bias, None if passed is None else _as_given(passed, given_x, x), sums


def cross_calls(plan: Plan, given) -> tuple[tuple, tuple]:
    """The launches before the collective of a backward pass, and their arguments.

    `given` are those of `run.backward_calls` and the sums that are exchanged.
    """
    source, gradient, positive, saved, _, _, scale_gradient, own_sum, kept, work, _, _, sent = given
    absent = 0 if isinstance(source, int) else None
    mean, _, _, _, whitening, _ = parts_of(saved, plan)
    room = behind(work, plan.layout.matrix_size)
    weighted = plan.key.weight is not None
    by_row = (whitening, scale_gradient) if weighted and not plan.layout.wide else (absent, absent)
    names = ("cross_moments", "cross_reduce")
    first = (gradient, source, positive, absent, kept, mean, room)
    arguments = (first, (room, sent, own_sum, absent, absent, absent, *by_row))
    if weighted and plan.layout.wide:
        names, arguments = (*names, "sent_weight_gradient"), (*arguments, (sent, whitening, scale_gradient))
    return names, arguments


def backward_calls(plan: Plan, given, eps: float) -> tuple[tuple, tuple]:
    """The launches after the collective of a backward pass, and their arguments: `given` are those of `cross_calls`."""
    assert plan.exchange is not None
    source, gradient, positive, saved, target, scale, _, _, kept, work, place, _, sent = given
    absent = 0 if isinstance(source, int) else None
    # After the matrix for the kernels, and at the end of the workspace.
    end, vectors = plan.work_size("cross_moments"), plan.exchange.vectors
    room = behind(work, plan.layout.matrix_size)
    grad_sum, unwanted = behind(work, end - vectors), behind(work, end - vectors // 2)
    mean, _, batches, covariance, whitening, iterates = parts_of(saved, plan)
    # An operator that begins here is given what passed the activation as the gradient.
    passed = kept != 0 if isinstance(kept, int) else kept is not None
    names, arguments = gradient_calls(
        plan,
        (kept, source, absent, target) if passed else (gradient, source, positive, target),
        (work, covariance, mean, whitening, iterates, grad_sum),
        (scale, scale if plan.key.weight is None else unwanted),
        (room, place),
        eps,
        True,
    )
    return ("unpack", *names), ((sent, batches, work, grad_sum), *arguments)


def plan_of_state(state: Tensor, x, weight, group_size, num_iters, exact: bool, relu: bool, residual: bool, ranks: int):
    """The plan for the backward of a forward that is known by the state it left."""
    split = split_of(state, x, group_size, num_iters, exact, ranks)
    return plan_for(x, weight, None, group_size, num_iters, None, exact, relu, split, residual, ranks=ranks)


def _as_read(x: Tensor, plan: Plan) -> Tensor:
    """`x` as the kernels read it, itself or a copy."""
    return x if x.stride() == plan.stride else placed(x, plan.key.group_size)


def _as_given(result: Tensor, x: Tensor, source: Tensor) -> Tensor:
    """A result that lies in memory as `source` does, what was read in place of `x`, as `x` does if that is dense."""
    return result.contiguous() if source is not x and x.is_contiguous() else result
