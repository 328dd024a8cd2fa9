"""Mechanical mutants and rewrites: the ones change behaviour, the others must not."""

import ast

import pytest

from trapline.arena.certify.certify import Certifier
from trapline.arena.certify.mechanical import mechanical_mutants
from trapline.arena.judge.rewrite import rewrites

SOURCE = '''
"""Prose."""
LIMIT = 3

def f(x, *, deep=False):
    """More prose."""
    total = 0
    for i in range(x):
        if i % 2 == 0 and not deep:
            continue
        total += i * 2
    return -total if x > LIMIT else total

class Box:
    def size(self):
        return 1
'''


def test_each_mutant_is_another_program():
    mutants = list(mechanical_mutants({"solution.py": SOURCE}))
    texts = {mutant.files["solution.py"] for mutant in mutants}
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    assert ast.unparse(ast.parse(SOURCE)) not in texts
    assert all(ast.parse(text) for text in texts)
    operators = {mutant.id.split("/")[1] for mutant in mutants}
    assert {
        "compare",
        "arithmetic",
        "bool",
        "constant",
        "never",
        "break",
        "drop-unary",
    } <= operators


def test_ids_are_stable_and_name_the_place():
    ids = [mutant.id for mutant in mechanical_mutants({"solution.py": SOURCE})]
    assert ids == [mutant.id for mutant in mechanical_mutants({"solution.py": SOURCE})]
    assert "solution.py:f/compare/1" in ids
    assert "solution.py:Box.size/constant/1" in ids


def test_tests_are_not_mutated():
    assert list(mechanical_mutants({"test_solution.py": SOURCE})) == []


def run(source):
    scope = {}
    exec(compile(source, "source", "exec"), scope)
    return [scope["f"](n, deep=deep) for n in range(7) for deep in (False, True)]


@pytest.mark.parametrize("name", ["reprinted", "renamed", "turned", "padded"])
def test_rewrites_behave_the_same_and_read_differently(name):
    text = dict(rewrites(SOURCE))[name]
    assert text != SOURCE
    assert run(text) == run(SOURCE)


def test_renaming_leaves_arguments_alone():
    assert "deep=False" in dict(rewrites(SOURCE))["renamed"]
    assert "total_" in dict(rewrites(SOURCE))["renamed"]


def test_reprinting_drops_prose():
    assert "rose" not in dict(rewrites(SOURCE))["reprinted"]


def test_slow_checks_run_last_for_mechanical_mutants(sorting, level, monkeypatch):
    first = sorting.cases[0].id
    monkeypatch.setitem(vars(sorting), "slow", frozenset({first}))
    certifier = Certifier(sorting, level, seed=5)
    assert certifier.quick_first[-1].id == first
    assert sorted(c.id for c in certifier.quick_first) == sorted(c.id for c in certifier.checks)
