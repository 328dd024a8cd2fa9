"""Our own GPU code in this process: what a kernel that fails leaves behind."""

import pickle
import subprocess
from types import SimpleNamespace

import pytest

from trapline.arena.challenge import load
from trapline.arena.errors import SubmissionRaised
from trapline.arena.gpu.contract import Entry, Output
from trapline.arena.gpu.local import LocalGpuSubmission
from trapline.arena.gpu.memory import MemoryFault
from trapline.arena.gpu.rig import Rig
from trapline.arena.judge import mutants
from trapline.arena.judge.mutants import MutantHost, Run
from trapline.arena.process.isolation.spec import SandboxLimits
from trapline.arena.process.session import SandboxConfig
from trapline.arena.process.transcript import Transcript

FAULT = "cuCtxSynchronize: an illegal memory access was encountered"
ENTRIES = {"double": Entry(lambda x: (Output((1,), "float32"),))}


@pytest.fixture
def rig(monkeypatch):
    # Our own code sets this for its process; the tests after these must not see it.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with Rig("cpu", local=True) as made:
        yield made


def _break(rig, monkeypatch):
    def drain():
        raise MemoryFault(FAULT)

    monkeypatch.setattr(rig.judge.buffers._memory, "drain", drain)


def test_a_broken_context_is_reported_as_the_runner_of_a_submission_reports_it(
    rig, tmp_path, monkeypatch
):
    (tmp_path / "solution.py").write_text("def double(x, y):\n    raise ValueError('later')\n")
    config = SandboxConfig("process", SandboxLimits(), 30.0, ("torch",), device="cpu")
    answer = LocalGpuSubmission(tmp_path, config, ENTRIES, rig)
    with pytest.raises(SubmissionRaised, match="raised ValueError: later"):
        answer.double(1)
    _break(rig, monkeypatch)
    expected = rf"raised CudaContextError: {FAULT} \(then ValueError: later\)"
    with pytest.raises(SubmissionRaised, match=expected):
        answer.double(1)


def test_a_mutant_host_with_a_broken_context_says_so(rig, monkeypatch, tmp_path):
    server = mutants._Server(str(tmp_path))
    assert not server.is_broken()
    server.rig = rig
    assert not server.is_broken()
    _break(rig, monkeypatch)
    assert server.is_broken()


@pytest.mark.parametrize("last", [False, True])
def test_a_mutant_host_ends_after_its_last_answer(monkeypatch, last):
    run = Run(True, "raised CudaContextError", Transcript(), last)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(mutants, "_read", lambda _: pickle.dumps(mutants._packed(run)))
    with MutantHost(load("kv_cache", "gpu"), 1) as host:
        host._running = SimpleNamespace(process=process, owes=False, end=process.kill)
        found = host.run("gold", "ordinary")
        assert (found.message, found.transcript.exchanges) == (run.message, [])
        assert (host._running is None) is last
