"""Moments over several processes: one collective between the verbs `moments` and `inverse_sqrt`, one in the backward.

Functional collectives are used, which `torch.compile` keeps in its graph. There is no autograd here:
`iternorm.whitening.autograd` calls these inside its own forward and backward.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from iternorm.whitening import modes


class Group(NamedTuple):
    """A process group as a graph can hold it: by name."""

    name: str
    size: int


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
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(packed, group.size, group.name))
    counts, means, covariances = gathered.view(group.size, -1).split([1, mean.numel(), covariance.numel()], 1)
    # Every rank sees the same counts and raises alike. Elsewhere than on the CPU a look would wait for the device.
    if counts.device.type == "cpu" and not torch.compiler.is_compiling() and float(counts.sum()) <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {float(counts.sum()):.0f} over all ranks; "
            "use a larger batch, or eval mode"
        )
    return merge_moments(counts.squeeze(1), means, covariances.view(group.size, *covariance.shape))


def global_sums(first: Tensor, second: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Both tensors summed over the ranks, by one all-reduce."""
    packed = torch.cat([first.flatten(), second.flatten()])
    functional = torch.ops._c10d_functional
    total = functional.wait_tensor(functional.all_reduce(packed, "sum", group.name))
    return total[: first.numel()].view_as(first), total[first.numel() :].view_as(second)


def gather_integers(values: tuple[int, ...], group: Group, device: torch.device) -> list[list[int]]:
    """The integers of every rank, in the order of ranks. Under `torch.compile`, run while the graph is made."""
    return _gather_integers(values, group.name, group.size, device.type)


@modes.constant_in_graphs
def _gather_integers(values: tuple[int, ...], name: str, size: int, device: str) -> list[list[int]]:
    own = torch.tensor(values, device=device)
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(own, size, name)).view(size, -1).tolist()


def active_group(process_group: dist.ProcessGroup | None) -> Group | None:
    """The group to synchronize over: None outside a process group and in one of a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    size = dist.get_world_size(group)
    return Group(group.group_name, size) if group is not None and size > 1 else None
