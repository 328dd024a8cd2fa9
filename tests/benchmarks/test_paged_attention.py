"""The paged benchmark's problems and bookkeeping, on tiny problems and a CPU."""

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("harness", "paged_problems", "bench_paged_attention")


@pytest.fixture
def bench(monkeypatch):
    """Scripts find each other by their folder; nothing of them stays behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("bench_paged_attention")
    for script in (module, sys.modules["paged_problems"]):
        monkeypatch.setattr(script, "DEVICE", "cpu")
    yield module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_the_issues_shapes_are_there_and_the_goal_comes_first(bench):
    names = list(bench.cases(bench.Rules(), quick=False))
    assert names[0] == "goal B32 H32 G8 D128 L4096 page 16 bf16"
    assert sum(name.startswith("anchor") for name in names) == 5
    assert any(name.startswith("kinds") for name in names)


def test_bytes_are_what_must_be_read(bench):
    assert bench.GOAL.bytes == 32 * 4096 * 8 * 2 * 128 * 2
    four_bits = bench.replace(bench.LONG, kind="int4")
    assert four_bits.bytes == 32 * 8192 * 8 * 2 * (64 + 2)
    assert bench.CASCADE.bytes == (4096 + 32 * 256) * 8 * 2 * 128 * 2


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8", "int4"])
def test_a_small_case_is_right(bench, kind):
    case = bench.Case(2, 4, 2, 16, 40, kind=kind, shared=16)
    cache = bench.drawn(case, 0)
    assert torch.equal(cache.table[0, :1], cache.table[1, :1])
    assert len(cache.table.unique()) == 1 + 2 * 2
    assert bench.wrong(case, with_peers=False)["ours"]["relative"] < 0.01


def test_gathered_pages_are_the_same_attention(bench):
    case = bench.Case(2, 4, 2, 16, 40)
    ours, theirs = bench.ours(case).make(0)(), bench.gathered(case, compiled=False).make(0)()
    assert torch.allclose(ours.float(), theirs.reshape(ours.shape).float(), atol=0.02)


def test_a_node_of_a_tree_sees_its_ancestors(bench):
    sees = bench.binary_tree(6, "cpu")
    assert [row.nonzero().flatten().tolist() for row in sees] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]
    ]  # fmt: skip


def test_several_queries_a_sequence(bench):
    cache = bench.with_queries(bench.Case(2, 4, 2, 16, 40), 0, 3)
    exact = bench.in_float64(cache).attend(max_q=3, impl="torch")
    assert bench.errors(cache.attend(max_q=3), exact)["relative"] < 0.01
