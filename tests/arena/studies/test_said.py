"""A report's letters and figures beside what grading the same answers measured."""

from datetime import UTC, datetime

import pytest

from trapline.arena.record import Bundle, Cell, Dimension, Finding, Origin
from trapline.arena.report.markdown import documents
from trapline.arena.report.runview import RunView
from trapline.arena.report.site import Site
from trapline.arena.studies import ReportedField
from trapline.arena.studies.claims import Answer, checked_claims
from trapline.arena.studies.published import load
from trapline.arena.studies.said import agreement, models_of, said_cells

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


def verdicts(quantity, graded, files=None, figures=None):
    """Said and found → whether the claim holds."""
    claims = checked_claims(FIELD, [graded], lambda one: Answer(one, files or {}, figures or {}))
    return {(c.said, c.found): c.verdict for c in claims if c.quantity == quantity}


def test_figures_are_counted_in_the_files():
    graded = cell("glm5", "layer_norm_backward", 100.0)
    files = {
        "layer_norm.py": "x = 1\n" * 275,
        "adapter.py": "import layer_norm\n",
        "notes.md": "many words\n" * 999,
    }
    assert verdicts("lines of code", graded, files) == {
        ("275", "275"): "holds",
        ("280", "275"): "holds",
    }
    commented = {"layer_norm.py": "x = 1\n" * 275 + "# why\n" * 25 + "\n" * 100}
    assert set(verdicts("lines of code", graded, commented).values()) == {"holds"}
    short = {"layer_norm.py": "x = 1\n"}
    assert set(verdicts("lines of code", graded, short).values()) == {"does not hold"}


def test_what_the_files_do_not_show_cannot_be_known():
    graded = cell("qwen36", "beam_search", 100.0)
    found = verdicts("tests", graded, {"beam_search.py": "x = 1\n"})
    assert set(found.values()) == {"cannot be known"}


@pytest.mark.parametrize(
    ("entrant", "challenge", "quantity", "got", "verdict"),
    [
        ("glm5", "layer_norm_backward", "relative error of dx", 1e-15, "holds"),
        ("glm5", "layer_norm_backward", "relative error of dx", 1e-9, "does not hold"),
        ("glm5", "layer_norm_backward", "items in the cache", 3.0, "holds"),
        ("glm5", "layer_norm_backward", "items in the cache", 4.0, "does not hold"),
        ("glm5", "flash_attention_forward", "relative error", 3e-16, "holds"),
        ("qwen36", "flash_attention_forward", "relative error", 4e-16, "holds"),
        ("qwen36", "flash_attention_forward", "relative error", 2e-7, "does not hold"),
        ("kimi-k2.6", "flash_attention_backward", "gradient error", 1e-8, "does not hold"),
    ],
)
def test_errors_are_held_against_the_figures_of_the_grade(
    entrant, challenge, quantity, got, verdict
):
    graded = cell(entrant, challenge, 100.0)
    assert set(verdicts(quantity, graded, figures={quantity: got}).values()) == {verdict}
    assert set(verdicts(quantity, graded).values()) == {"cannot be known"}
    not_run = cell(entrant, challenge, None)
    assert set(verdicts(quantity, not_run, figures={quantity: got}).values()) == {"cannot be known"}


def finding(cause):
    return FREE_END.model_copy(update={"cause": cause})


def test_claims_about_bugs_are_held_against_the_findings():
    """A report says both of the same answer: one of the two holds."""
    bug = "EOS removal bug"
    clean = cell("minimax-m2.7", "beam_search", 100.0)
    assert {said: v for (said, _), v in verdicts(bug, clean).items()} == {
        "present": "does not hold",
        "absent": "holds",
    }
    wrong = cell("minimax-m2.7", "beam_search", 1.0, findings=[finding("finished-beams-dropped")])
    assert {said: v for (said, _), v in verdicts(bug, wrong).items()} == {
        "present": "holds",
        "absent": "does not hold",
    }
    other = cell("minimax-m2.7", "beam_search", 1.0, findings=[FREE_END])
    assert set(verdicts(bug, other).values()) == {"cannot be known"}


def test_answers_said_to_be_correct_are_held_against_the_contract():
    what = "correctness of the answer"
    wrong = cell("minimax-m2.7", "beam_search", 25.0, findings=[FREE_END])
    assert verdicts(what, wrong) == {("correct", "has bugs (end-costs-nothing)"): "does not hold"}
    right = cell("minimax-m2.7", "beam_search", 100.0)
    assert verdicts(what, right) == {("correct", "correct"): "holds"}
    accused = cell("kimi-k2.6", "dflash", 50.0, findings=[FREE_END])
    assert set(verdicts(what, accused).values()) == {"holds"}
    cleared = cell("kimi-k2.6", "dflash", 100.0)
    assert set(verdicts(what, cleared).values()) == {"cannot be known"}


