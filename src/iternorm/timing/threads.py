"""The number of CPU threads that torch uses, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this many CPU threads inside the block; None leaves it as it is."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
