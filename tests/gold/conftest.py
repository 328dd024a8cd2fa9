"""What the tests of every component may use."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_script():
    """Runs a script with a folder as its argument; it must succeed.

    A process of its own: whether Triton interprets is decided when it is imported.
    """

    def run(script: Path, folder: Path, **environment: str) -> None:
        ours = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
        command = [sys.executable, str(script), str(folder)]
        done = subprocess.run(command, env=ours, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture
def entered(monkeypatch):
    """The tensors whose devices are current, the innermost last; no GPU is needed."""
    import torch

    tensors = []

    @contextmanager
    def device_of(tensor):
        tensors.append(tensor)
        yield
        tensors.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return tensors
