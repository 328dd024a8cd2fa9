"""Fixtures of the ternary tests."""

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Two test processes share the machine."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
