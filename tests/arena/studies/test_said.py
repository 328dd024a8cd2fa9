"""A report's letters and figures beside what grading the same answers measured."""

from datetime import UTC, datetime

import pytest

from trapline.arena.record import Bundle, Cell, Finding
from trapline.arena.report.markdown import documents
from trapline.arena.report.runview import RunView
from trapline.arena.studies import ReportedField
from trapline.arena.studies.published import load
from trapline.arena.studies.said import agreement, checked_claims, models_of, said_cells

FIELD = ReportedField.of(load())


def cell(entrant, challenge, score, *, findings=(), profile="published", bundle=""):
    return Cell(
        entrant=entrant,
        challenge=challenge,
        profile=profile,
        state="not_run" if score is None else ("fail" if findings else "pass"),
        score=score,
        letter=None if score is None else "A",
        reason="needs hardware that is not here",
        isolation="process",
        dimensions={},
        cases=[],
        traps=[],
        findings=list(findings),
        submission_digest="",
        challenge_digest="",
        seed=0,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
        bundle=bundle,
    )


FREE_END = Finding(
    cause="end-costs-nothing",
    certainty="confirmed",
    severity="critical",
    sentence="The end token costs nothing.",
    explains=["x"],
)


def test_folders_are_matched_with_the_names_of_the_report():
    names = ["glm5", "glm5.1", "kimi-k2.6", "minimax-m2.7", "opus47_1m", "qwen36", "gold"]
    assert models_of(FIELD, names) == {
        "glm5": "GLM-5",
        "glm5.1": "GLM-5.1",
        "kimi-k2.6": "Kimi K2.6",
        "minimax-m2.7": "MiniMax-M2.7",
        "opus47_1m": "Opus 4.7",
        "qwen36": "Qwen3-6",
    }


def test_cells_of_another_profile_or_entrant_are_left_out():
    cells = [
        cell("glm5", "beam_search", 100.0),
        cell("glm5", "kv_cache", 10.0, profile=""),
        cell("gold", "beam_search", 100.0),
    ]
    (found,) = said_cells(FIELD, cells)
    assert (found.model, found.said, found.measured) == ("GLM-5", "B+", "no finding")


@pytest.mark.parametrize(
    ("values", "tau"),
    [
        ({"a": (3, 30), "b": (2, 20), "c": (1, 10)}, 1.0),
        ({"a": (3, 10), "b": (2, 20), "c": (1, 30)}, -1.0),
        ({"a": (3, 30), "b": (2, 10), "c": (1, 20)}, 0.333),
        ({"a": (1, 10), "b": (1, 20)}, None),
    ],
)
def test_kendalls_tau(values, tau):
    assert agreement("x", {"one": values}).tau == tau


def test_pairs_are_compared_within_a_challenge_only():
    pairs = {"one": {"a": (1, 90), "b": (2, 95)}, "two": {"a": (9, 10), "b": (8, 5)}}
    found = agreement("both", pairs, interval=True)
    assert (found.tau, found.alike, found.opposite) == (1.0, 2, 0)
    assert (found.low, found.high) == (1.0, 1.0)


def test_figures_are_counted_in_the_files():
    files = {
        "layer_norm.py": "x = 1\n" * 275,
        "adapter.py": "import layer_norm\n",
        "notes.md": "many words\n" * 999,
    }
    claims = checked_claims(FIELD, [cell("glm5", "layer_norm_backward", 100.0)], lambda _: files)
    lines = {(c.said, c.found): c.verdict for c in claims if c.quantity == "lines of code"}
    assert lines == {("275", "275"): "holds", ("280", "275"): "holds"}
    errors = {c.verdict for c in claims if c.quantity == "relative error of dx"}
    assert errors == {"cannot be known"}
    commented = {"layer_norm.py": "x = 1\n" * 275 + "# why\n" * 25 + "\n" * 100}
    looser = checked_claims(
        FIELD, [cell("glm5", "layer_norm_backward", 100.0)], lambda _: commented
    )
    assert {c.verdict for c in looser if c.quantity == "lines of code"} == {"holds"}
    shorter = checked_claims(
        FIELD, [cell("glm5", "layer_norm_backward", 1.0)], lambda _: {"layer_norm.py": "x = 1\n"}
    )
    assert {c.verdict for c in shorter if c.quantity == "lines of code"} == {"does not hold"}


def test_what_the_files_do_not_show_cannot_be_known():
    claims = checked_claims(
        FIELD, [cell("qwen36", "beam_search", 100.0)], lambda _: {"beam_search.py": "x = 1\n"}
    )
    assert {c.verdict for c in claims if c.quantity == "tests"} == {"cannot be known"}


def test_the_page_stands_beside_the_report_of_such_a_run():
    first = cell("minimax-m2.7", "beam_search", 25.0, findings=[FREE_END], bundle="b")
    cells = [first, cell("qwen36", "beam_search", 100.0), cell("glm5", "ternary_training", None)]
    bundle = Bundle(cell=first, files={"beam_search.py": "def test_one():\n    pass\n"})
    page = documents(RunView(cells=cells, bundles={"b": bundle}))["said-and-measured.md"]
    assert "| beam\\_search | MiniMax-M2.7 | B- | A | 25.0 | end-costs-nothing (confirmed)" in page
    assert "needs hardware that is not here" in page
    assert "| beam\\_search | MiniMax-M2.7 | tests | 3 | 1 | does not hold |" in page
    assert "Failing their own prompt: 1, of which 0 had" in page


def test_other_runs_have_no_such_page():
    assert "said-and-measured.md" not in documents(RunView(cells=[cell("a", "beam_search", 1.0)]))
