"""The example field: its gold entrant is the gold solution, byte for byte."""

from pathlib import Path

import pytest

from trapline.arena.challenge import load, load_all

FIELD = Path(__file__).parents[2] / "examples" / "field"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", load_all())
def test_the_gold_entrant_is_the_gold_solution(name):
    assert contents(FIELD / "gold" / name) == contents(load(name).solution)


@pytest.mark.parametrize("name", load_all())
def test_every_challenge_has_entrants_of_several_kinds(name):
    entrants = {path.parent.name for path in FIELD.glob(f"*/{name}")}
    assert {"gold", "textbook", "hasty", "broken"} <= entrants
