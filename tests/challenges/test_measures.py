"""The figures that challenges name for comparisons."""

import math
import shutil

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import Violation
from trapline.arena.judge.checks import generator
from trapline.arena.process.local import LocalSubmission
from trapline.arena.standings.criteria import BY_NAME

SLOW = pytest.mark.full
NAMED = {
    "kv_cache": {"cache bytes per token"},
    "beam_search": {"calls of the model"},
    "dflash": {"calls of the model", "accepted length"},
    "ternary_training": {"perplexity"},
}


def measured(challenge, folder, seed=1):
    with LocalSubmission(folder, challenge.sandbox_config("process")) as submission:
        return challenge.module("cases").measures(submission, generator(seed, "measures"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW) if n == "ternary_training" else n for n in NAMED]
)
def test_gold_solution_has_every_figure(name):
    challenge = load(name)
    found = measured(challenge, challenge.solution)
    assert found.keys() == NAMED[name]
    assert all(math.isfinite(value) and value > 0 for value in found.values())


def test_every_figure_is_a_criterion():
    having = {n for n, one in load_all().items() if hasattr(one.module("cases"), "measures")}
    assert having == set(NAMED)
    for name in set().union(*NAMED.values()):
        assert not BY_NAME[name].summable


def test_figures_are_those_of_the_contract():
    """4 bits of 64 elements, twice, and at least a scale for each; the contract's bound above."""
    found = measured(load("kv_cache"), load("kv_cache").solution)
    assert 2 * 32 < found["cache bytes per token"] <= 2 * (32 + 8) + 64 / 16 + 4096 / 128
    found = measured(load("dflash"), load("dflash").solution)
    assert 1.0 <= found["accepted length"] <= 5.0
    assert round(found["accepted length"] * found["calls of the model"]) == 48


def test_bytes_that_cannot_be_are_no_figure(tmp_path):
    challenge = load("kv_cache")
    shutil.copytree(challenge.solution, tmp_path / "lies")
    path = tmp_path / "lies" / "solution.py"
    path.write_text(
        path.read_text() + "\n\n_make = make_cache\n\n\ndef make_cache(*args, **kwargs):\n"
        "    cache = _make(*args, **kwargs)\n    type(cache).nbytes = lambda self: 100\n"
        "    return cache\n"
    )
    with pytest.raises(Violation, match=r"nbytes\(\) is 100, and the rows take 8192"):
        measured(challenge, tmp_path / "lies")
