"""The published prompt for a CUDA kernel: its control passes, its traps kill, worthless fail."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.gpu import controls
from trapline.arena.gpu.contract import POISON, entries
from trapline.arena.gpu.local import LocalGpuSubmission
from trapline.arena.gpu.rig import Rig
from trapline.arena.judge.checks import run_check

JUDGE = load("fused_softmax_topk", "gpu", "published")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with Rig("cpu", local=True) as rig:

        def make(files):
            folder = tmp_path_factory.mktemp("answer")
            for name, text in files.items():
                (folder / name).write_text(text)
            config = JUDGE.sandbox_config("process", 60.0)
            return LocalGpuSubmission(folder, config, entries(JUDGE.module("cases")), rig)

        yield make


def failed(submission, checks):
    return [check.id for check in checks if run_check(check, submission, 3).state == "fail"]


def test_control_passes_everything(opened):
    assert failed(opened(JUDGE.solution_files()), [*JUDGE.cases, *JUDGE.traps]) == []


@pytest.mark.parametrize("trap", JUDGE.traps, ids=lambda trap: trap.id)
def test_each_trap_kills_its_mutant(opened, trap):
    answer = opened(trap.plant(JUDGE.solution_files()))
    assert failed(answer, [trap]) == [trap.id]


@pytest.mark.parametrize("name", ["zeros", "copy-of-input", "random-numbers", "previous-answer"])
def test_worthless_answers_fail(opened, name):
    files = controls.make(name, JUDGE.solution_files(), ["softmax_topk"], POISON)
    assert failed(opened(files), JUDGE.cases)


def test_winners_may_come_in_any_order(opened):
    files = JUDGE.solution_files()
    text = files["solution.py"].replace(
        "    values, places = torch.topk(logits, k)\n",
        "    values, places = torch.topk(logits, k)\n"
        "    values, places = values.flip(-1), places.flip(-1)\n",
    )
    assert text != files["solution.py"]
    assert failed(opened({"solution.py": text}), [*JUDGE.cases, *JUDGE.traps]) == []
