"""Sentences of the report claim no more than the figures show."""

import re
from datetime import timedelta
from html import unescape

import numpy as np
import pytest

from trapline.arena.judge.draws import PUBLIC_SEEDS
from trapline.arena.record import TrapSetName
from trapline.arena.report.catalog import describe
from trapline.arena.report.findings import opening
from trapline.arena.report.markdown import documents
from trapline.arena.report.runview import RunView
from trapline.arena.report.site import Site
from trapline.arena.studies import ReportedField
from trapline.arena.studies.published import load


@pytest.fixture(scope="module")
def wild(make_run, told):
    """Two entrants so different from challenge to challenge that no mean difference shows."""
    run = make_run(["heron", "otter"], ["rows", "tiles"])
    scores = {
        ("heron", "rows"): 100.0,
        ("heron", "tiles"): 0.0,
        ("otter", "rows"): 0.0,
        ("otter", "tiles"): 60.0,
    }
    cells = [
        cell.model_copy(update={"score": scores[cell.entrant, cell.challenge]})
        for cell in run.cells
    ]
    return RunView(cells=cells, bundles=run.bundles)


def test_no_page_quotes_a_difference_beyond_the_scale(wild, told):
    made = Site(wild, told=told)
    texts = [made.render(path) for path in made.pages] + list(documents(wild, told).values())
    for text in texts:
        for points in re.findall(r"([\d.]+) (?:points|that (?:this|could))", text):
            assert float(points) <= 100, text[:200]


def test_graded_cells_are_those_with_a_score(small_run, told):
    made = Site(small_run, told=told)
    graded = sum(cell.score is not None for cell in small_run.cells)
    assert graded == len(small_run.cells) - 1
    assert f"<dt>Cells graded</dt><dd>{graded}<" in made.render("index.html")
    assert made.reading.field.progress["graded"] == graded


def test_picks_without_a_winner_are_not_printed(small_run, told):
    assert "no analysis was judged" not in Site(small_run, told=told).render("index.html")
    assert "no analysis was judged" not in documents(small_run, told)["comprehensive.md"]


def test_dimension_that_was_not_measured_is_in_no_picture(small_run, told):
    cells = [
        cell.model_copy(
            update={"dimensions": {k: d for k, d in cell.dimensions.items() if k != "memory"}}
        )
        if cell.entrant == "heron"
        else cell
        for cell in small_run.cells
    ]
    made = Site(RunView(cells=cells), told=told)
    assert ">memory<" not in made.render("entrants/heron.html")
    assert ">memory<" in made.render("entrants/otter.html")


@pytest.mark.parametrize(
    ("given", "shown"),
    [("exp overflows.", "Exp overflows."), ("length() counts", "length() counts"), ("", "")],
)
def test_sentence_begins_with_a_capital_unless_it_begins_with_code(given, shown):
    assert opening(given) == shown


def test_same_cells_in_two_harnesses_without_a_visible_difference(wild, told):
    cells = [cell.model_copy(update={"model": "one"}) for cell in wild.cells]
    page = Site(RunView(cells=cells), told=told).render("standings.html")
    assert "full and plain cannot be told apart over 2 cells" in page


