"""The Markdown documents."""

import re

import pytest

from trapline.arena.report.markdown import documents, write_markdown
from trapline.arena.report.markdown.syntax import table, text
from trapline.arena.report.runview import RunView
from trapline.arena.studies import ReportedField
from trapline.arena.studies.published import load


@pytest.fixture(scope="module")
def small(small_run, told):
    return documents(small_run, told)


@pytest.fixture(scope="module")
def published():
    field = ReportedField.of(load())
    return field, documents(RunView.of_report(field, "published"))


def test_documents_have_the_form_of_hand_written_ones(small):
    dives = [f"challenge-{name}.md" for name in ("rows", "tiles", "tree", "ternary")]
    assert list(small) == ["comprehensive.md", "2-way.md", "3-way.md", *dives]
    for part in (
        "grade matrix",
        "Head-to-head",
        "If you could only pick one",
        "## Rubric",
        "trajectory",
    ):
        assert part in small["comprehensive.md"]
    assert "### Task 1:" in small["2-way.md"]
    assert "| Criteria | heron | marten | Edge |" in small["2-way.md"]
    assert "## Executive summary" in small["3-way.md"]


def test_answer_comes_first_in_every_document(small):
    for name, document in small.items():
        if name.startswith("challenge-"):
            continue
        assert document.split("\n\n")[1].startswith("**TL;DR.**")
        assert "Caveat:" in document
        assert "## Rubric" in document


def test_hostile_names_stay_text(small):
    for document in small.values():
        # Lines of code are numbered, so that none of them ends its block.
        outside = re.sub(r"^~~~~python\n(?:[ >] *\d+  .*\n)*~~~~$", "", document, flags=re.M)
        assert "~~~~" not in outside
        assert "<script" not in outside


def test_every_table_row_has_as_many_cells_as_its_head(small):
    for document in small.values():
        for block in re.findall(r"(?:^\|.*\|\n?)+", document, flags=re.M):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")}
            assert len(counts) == 1, block


def test_markup_in_text_is_escaped():
    assert text("a|b\n*c* <d> [e](f)") == r"a\|b \*c\* &lt;d> \[e\](f)"
    assert table(["a"], [["x|y"]])[2] == r"| x\|y |"


def test_two_entrants_give_no_three_way(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    assert list(documents(run, told)) == ["comprehensive.md", "2-way.md", "challenge-rows.md"]


def test_run_without_measured_cells_gives_a_document(told):
    assert "Nothing was measured" in documents(RunView(cells=[]), told)["comprehensive.md"]


def test_documents_are_written(small_run, told, tmp_path):
    paths = write_markdown(small_run, tmp_path / "out", told)
    assert paths[0].name == "comprehensive.md"
    assert all(path.stat().st_size > 1000 for path in paths)


def test_reproduction_has_every_head_to_head(published):
    field, made = published
    for matchup in field.matchups.matchup:
        assert (
            f"| record | {text(f'{matchup.a} – {matchup.b}')} | {matchup.record} |"
            in made["reproduction.md"]
        )


def test_reproduction_puts_contradictions_first(published):
    rows = [line for line in published[1]["reproduction.md"].splitlines() if line.startswith("| ")][
        2:
    ]
    wrong = ["**contradiction**" in row for row in rows]
    assert wrong == sorted(wrong, reverse=True)
    assert any(wrong)


def test_published_report_does_not_call_a_leader(published):
    assert "cannot be distinguished at the top of 4" in published[1]["comprehensive.md"]
    assert "Without a place, because of too few challenges" in published[1]["comprehensive.md"]


def test_deep_dive_shows_the_code_around_a_finding(small, small_run):
    cell = next(c for c in small_run.cells if c.findings and c.bundle and c.challenge == "tiles")
    document = small["challenge-tiles.md"]
    assert f"## {cell.entrant} on Flash attention forward: {cell.letter}" in document
    assert ">   9      rstd = 1.0" in document
    assert "| largest error |" in document
    assert "call: layer\\_norm(float32\\[4, 8\\] from -1 to 1)" in document


def test_chosen_entrants_are_compared_side_by_side(small_run, told):
    made = documents(small_run.only(["stoat", "heron", "otter", "marten"]), told)
    assert made["3-way.md"].startswith("# 4-way head-to-head: heron vs ")
