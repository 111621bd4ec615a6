"""Fixtures that all tests share, and one of their own for every test: the same random numbers in any order."""

import importlib.util
import os
from pathlib import Path
from typing import Any

# Inductor's pool of compiler processes outlives the tests and keeps their output open.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The C kernels that the tests compile do not go to the user's own.
os.environ.setdefault("ITERNORM_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "iternorm"))

import pytest
import torch

# Without a GPU the Triton kernels are tested in Triton's interpreter. It must be chosen before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        import interpreter

        interpreter.patch_once()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fill memory that torch leaves uninitialized with NaN, so that an element nobody wrote shows."""
    # The module gives itself another class for this setting, which no type checker sees.
    switch: Any = torch.utils.deterministic
    previous = torch.are_deterministic_algorithms_enabled(), switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switch.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(previous[0])
    switch.fill_uninitialized_memory = previous[1]


@pytest.fixture
def precision():
    """Sets the precision of matrix products of fp32; what it was before comes back."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)
