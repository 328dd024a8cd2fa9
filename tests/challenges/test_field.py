"""The example field: entrants of several kinds, and the gold solutions as the arena adds them."""

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries

NAME = "fused_softmax_topk"


@pytest.fixture
def field(tmp_path):
    """One entrant with an answer to one challenge."""
    folder = tmp_path / "somebody" / NAME
    folder.mkdir(parents=True)
    (folder / "solution.py").write_text("")
    return tmp_path


def folders(field, gold=None):
    return {entry.entrant: entry.folder for entry in find_entries(field, [], gold)}


@pytest.mark.parametrize("name", load_all())
def test_every_challenge_has_entrants_of_several_kinds(name):
    entries = find_entries(EXAMPLE_FIELD, [name])
    assert {"gold", "textbook", "hasty", "broken"} <= {entry.entrant for entry in entries}
    (gold,) = [entry for entry in entries if entry.entrant == "gold"]
    assert gold.folder == load(name).solution


def test_gold_is_added_where_it_is_asked_for(field):
    own = {"somebody": field / "somebody" / NAME}
    with_gold = {"gold": load(NAME).solution, **own}
    assert folders(field) == own
    assert folders(field, gold=True) == with_gold
    (field / "field.toml").write_text("gold = true\n")
    assert folders(field) == with_gold
    assert folders(field, gold=False) == own


def test_a_field_keeps_its_own_gold_folder(field):
    (field / "gold" / NAME).mkdir(parents=True)
    assert folders(field, gold=True)["gold"] == field / "gold" / NAME


@pytest.mark.parametrize(
    ("text", "message"),
    [("gold = 1", "may say"), ("golden = true", "may say"), ("gold", "not valid TOML")],
)
def test_a_mistake_in_field_toml_is_an_error(field, text, message):
    (field / "field.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        find_entries(field, [])
