"""Transcripts as they lie on disk: JSON lines whose strings hold the secrets behind escapes."""

import json

import pytest

from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import redact_document, scan_document

KEY = "sk-ant-" + "a1B2c3D4e5F6g7H8"
SECRETS = ("kimberley", "kim.lee@mail.example.com", KEY, "/home/kim", "correct-horse-battery")
TEXT = "\n".join(["who:", *SECRETS, "the rest stays: layer_norm_backward(dy, cache)"])


@pytest.fixture
def redactor():
    return Redactor(environment={"MY_TOKEN": "correct-horse-battery"}, names=("kimberley",))


def transcripts():
    step = {"step_id": 1, "message": TEXT, "tokens": 18423, "done": True, "cost": None}
    line = json.dumps(step)
    nested = json.dumps({"message": f"ran\n{line}\n{line}\nkimberley"})
    yield "lines", f"{line}\n{nested}\nplain kimberley\n"
    yield "document", json.dumps({"steps": [step, {"/home/kim/x": [TEXT]}]}, indent=1) + "\n"
    yield "deep", json.dumps({"raw": nested}) + "\n"
    yield "plain", TEXT


@pytest.mark.parametrize("text", [t for _, t in transcripts()], ids=[n for n, _ in transcripts()])
def test_escaped_secrets_are_removed_and_json_stays_valid(redactor, text):
    assert scan_document(text, redactor)
    safe = redact_document(text, redactor)
    decoded = safe.encode().decode("unicode_escape", errors="replace")
    assert [secret for secret in SECRETS if secret in safe or secret in decoded] == []
    assert scan_document(safe, redactor) == []
    assert redact_document(safe, redactor) == safe
    assert "layer_norm_backward(dy, cache)" in safe
    for before, after in zip(text.splitlines(), safe.splitlines(), strict=True):
        if before.startswith("{") and text.count("\n") > 1 and before != "{":
            assert json.loads(after).keys() == json.loads(before).keys()


def test_redaction_of_raw_lines_misses_escaped_names(redactor):
    """Why the strings are read first: the plain rules see `nkimberley`."""
    line = json.dumps({"message": "x\nkimberley"})
    assert "kimberley" in redactor.redact(line)
    assert "kimberley" not in redact_document(line, redactor)


def test_clean_transcript_is_unchanged(redactor):
    text = '{"a":1,  "b":"caf\\u00e9"}\nnot json {\n[1,2\n'
    assert redact_document(text, redactor) == text


def test_findings_name_the_line_of_the_file(redactor):
    text = f'{{"a": "b"}}\nplain\nkimberley\n{json.dumps({"m": chr(10) * 5 + KEY})}\n'
    assert [one.line for one in scan_document(text, redactor)] == [3, 4]


def test_repeated_json_name_hides_nothing(redactor):
    twice = f'{{"key": "{KEY}", "key": "fine", "/home/kim": 1, "/home/lee": 2}}\n'
    assert [found.kind for found in scan_document(twice, redactor)] == ["key", "home", "home"]
    safe = redact_document(twice, redactor)
    assert KEY not in safe
    assert sorted(map(str, json.loads(safe).values())) == ["1", "2", "<key>", "fine"]
