"""Tests of steps from C++ without a GPU."""

from importlib.util import find_spec

import pytest
import torch

# With a GPU the kernels are compiled: gpu/test_eager.py.
collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() or find_spec("triton") is None else []


@pytest.fixture
def driver(monkeypatch):
    """CUDA's driver, played by Triton's interpreter."""
    from driver import Driver

    return Driver(monkeypatch)
