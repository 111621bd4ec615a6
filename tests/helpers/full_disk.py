"""A disk that fills up."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system refuses, in the words of another error than a full disk's."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
