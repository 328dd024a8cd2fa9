"""Answers that cannot be used: `fail` with the reason, whatever is wrong with them."""

import shutil
from types import SimpleNamespace

import pytest

from trapline.arena.certify import red_team
from trapline.arena.errors import UsageError
from trapline.arena.gpu import opening
from trapline.arena.gpu.opening import STAND_IN, shared_rig
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.runs import run

RIGHT = "def scaled(x, by, y):\n    y.copy_(x * by[:, None])\n"
ENTRY = '#include "trapline.h"\nextern "C" void scaled(const trapline_tensor* x, '
#: What is wrong → the file, its text, and words of the reason.
BAD = {
    "no entry point": ("solution.py", "def scale(x, by, y):\n    pass\n", "missing entry points"),
    "wrong signature": ("solution.py", "def scaled(x, y):\n    pass\n", "positional arguments"),
    "writes nothing": ("solution.py", "def scaled(x, by, y):\n    pass\n", "did not write"),
    "returns instead of writing": (
        "solution.py",
        "def scaled(x, by, y):\n    return x * by[:, None]\n",
        "returned a Tensor instead",
    ),
    "missing package": ("solution.py", "import jax\n\n" + RIGHT, "No module named 'jax'"),
    "no Python": ("solution.py", "def scaled(x, by, y:\n", "SyntaxError"),
    "does not compile": ("solution.cu", ENTRY + "int y) { y = ; }", "expected an expression"),
    "does not link": (
        "solution.cu",
        'extern "C" void away();\nextern "C" void scale() { away(); }\n',
        "undefined symbol: away",
    ),
    "C++ names": ("solution.cu", "void scaled() {}\n", "missing entry points: scaled"),
}


@pytest.fixture(scope="module")
def scaling():
    yield red_team.load_challenge(red_team.find_corpus("gpu"), "gpu")
    if shared_rig.cache_info().currsize:
        shared_rig("cpu").close()
        shared_rig.cache_clear()


@pytest.fixture
def cell_of(scaling, level, tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "1")

    def make(name, text):
        (tmp_path / name).write_text(text)
        asked = GradeRequest("one", "scaling", 1, tmp_path, level=level, seed=3, track="gpu")
        return grade(asked, scaling).cell

    return make


@pytest.mark.full
@pytest.mark.parametrize("what", BAD)
def test_unusable_answer_fails_with_the_reason(cell_of, what):
    name, text, reason = BAD[what]
    if name.endswith(".cu") and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    cell = cell_of(name, text)
    assert cell.state == "fail"
    assert cell.letter == "F"
    assert reason in cell.reason


def test_without_nvcc_a_cuda_answer_is_not_run(cell_of, monkeypatch):
    monkeypatch.setattr(opening, "find_nvcc", lambda: None)
    cell = cell_of("solution.cu", "int x;\n")
    assert (cell.state, cell.score) == ("not_run", None)
    assert cell.reason == "solution.cu needs nvcc, which is not installed on this machine"


def test_without_a_gpu_a_cell_is_not_run(scaling, level, tmp_path, monkeypatch):
    monkeypatch.delenv(STAND_IN, raising=False)
    monkeypatch.setattr(opening, "why_no_gpu", lambda: "the CUDA driver finds no GPU")
    (tmp_path / "solution.py").write_text(RIGHT)
    asked = GradeRequest("one", "scaling", 1, tmp_path, level=level, track="gpu")
    cell = grade(asked, scaling).cell
    assert (cell.state, cell.score) == ("not_run", None)
    assert cell.reason == "there is no GPU here: the CUDA driver finds no GPU"


def test_a_run_of_another_gpu_is_refused(monkeypatch):
    here = {"gpu": "this one", "torch": "2"}
    monkeypatch.setattr(run, "machine_facts", lambda: here)
    store = SimpleNamespace(where="run", cells=lambda: [graded])
    graded = SimpleNamespace(track="gpu", score=90.0, versions={**here, "gpu": "another"})
    with pytest.raises(UsageError, match=r"graded on .*another.* this machine has .*this one"):
        run.refuse_other_machines(store, "gpu")
