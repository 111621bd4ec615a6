"""Moments over several processes: one collective between the verbs `moments` and `inverse_sqrt`, one in the backward.

Functional collectives are used, which `torch.compile` keeps in its graph; eager calls of the Triton kernels use plain
ones, which take less host time. There is no autograd here: `iternorm.whitening.autograd` and `synchronized` call these
inside their own forward and backward.

A rank sends one fp32 vector (fp64 for fp64 input), whichever backend computed it: forward its count of samples, its
mean ``[C]`` and its covariance ``[G, d, d]``, backward Σ dy ``[C]`` and Σ dy (x - mean)ᵀ ``[G, d, d]``.
"""

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from iternorm.whitening import modes

# torch 2.13 has a new name for it.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Group(NamedTuple):
    """A process group as a graph can hold it: by name."""

    name: str
    size: int
    # This rank's number if the group is of gloo, which has no all-gather that is safe on a GPU: see `_gathered`.
    rank_in_gloo: int | None = None


def merge_moments(counts: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased covariance of a whole, given those of its R pieces.

    The mean is summed as differences from the largest piece's mean, and the covariance takes the outer products of
    what is left of them: nothing of the size of the mean is squared. A piece of count 0 has no weight.

    Args:
        counts: ``[R]``, in the dtype of the moments.
        means: ``[R, C]``.
        covariances: ``[R, G, d, d]``, padded (see `iternorm.whitening.groups`).
    """
    num_samples = counts.sum()
    # All pieces empty: weights of zero, no division by it.
    share = counts / num_samples.clamp(min=1)
    pilot = means.index_select(0, counts.argmax(0, keepdim=True)).squeeze(0)
    mean = pilot + share @ (means - pilot)
    num_groups, size = covariances.shape[1], covariances.shape[2]
    spread = torch.nn.functional.pad(means - mean, (0, num_groups * size - means.shape[1]))
    spread = spread.view(-1, num_groups, size)
    between = torch.einsum("rgi,rgj->gij", spread * share[:, None, None], spread)
    within = (share @ covariances.flatten(1)).view(num_groups, size, size)
    return num_samples, mean, within + between


def global_moments(num_samples: int, mean: Tensor, covariance: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """The count, mean and covariance of all ranks' samples together, alike on every rank, by one all-gather.

    Gathered and merged, rather than one all-reduce of sums: sums keep their accuracy only about a pilot near the mean
    that all ranks share. The running mean is none in the first steps, and agreeing on another is a second collective.
    With a mean of 1000 deviations in fp32, sums about zero give a covariance off by more than the variance itself,
    merged moments by 2e-6 of it (tests/layers/test_sync.py). An empty rank joins with a count of 0.
    """
    count = torch.full((1,), num_samples, dtype=mean.dtype, device=mean.device)
    packed = torch.cat([count, mean, covariance.flatten()])
    gathered = gather_moments(packed, group)
    counts, means, covariances = gathered.view(group.size, -1).split([1, mean.numel(), covariance.numel()], 1)
    return merge_moments(counts.squeeze(1), means, covariances.view(group.size, *covariance.shape))


def gather_moments(packed: Tensor, group: Group) -> Tensor:
    """What all ranks send, the count first, one after the other."""
    gathered = _gathered(packed, group)
    if not torch.compiler.is_compiling():
        _check_counts(gathered, group)
    return gathered


def gather_moments_eagerly(gathered: Tensor, packed: Tensor, group: Group) -> None:
    """`gather_moments` where nothing records the call."""
    if gathers_by_sum(packed, group):
        gathered.copy_(_gathered(packed, group))
    else:
        getattr(dist, _ALL_GATHER)(gathered, packed, group=_found(group))
    _check_counts(gathered, group)


def _check_counts(gathered: Tensor, group: Group) -> None:
    # Every rank sees the same counts and raises alike. Elsewhere than on the CPU a look would wait for the device.
    if gathered.device.type != "cpu":
        return
    total = float(gathered.view(group.size, -1)[:, 0].sum())
    if total <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {total:.0f} over all ranks; "
            "use a larger batch, or eval mode"
        )


def global_sums(first: Tensor, second: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Both tensors summed over the ranks, by one all-reduce."""
    total = sum_over_ranks(torch.cat([first.flatten(), second.flatten()]), group)
    return total[: first.numel()].view_as(first), total[first.numel() :].view_as(second)


def sum_over_ranks(packed: Tensor, group: Group) -> Tensor:
    """The sum of what all ranks send."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(packed, "sum", group.name))


def sum_over_ranks_eagerly(packed: Tensor, group: Group) -> None:
    """`sum_over_ranks` where nothing records the call: in place."""
    dist.all_reduce(packed, group=_found(group))


def _found(group: Group) -> dist.ProcessGroup:
    if _last is not None and _last[1] == group and (known := _last[0]()) is not None:
        return known
    return dist.distributed_c10d._resolve_process_group(group.name)  # pyright: ignore


def gather_integers(values: tuple[int, ...], group: Group, device: torch.device) -> list[list[int]]:
    """The integers of every rank, in the order of ranks. Under `torch.compile`, run while the graph is made."""
    return _gather_integers(values, *group, device.type)


@modes.constant_in_graphs
def _gather_integers(
    values: tuple[int, ...], name: str, size: int, rank_in_gloo: int | None, device: str
) -> list[list[int]]:
    return _gathered(torch.tensor([values], device=device), Group(name, size, rank_in_gloo)).tolist()


def _gathered(values: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks, one after the other."""
    functional = torch.ops._c10d_functional
    if not gathers_by_sum(values, group):
        return functional.wait_tensor(functional.all_gather_into_tensor(values, group.size, group.name))
    parts = [values if rank == group.rank_in_gloo else torch.zeros_like(values) for rank in range(group.size)]
    return sum_over_ranks(torch.cat(parts), group)


def gathers_by_sum(values: Tensor, group: Group) -> bool:
    """Whether a sum stands for the all-gather: gloo's crashes the process on a GPU (PyTorch's issue 152645)."""
    return group.rank_in_gloo is not None and values.device.type != "cpu"


def active_group(process_group: dist.ProcessGroup | None) -> Group | None:
    """The group to synchronize over: None outside a process group and in one of a single process."""
    global _last
    initialized = dist.is_available() and dist.is_initialized()
    group = (dist.group.WORLD if process_group is None else process_group) if initialized else None
    if torch.compiler.is_compiling():
        # It would guard what a global holds.
        return None if group is None else _described(group)
    if group is None:
        return None
    # Name and size take ten times as long to ask for.
    if _last is None or _last[0]() is not group:
        described = _described(group)
        if described is None:
            return None
        _last = weakref.ref(group), described
    return _last[1]


# The group that was asked for last, and what it is called. A group that is kept alive until the interpreter ends may
# crash it.
_last: tuple[weakref.ref[dist.ProcessGroup], Group] | None = None


def _described(group: dist.ProcessGroup) -> Group | None:
    size = dist.get_world_size(group)
    return Group(group.group_name, size, _rank_in_gloo(group.group_name)) if size > 1 else None


@modes.constant_in_graphs
def _rank_in_gloo(name: str) -> int | None:
    group = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    return dist.get_rank(group) if dist.get_backend(group) == dist.Backend.GLOO else None