def test_an_answer_that_holds_a_matrix_is_found():
    matrix = cell(
        "glm5", "flash_attention_forward", 60.0, findings=[finding("score-matrix-in-memory")]
    )
    assert set(verdicts("(N, N) matrix", matrix).values()) == {"does not hold"}


def test_holders_of_a_property_are_held_against_the_findings():
    """A complete list says of the others that they lack it."""
    rows = "parent-indexed logits"
    clean = cell("qwen36", "dflash", 100.0)
    assert verdicts(rows, clean) == {("no", "yes (no such finding)"): "does not hold"}
    wrong = cell("qwen36", "dflash", 50.0, findings=[finding("judged-by-depth")])
    assert verdicts(rows, wrong) == {("no", "no (judged-by-depth)"): "holds"}
    hidden = cell("qwen36", "dflash", 50.0, findings=[finding("sibling-refused-after-acceptance")])
    assert verdicts(rows, hidden) == {("no", "other findings may hide it"): "cannot be known"}


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ("not weighed: its tests pass on its own code", "holds"),
        ("not weighed: 2 of 8 tests fail", "does not hold"),
        ("not weighed: its tests gave no report within 30 s", "cannot be known"),
        ("the answer has no test files, and none were asked for", "cannot be known"),
    ],
)
def test_all_tests_pass_is_held_against_running_them(told, verdict):
    graded = cell("glm5", "kv_cache", 40.0)
    graded.dimensions["tests"] = Dimension(score=None, reason=told)
    files = {"test_kv_cache.py": "def test_one():\n    pass\n"}
    assert set(verdicts("own tests", graded, files).values()) == {verdict}


def test_own_tests_that_are_not_there():
    found = verdicts("own tests", cell("minimax-m2.7", "kv_cache", 40.0), {"kv.py": "x = 1\n"})
    assert {said: v for (said, _), v in found.items()} == {
        "all pass": "cannot be known",
        "none": "holds",
    }


def test_the_library_is_read_from_the_imports():
    graded = cell("glm5", "flash_attention_forward", 100.0)
    found = verdicts("array library", graded, {"a.py": "import numpy as np\n"})
    assert found == {("NumPy", "NumPy"): "holds", ("MLX", "NumPy"): "does not hold"}


def test_the_page_stands_beside_the_report_of_such_a_run():
    first = cell("minimax-m2.7", "beam_search", 25.0, findings=[FREE_END], bundle="b")
    cells = [first, cell("qwen36", "beam_search", 100.0), cell("glm5", "ternary_training", None)]
    bundle = Bundle(cell=first, files={"beam_search.py": "def test_one():\n    pass\n"})
    page = documents(RunView(cells=cells, bundles={"b": bundle}))["said-and-measured.md"]
    assert "| beam\\_search | MiniMax-M2.7 | B- | A | 25.0 | end-costs-nothing (confirmed)" in page
    assert "needs hardware that is not here" in page
    assert "| beam\\_search | MiniMax-M2.7 | tests | 3 | 1 | read |" in page
    assert page.index("### Claims that do not hold") < page.index("| tests | 3 | 1 | read |")
    assert "Failing their own prompt: 1, of which 0 had" in page


def test_answers_with_the_same_bytes_are_named():
    cells, bundles = [], {}
    for entrant, digest in (("glm5", "x"), ("glm5.1", "x"), ("kimi-k2.6", "y")):
        cells.append(cell(entrant, "flash_attention_backward", 100.0, bundle=entrant))
        bundles[entrant] = Bundle(cell=cells[-1], files={}, raw={"figures": {"digest": digest}})
    page = documents(RunView(cells=cells, bundles=bundles))["said-and-measured.md"]
    assert "the results of GLM-5 (A-) and GLM-5.1 (B+) are equal bit for bit" in page


def test_the_site_has_the_page_too():
    origin = Origin(input_tokens=1234, output_tokens=56, turns=7, seconds=90.0)
    first = cell("minimax-m2.7", "beam_search", 25.0, findings=[FREE_END])
    cells = [first.model_copy(update={"origin": origin}), cell("qwen36", "beam_search", 100.0)]
    site = Site(RunView(cells=cells))
    page = site.render("said.html")
    assert "end-costs-nothing (confirmed): The end token costs nothing." in page
    assert all(words in page for words in ("1,234", "1 min 30 s", "Claims that do not hold"))
    assert 'href="said.html"' in site.render("index.html")
    assert "said.html" not in Site(RunView(cells=[cell("a", "beam_search", 1.0)])).pages


def test_other_runs_have_no_such_page():
    assert "said-and-measured.md" not in documents(RunView(cells=[cell("a", "beam_search", 1.0)]))
