"""Leaks and copies: what is planted is found, and honest entrants are left in peace."""

import json
import shutil

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.judge.contamination import canary, copies, evidence, hidden, leaks_in
from trapline.arena.judge.request import GradeRequest
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries
from trapline.arena.runs.field_scan import scan_field, transcript

CHALLENGE = "kv_cache"


@pytest.fixture(scope="module")
def known():
    return hidden(load(CHALLENGE))


def honest():
    return (EXAMPLE_FIELD / "textbook" / CHALLENGE / "solution.py").read_text()


def kinds(text, known):
    return [leak.kind for leak in leaks_in(text, known)]


def test_honest_entrants_are_clean_against_the_judge_and_each_other():
    assert scan_field(find_entries(EXAMPLE_FIELD, []), frozenset({"gold"})) == []


@pytest.mark.parametrize("name", list(load_all()))
def test_independent_right_answers_are_not_copies(name):
    challenge = load(name)
    for folder in challenge.alternates:
        text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
        found = [leak.source for leak in leaks_in(text, hidden(challenge))]
        assert found == [f"the alternate {folder.name}"]


def test_gold_entrant_is_found_everywhere():
    found = scan_field(
        [entry for entry in find_entries(EXAMPLE_FIELD, []) if entry.entrant == "gold"]
    )
    assert {(one.challenge, one.leak.kind) for one in found} == {(n, "gold") for n in load_all()}
    assert all(one.leak.share > 0.5 for one in found)


def test_canary_is_found(known):
    assert kinds(f"{honest()}\n# {canary(CHALLENGE)}\n", known) == ["canary"]
    assert kinds(f"{honest()}\n# {canary('beam_search')}\n", known) == []


def test_name_of_a_trap_is_found(known):
    name = next(name for name in sorted(known.names) if name.count("-") >= 2)
    assert kinds(f"{honest()}\n# avoids {name}\n", known) == ["trap-name"]
    assert kinds(f"{honest()}\ndef test_{name.replace('-', '_')}(): pass\n", known) == []
    short = [name for name in sorted(known.names) if name.count("-") == 1]
    assert kinds(f"{honest()}\n# {short[0]}\n", known) == []
    assert kinds(f"{honest()}\n# {' '.join(short[:4])}\n", known) == ["trap-name"]


def test_story_of_a_trap_is_found(known):
    trap = max(load(CHALLENGE).traps, key=lambda trap: len(trap.story))
    assert kinds(f"{honest()}\n{trap.story.upper()}\n", known) == ["judge-text"]


@pytest.mark.parametrize("name", list(load_all()))
def test_half_of_the_gold_answer_in_another_layout_is_found(name):
    lines = (load(name).solution / "solution.py").read_text().splitlines()
    half = "\n\n".join(line.replace("    ", "\t") for line in lines[: len(lines) // 2])
    assert "gold" in kinds(half, hidden(load(name)))


def test_piece_of_the_cases_is_found(known):
    text = (load(CHALLENGE).folder / "cases.py").read_text()
    assert "judge-text" in kinds(honest() + text[len(text) // 2 :], known)


def test_text_of_prompt_and_starter_is_not_a_leak(known):
    starter = (load(CHALLENGE).folder / "starter" / "solution.py").read_text()
    assert leaks_in(load(CHALLENGE).prompt + starter, known) == []


def test_copy_with_new_comments_is_a_copy(known):
    other = (EXAMPLE_FIELD / "hasty" / CHALLENGE / "solution.py").read_text()
    copied = honest().replace("#", "# my own idea:")
    found = copies({"a": honest(), "b": copied, "c": other}, known)
    assert [(one, two) for one, two, _ in found] == [("a", "b")]
    assert found[0][2] > 0.8


@pytest.fixture
def field(tmp_path):
    """Two entrants, the second a copy of the first, whose transcript holds the gold answer."""
    for name in ("first", "second"):
        shutil.copytree(EXAMPLE_FIELD / "textbook" / CHALLENGE, tmp_path / name / CHALLENGE)
    gold = (load(CHALLENGE).solution / "solution.py").read_text()
    inner = json.dumps({"type": "tool", "output": [{"text": gold}]})
    step = json.dumps({"source": "agent", "message": f"reading\n{inner}\ndone"})
    folder = tmp_path / "first" / CHALLENGE / ".trapline"
    folder.mkdir()
    (folder / "raw.jsonl").write_text(f"{step}\nno json\n[1, 2\n")
    return tmp_path


def test_transcript_is_read_however_deep_its_json_is(field):
    found = scan_field(find_entries(field, []))
    assert [(one.entrant, one.where, one.leak.kind) for one in found] == [
        ("first", "transcript", "gold"),
        ("first", "submission", "copy"),
        ("second", "submission", "copy"),
    ]
    assert "no json" in transcript(field / "first" / CHALLENGE)
    assert transcript(field / "second" / CHALLENGE) == ""


def test_attempts_of_one_entrant_are_not_copies():
    folder = EXAMPLE_FIELD / "textbook" / CHALLENGE
    entries = [GradeRequest("same", CHALLENGE, number, folder) for number in (1, 2)]
    assert scan_field(entries) == []


def test_cell_keeps_its_leaks():
    gold = (load(CHALLENGE).solution / "solution.py").read_text()
    (leak,) = evidence(load(CHALLENGE), {"solution.py": gold, "prompt.md": "x"})
    assert (leak["kind"], leak["source"]) == ("gold", "the gold answer")
    assert evidence(load(CHALLENGE), {"solution.py": honest()}) == []
