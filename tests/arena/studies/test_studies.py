"""The published figures: complete, with their sources, reproduced where they are consistent."""

import pytest

from trapline.arena.standings.ranking import ranking
from trapline.arena.studies import ReportedField, as_cells, contradictions, reproduction_table
from trapline.arena.studies.headline import mean_steps
from trapline.arena.studies.published import load

SOURCES = {
    "000_317edd42f5f71189.txt",
    "001_c071bb3dc21df9aa.txt",
    "002_c317e54c61c78f04.txt",
    "003_317bb170457f1cae.txt",
    "004_d58c1651d869a7a2.txt",
    "2-way-head-to-head-round2.md",
    "3-way-head-to-head-round3.md",
    "overall_summary.md",
}


@pytest.fixture(scope="module")
def published():
    return ReportedField.of(load())


@pytest.fixture(scope="module")
def table(published):
    return reproduction_table(published)


def _rows(table, kind, what=""):
    return [row for row in table if row.kind == kind and row.what.startswith(what)]


def _sources(value):
    """Every `source` anywhere in the data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "source":
                yield inner
            else:
                yield from _sources(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _sources(inner)


def test_every_entry_names_the_file_it_was_printed_in():
    data = load()
    assert set(_sources(data)) == SOURCES
    for name in ("matrix", "task", "overall", "rank"):
        assert all("source" in entry for entry in data["grades"][name])
    for file in ("matchups", "facts", "claims"):
        for entries in data[file].values():
            assert all("source" in entry for entry in entries)


def test_all_names_are_known(published):
    models, challenges = set(published.who.models), set(published.who.difficulty)
    for row in (*published.grades.matrix, *published.grades.task):
        assert set(row.grades) <= models
        assert row.challenge in challenges
    for matchup in published.matchups.matchup:
        assert {matchup.a, matchup.b} <= models
        assert {bout.winner for bout in matchup.bouts} <= models | {"tie", "split"}
        assert {bout.challenge for bout in matchup.bouts} <= challenges
        assert matchup.edges.keys() <= challenges
    assert {model for fact in published.facts.fact for model in fact.values} <= models


def test_the_matrix_has_every_grade(published):
    counts = {model: len(published.took(model)) for model in published.who.models}
    assert sum(counts.values()) == 35
    assert list(counts.values()) == [8, 8, 8, 3, 3, 5]


def test_every_head_to_head_is_in_the_table(published, table):
    records = [row for row in _rows(table, "record") if " – " in row.what]
    assert len(records) == len(published.matchups.matchup) == 14
    assert len(_rows(table, "lead")) == 14
    pairs = {frozenset(row.what.split(" – ")) for row in records}
    # The five that were in all late rounds met each other; the sixth met two of them.
    assert len(pairs) == 10 + 2


def test_the_records_that_add_up_are_reproduced(table):
    wrong = [row for row in _rows(table, "record") if row.verdict == "contradiction"]
    assert [(row.what, row.reported, row.ours) for row in wrong] == [
        ("Opus 4.7 – Qwen3-6", "4-1-2", "4-2-1")
    ]
    halves = [row for row in _rows(table, "record") if row.reported == "2.5-0.5"]
    assert [row.ours for row in halves] == ["2.5-0.5"]


def test_a_lead_of_two_to_two_is_none(table):
    wrong = [row for row in _rows(table, "lead") if row.verdict == "contradiction"]
    assert [(row.what, row.reported, row.ours) for row in wrong] == [
        ("Opus 4.7 – GLM-5", "Opus 4.7 leads", "level")
    ]


def test_averages_and_margins_in_points_are_reproduced(table):
    averages = {row.what: (row.reported, row.ours) for row in _rows(table, "average")}
    assert averages == {
        "GLM-5, 3 challenges": ("81", "81"),
        "Qwen3-6, 3 challenges": ("88", "88"),
    }
    margins = _rows(table, "margin")
    assert [row.reported for row in margins] == [
        "Qwen3-6 +12",
        "Qwen3-6 +11",
        "GLM-5 +2",
        "Qwen3-6 +7",
    ]
    assert {row.verdict for row in margins} == {"equal"}


def test_the_matrix_agrees_with_the_reports_it_sums_up(table):
    grades = _rows(table, "grade")
    assert len(grades) == 15
    assert {row.verdict for row in grades} == {"equal"}


CONTRADICTIONS = [
    ("participation", "Qwen3-6", "7", "8"),
    ("participation", "Opus 4.7", "7", "8"),
    ("participation", "MiniMax-M2.7", "4", "5"),
    ("overlap", "GLM-5 – Qwen3-6", "7", "8"),
    ("overlap", "Qwen3-6 – GLM-5.1", "2", "3"),
    ("overlap", "Opus 4.7 – Kimi K2.6", "2", "3"),
    ("letter and points", "GLM-5, fused_softmax_topk", "A-", "B- (80/100)"),
    ("fact", "GLM-5, fused_softmax_topk, correctness of the kernel", "has bugs", "correct"),
    ("winner", "fused_softmax_topk, best of 3", "GLM-5", "Qwen3-6"),
    ("winner", "Kimi K2.6 – GLM-5.1, ternary_training", "Kimi K2.6", "GLM-5.1"),
    ("winner by perplexity", "GLM-5 – Qwen3-6", "GLM-5", "Qwen3-6"),
    ("rank by mean grade", "GLM-5", "1st", "3rd"),
    ("average grade", "Qwen3-6", "B+", "A-"),
    ("only one", "took part in all challenges", "GLM-5", "GLM-5, Qwen3-6, Opus 4.7"),
    ("only one", "never declines from stage to stage", "GLM-5", "no model"),
    ("only one", "has the narrowest range of grades", "Opus 4.7", "MiniMax-M2.7"),
    ("only one", "has the highest worst grade", "Opus 4.7", "GLM-5, Opus 4.7"),
    ("said in prose", "Kimi K2.6, fused_softmax_topk", "took part", "no grade"),
    ("arithmetic", "reads of the three-pass kernel over those of a single pass", "12", "3"),
    ("place", "Qwen3-6, flash_attention_backward", "3rd", "2nd="),
    (
        "margin word",
        "two grades 1 step apart",
        "decisive × 2, moderate × 3, narrow × 9",
        "one word",
    ),
]


@pytest.mark.parametrize("expected", CONTRADICTIONS, ids=lambda e: f"{e[0]}: {e[1]}"[:60])
def test_known_contradictions_are_found(table, expected):
    wrong = [row for row in table if row.verdict == "contradiction"]
    assert expected in {(row.kind, row.what, row.reported, row.ours) for row in wrong}


def test_contradictions_are_the_rows_that_do_not_hold(published, table):
    assert contradictions(published) == [row for row in table if row.verdict == "contradiction"]


def test_the_kernel_with_two_grades_shows_its_correctness(table):
    [row] = _rows(table, "letter and points", "GLM-5, fused")
    assert row.note == "lowest dimension: Correctness 65"
    assert row.sources == ["003_317bb170457f1cae.txt", "004_d58c1651d869a7a2.txt"]


def test_the_headline_does_not_survive_resampling(published, table):
    [row] = _rows(table, "clear first")
    assert row.verdict == "contradiction"
    assert len(_rows(table, "rank")) == 6
    standings = {each.entrant: each for each in ranking(as_cells(published)).standings}
    assert standings["GLM-5"].p_first < 0.25
    assert standings["GLM-5"].rank_high >= 3
    could_be_first = {name for name, each in standings.items() if each.rank_low == 1}
    assert could_be_first == {"GLM-5", "Qwen3-6", "Opus 4.7", "Kimi K2.6"}


def test_mean_grades(published):
    means = mean_steps(published)
    assert means["Opus 4.7"] - means["Qwen3-6"] == pytest.approx(0.25)
    assert means["Qwen3-6"] - means["GLM-5"] == pytest.approx(0.125)


def test_cells_claim_nothing_that_was_not_measured(published):
    cells = as_cells(published)
    assert len(cells) == 35
    assert all(not (cell.dimensions or cell.cases or cell.traps) for cell in cells)
    assert {cell.harness for cell in cells} == {"pi-mono", "opencode", ""}
    assert all(cell.harness == "" for cell in cells if cell.entrant == "Opus 4.7")
    assert {cell.letter for cell in cells} == {"A", "A-", "B+", "B", "B-", "C+", "C"}


def test_the_table_never_varies(published, table):
    assert reproduction_table(ReportedField.of(load())) == table
