"""The findings of an example answer are the bugs that it carries, and no others."""

import tomllib
from functools import cache
from pathlib import Path

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries

SEED = 7
TABLE = Path(__file__).with_name("field_findings.toml")
loaded = cache(load)


def answers():
    """Every answer of the table; all but the quick ones are for `make test-full`."""
    return [
        pytest.param(
            *(row["entrant"], row["challenge"], row["findings"]),
            id=f"{row['entrant']}-{row['challenge']}",
            marks=[] if row.get("quick") else [pytest.mark.full],
        )
        for row in tomllib.loads(TABLE.read_text())["answer"]
    ]


@pytest.mark.parametrize(("entrant", "challenge", "findings"), answers())
def test_findings_are_the_bugs_that_it_carries(entrant, challenge, findings):
    entries = find_entries(EXAMPLE_FIELD, [challenge])
    (folder,) = [entry.folder for entry in entries if entry.entrant == entrant]
    request = GradeRequest(entrant, challenge, 1, folder, seed=SEED, checks_only=True)
    found = grade(request, loaded(challenge)).cell.findings
    assert sorted(finding.cause for finding in found) == sorted(findings)
    assert all(finding.certainty == "confirmed" for finding in found)
