"""The GPU example field: what can be checked without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trapline
from trapline.arena import challenge as challenges

HERE = Path(__file__).parent
FIELD = HERE.parents[2] / "examples" / "field-gpu"
HEADERS = Path(trapline.__file__).parent / "arena" / "gpu"
ROW = re.compile(
    r"^\| `([\w-]+)` \| `(\w+)` \| (CUDA C\+\+|Triton|torch) \| .+ \| (?:`([\w-]+)`)? ?\|$"
)
#: (entrant, challenge) → (language, the trap that its bug springs, or "").
CELLS = {
    (found[1], found[2]): (found[3], found[4] or "")
    for line in (FIELD / "README.md").read_text().splitlines()
    if (found := ROW.match(line))
}


def cells(*, python):
    return [
        pytest.param(entrant, name, trap, id=f"{entrant} {name}")
        for (entrant, name), (language, trap) in CELLS.items()
        if (language != "CUDA C++") == python
    ]


def test_page_lists_every_answer_and_its_trap():
    there = {(path.parent.parent.name, path.parent.name) for path in FIELD.glob("*/*/solution.*")}
    assert set(CELLS) == there
    for (_, name), (_, trap) in CELLS.items():
        assert trap in {"", *(one.id for one in challenges.load(name, "gpu").traps)}


@pytest.mark.full
@pytest.mark.parametrize(("entrant", "name", "trap"), cells(python=True))
def test_python_answer_fails_its_own_trap(tmp_path, entrant, name, trap):
    wanted = {"field": str(FIELD / entrant / name), "challenge": name}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    command = [sys.executable, "-W", "ignore", str(HERE / "run_here.py"), str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    failed = json.loads((tmp_path / "found.json").read_text())
    assert (trap in failed) if trap else failed == []


@pytest.mark.full
@pytest.mark.parametrize(("entrant", "name", "trap"), cells(python=False))
def test_cuda_answer_compiles(tmp_path, entrant, name, trap):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    command = ["nvcc", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", "-I", str(HEADERS)]
    command += ["-o", str(tmp_path / "a.so"), str(FIELD / entrant / name / "solution.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