def test_every_page_says_which_traps_graded(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    private = TrapSetName(name="acme", version="2026.1", digest="ab" * 32, traps=["only-64"])
    release = {"trapline": "0.2.0"}
    cells = [cell.model_copy(update={"versions": release}) for cell in run.cells]
    public = Site(RunView(cells=cells), told=told).render("standings.html")
    assert "Traps: those of Trapline 0.2.0; public draws." in public
    hidden = [cell.model_copy(update={"trap_set": private, "seed": PUBLIC_SEEDS}) for cell in cells]
    view = RunView(cells=hidden)
    private_set = "the private set acme 2026.1 (abababababab)"
    sentence = f"Traps: those of Trapline 0.2.0, {private_set}; held-out draws."
    made = Site(view, told=told)
    assert all(sentence in made.render(path) for path in made.pages if path.endswith(".html"))
    assert sentence in documents(view, told)["comprehensive.md"]


def test_draws_of_both_halves_are_both_named(make_run, told):
    first, second = make_run(["heron", "otter"], ["rows"]).cells
    view = RunView(cells=[first, second.model_copy(update={"seed": PUBLIC_SEEDS})])
    assert "held-out and public draws." in Site(view, told=told).render("index.html")


def test_rounds_have_a_trajectory_where_the_field_declares_them(make_run, told):
    run = make_run(["heron", "otter"], ["rows", "tiles", "tree"])
    rounds = {"round 1": ["rows"], "round 2": ["tiles", "tree"]}
    view = RunView(cells=run.cells, meta={"rounds": rounds})
    without, declared = Site(RunView(cells=run.cells), told=told), Site(view, told=told)
    page = "entrants/heron.html"
    assert "Trajectory by round" not in without.render(page)
    shown = declared.render(page)
    assert re.search(r"Trajectory by round</h3><p>round 1 [A-F][+-]? → round 2 ", shown)
    document = documents(view, told)["comprehensive.md"]
    assert "## The trajectory, by round" in document
    assert "| Entrant | round 1 | round 2 | Trend |" in document


def test_signature_is_what_sets_an_entrant_apart(small_run, told):
    made = Site(small_run, told=told)
    shape = made.reading.shapes["heron"]
    largest = max([*shape.strengths, *shape.weaknesses], key=lambda trait: trait.size)
    page = unescape(made.render("entrants/heron.html"))
    assert f"Signature: {largest.evidence.split(';')[0]}" in page


@pytest.fixture(scope="module")
def printed_field():
    return Site(RunView.of_report(ReportedField.of(load()), "published"))


def test_published_field_links_its_sources(printed_field):
    run = printed_field.reading.run
    used = {name for row in run.reproduction for name in row.sources}
    assert len(used) > 3
    for page in map(printed_field.render, ("index.html", "reproduction.html")):
        for name in used:
            source = run.printed.source(name)
            assert f'href="{run.printed.who.pages}{source.page}"' in page
            assert f">{source.title}</a>" in page
            assert f">{name}<" not in page


def test_published_field_claims_nothing_about_a_grader(printed_field):
    page = printed_field.render("index.html")
    assert "A printed letter counts the least score that earns it." in page
    for claim in ("the contract fails", "weighted mean of the dimensions", ">our error<"):
        assert claim not in page


def test_printed_perplexities_stand_on_the_page_of_their_challenge(printed_field):
    page = printed_field.render("challenges/ternary_training.html")
    facts = [f for f in printed_field.reading.run.printed.facts.fact if "perplexity" in f.quantity]
    assert facts
    assert all(f.quantity in page for f in facts if f.challenge == "ternary_training")
    assert "Printed scores" in printed_field.render("challenges/kv_cache.html")
    assert "Printed edges" in "".join(
        printed_field.render(p) for p in printed_field.pages if p.startswith("challenges/")
    )


def test_every_source_of_a_figure_is_a_page(printed_field):
    named = set(re.findall(r"'source': '([^']+)'", str(load())))
    assert len(named) > 3
    assert all(printed_field.reading.run.printed.source(n).page.endswith(".md") for n in named)
    assert all(printed_field.render(path) for path in printed_field.pages)


def test_named_measures_stand_on_their_cell_and_challenge(make_run, told):
    first, second = make_run(["heron", "otter"], ["rows"]).cells
    cells = [first.model_copy(update={"measures": {"accepted length": 3.21}}), second]
    made = Site(RunView(cells=cells), told=told)
    page = next(made.render(path) for path in made.pages if path.startswith("cells/heron"))
    assert "Measured beside the score: accepted length 3.21 tokens a pass." in page
    assert "Measured beside the score" not in next(
        made.render(path) for path in made.pages if path.startswith("cells/otter")
    )
    challenge = made.render("challenges/rows.html")
    assert '<th scope="col" class="num">analysis</th>' not in challenge
    assert '<td class="num" data-value="3.21">3.21 tokens a pass</td>' in challenge


def test_private_traps_are_listed_without_a_description(cell_maker):
    private = TrapSetName(name="acme", version="1", digest="ab" * 32, traps=["only-64"])
    rng = np.random.default_rng(1)
    one = cell_maker("heron", "kv_cache", 0.9, rng, trap_set=private)
    infos = describe([one])
    public = describe([one.model_copy(update={"trap_set": None})])
    assert [trap.id for trap in infos["kv_cache"].traps][-1] == "only-64"
    assert len(infos["kv_cache"].traps) == len(public["kv_cache"].traps) + 1
    assert 'id="trap-only-64"' in Site(RunView(cells=[one])).render("challenges/kv_cache.html")


def test_grades_that_share_a_letter_differ_in_the_history(make_run, told):
    cells = make_run(["heron", "otter"], ["rows"]).cells
    first = cells[0].model_copy(update={"score": 71.0, "letter": "C-"})
    later = first.started + timedelta(hours=1)
    traps = [trap.model_copy(update={"state": "sprung"}) for trap in first.traps]
    second = first.model_copy(update={"score": 70.2, "started": later, "traps": traps})
    view = RunView(cells=[second, cells[1]], history=[first, second, cells[1]])
    page = Site(view, told=told).render("standings.html")
    assert "<td>C- 71.0</td><td>C- 70.2</td>" in page
