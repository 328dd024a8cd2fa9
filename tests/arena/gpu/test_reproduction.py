"""Failing calls of GPU answers as programs: inputs as they were placed, and no code in data."""

import os
import subprocess
import sys

import numpy as np
import pytest

from trapline.arena.errors import UsageError
from trapline.arena.gpu.checks import padded
from trapline.arena.gpu.contract import Entry, Output, bfloat16
from trapline.arena.gpu.reproduction import recorded, write_script
from trapline.arena.process.transcript import Exchange, Transcript

ENTRIES = {
    "shifted": Entry(lambda x, by, eps: (Output((x.shape[0],), "float32"),)),
    "stored": Entry(lambda x, pages, where: (), updated=(1,)),
}
ANSWER = """
def shifted(x, by, eps, y):
    assert y.view(dtype=__import__("torch").uint8).eq(0x7F).all()
    print(x.dtype, x.stride(), eps)
    y.copy_(x.float().sum(1) + by.float())

def stored(x, pages, where):
    pages[where] = x
"""
#: The same first entry point, in the part of CUDA C++ that any compiler takes.
CUDA = """
#include "trapline.h"
extern "C" void shifted(const trapline_tensor* x, const trapline_tensor* by, double eps,
                        const trapline_tensor* y, void*) {
    for (int64_t row = 0; row < x->shape[0]; row++) {
        float sum = ((float*)by->data)[row] + (float)eps + by->dtype;
        for (int64_t k = 0; k < x->shape[1]; k++)
            sum += ((float*)x->data)[row * x->stride[0] + k];
        ((float*)y->data)[row] = sum;
    }
}
"""
X = padded(np.arange(6, dtype=np.float32).reshape(2, 3), 2)
ROWS = np.array([10.0, 20.0], np.float32)


def calls_of(*exchanges):
    return recorded(Transcript([Exchange(entry, args, {}) for entry, *args in exchanges]), ENTRIES)


def output_of(folder, **environment):
    command = [sys.executable, "-B", "reproduce.py"]
    environment = os.environ | environment
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_run_again_without_the_grader(tmp_path):
    (tmp_path / "solution.py").write_text(ANSWER)
    pages = np.zeros((3, 2), np.int64)
    calls = calls_of(
        ["shifted", X, bfloat16(ROWS), 0.5], ["stored", np.array([7, 8]), pages, np.int64(1)]
    )
    write_script(tmp_path, "a cause:\nimport os", calls, "solution", cuda=False)
    lines = output_of(tmp_path).splitlines()
    assert lines[0] == "torch.float32 (5, 1) 0.5"
    assert lines[1].startswith("tensor([13., 32.]")
    assert "[7, 8]" in lines[3]


@pytest.mark.full
def test_calls_of_a_cuda_answer_run_again(tmp_path):
    (tmp_path / "solution.cu").write_text(CUDA)
    (tmp_path / "cuda_runtime.h").write_text("")
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        "#!/bin/sh\nexec g++ -shared -fPIC -I . -o solution.so -x c++ solution.cu\n"
    )
    compiler.chmod(0o755)
    write_script(tmp_path, "a", calls_of(["shifted", X, ROWS, 0.5]), "solution", cuda=True)
    text = output_of(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="")
    warning, answer = text.splitlines()
    assert warning.startswith("torch finds no GPU here")
    assert answer.startswith("tensor([13.5000, 32.5000]")


def test_script_says_what_was_expected(tmp_path):
    calls = calls_of(["shifted", X, ROWS, 0.5])
    script = write_script(tmp_path, "a", calls, "solution", cuda=False, message="got 1,\nnot 2")
    lines = script.read_text().splitlines()
    assert lines[1] == "# In the grade: got 1, not 2"
    assert "print('in the grade: got 1, not 2')" in lines


def test_inputs_that_came_late_come_late_again(tmp_path):
    transcript = Transcript([Exchange("shifted", (X, ROWS, 0.5), {}, late=True)])
    script = write_script(tmp_path, "a", recorded(transcript, ENTRIES), "solution", cuda=False)
    assert 'call_late("shifted", *inputs_0, *outputs_0)' in script.read_text()


def test_large_inputs_are_not_kept():
    assert calls_of(["shifted", np.zeros((400, 400), np.float32), ROWS, 0.5]) == []


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((), {"entry": "f(0); boom() #"}),
        ((), {"updated": ["0]; boom() #"]}),
        (("args", 0), {"dtype": "float32', boom(), '"}),
        (("args", 0), {"shape": ["2]; boom() #"]}),
        (("args", 2), {"float": "boom()"}),
        (("outputs", 0), {"dtype": "float32', boom(), '"}),
        (("outputs", 0), {"shape": ["boom()"]}),
    ],
)
def test_evidence_is_never_code(tmp_path, place, change):
    calls = calls_of(["shifted", X, ROWS, 0.5])
    node = calls[0]
    for key in place:
        node = node[key]
    node.update(change)
    with pytest.raises(UsageError):
        write_script(tmp_path, "a", calls, "solution", cuda=False)


def test_evidence_of_an_older_grade_is_refused(tmp_path):
    old = {"entry": "shifted", "on": None, "args": [], "kwargs": {}}
    with pytest.raises(UsageError, match="grade the answer again"):
        write_script(tmp_path, "a", [old], "solution", cuda=False)
