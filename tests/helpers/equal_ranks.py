"""A process group that is a class of Python's, as some users have: all ranks have what this one has."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]

_BACKEND = "equal"
_Group: Any = dist.ProcessGroup


class EqualRanks(_Group):
    """`asked` are the names of its collectives, in the order of the calls."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.asked: list[str] = []

    def allreduce(self, tensors, _options=None):
        self.asked.append("sum")
        for tensor in tensors:
            tensor.mul_(self.size())
        return _done(tensors)

    # DistributedDataParallel sends its parameters to the others, and compares their shapes.
    def broadcast(self, tensors, _options=None):
        return _done(tensors)

    def allgather(self, outputs, given, _options=None):
        for gathered, tensor in zip(outputs, given, strict=True):
            for output in gathered:
                output.copy_(tensor)
        return _done(outputs)

    def _allgather_base(self, output, given, _options=None):
        self.asked.append("gather")
        output.view(self.size(), -1).copy_(given.view(1, -1))
        return _done()

    # The name since torch 2.13.
    all_gather_single = _allgather_base

    # Of functional collectives.
    def allgather_into_tensor_coalesced(self, outputs, given, options=None):
        for pair in zip(outputs, given, strict=True):
            self._allgather_base(*pair, options)
        return _done()

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self):
        # torch does not tell it to a group of this kind.
        return dist.distributed_c10d._world.pg_names[self]


def _done(result=None):
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def init_equal_ranks(size: int) -> EqualRanks:
    """Makes it the default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(
            _BACKEND, lambda _store, rank, size, _timeout: EqualRanks(rank, size), devices=["cpu", "cuda"]
        )
    dist.init_process_group(_BACKEND, store=FakeStore(), rank=0, world_size=size)
    group = dist.group.WORLD
    assert isinstance(group, EqualRanks)
    return group
