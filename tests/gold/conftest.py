"""What the tests of every component may use."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVER = [sys.executable, str(Path(__file__).parent / "script_server.py")]


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory) -> str:
    """The folder of compiled kernels, kept between runs.

    Triton finds one by its source, options, target and release: what changed is compiled again.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trapline" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        return str(tmp_path_factory.mktemp("kernels"))
    return str(folder)


@pytest.fixture(scope="session")
def run_script(kernel_cache):
    """Runs a script with a folder as its argument; it must succeed.

    In a process of its own, the child of one with torch and Triton: whether Triton interprets is
    decided when it is imported.
    """
    servers = {}

    def run(script: Path, folder: Path, TRITON_INTERPRET: str, **environment: str) -> None:
        server = servers.get(TRITON_INTERPRET)
        if server is None:
            ours = {**os.environ, "TRITON_INTERPRET": TRITON_INTERPRET}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            server = subprocess.Popen(SERVER, env=ours, text=True, bufsize=1, **pipes)
            servers[TRITON_INTERPRET] = server
        environment = {"TRITON_CACHE_DIR": kernel_cache, **environment}
        server.stdin.write(json.dumps([str(script), str(folder), environment]) + "\n")
        status = server.stdout.readline()
        assert status == "0\n", f"{status}: {(folder / 'said.txt').read_text()[-4000:]}"

    yield run
    for server in servers.values():
        server.stdin.close()
        server.wait(60)


@pytest.fixture(scope="module")
def interpreted(request, tmp_path_factory, run_script):
    """The folder with the answers of `interpret_kernels.py` to a module's PROBLEMS and PACKINGS."""
    folder = tmp_path_factory.mktemp("interpreted")
    for name in ("PROBLEMS", "PACKINGS"):
        given = getattr(request.module, name, None)
        (folder / f"{name.lower()}.json").write_text(json.dumps(given))
    script = request.path.parent / "interpret_kernels.py"
    run_script(script, folder, TRITON_INTERPRET="1")
    return folder


@pytest.fixture
def compiled(run_script, tmp_path):
    """Compiles kernels for sm_90: what a script found of each; all fit into shared memory."""

    def compile_by(script: Path, wanted: object = None, **environment: str) -> list:
        (tmp_path / "wanted.json").write_text(json.dumps(wanted))
        run_script(script, tmp_path, TRITON_INTERPRET="0", **environment)
        found = json.loads((tmp_path / "compiled.json").read_text())
        assert all(entry["shared"] <= 232448 for entry in found), found
        return found

    return compile_by


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
