"""Fixtures of the training loop's tests."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Networks as small as these are slower on several threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
