"""The site on disk: complete, closed in itself, harmless."""

import re
import time
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urldefrag

import pytest

from trapline.arena.certify.certify import PUBLISHED_CERTIFICATES, Certificate, Outcome
from trapline.arena.challenge import load_all
from trapline.arena.errors import UsageError
from trapline.arena.record import CellKey, Origin
from trapline.arena.report import formats
from trapline.arena.report.catalog import describe
from trapline.arena.report.runview import RunView
from trapline.arena.report.single_file import page_id, single_file
from trapline.arena.report.site import MANIFEST, Site, write_site
from trapline.arena.runs.store import digest
from trapline.cli.report import read_certificates

MOST_BYTES = 500_000
#: Of the processor, for a hundred entrants on eight challenges.
MOST_SECONDS = 10.0


class Page(HTMLParser):
    """Links, ids, scripts and the first heading of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.scripts += tag == "script"
        if tag in ("script", "img", "iframe", "source"):
            self.loaded += [value for name, value in attrs if name == "src"]
        if tag == "link":
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def pages(site):
    return {
        path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")
    }


def test_every_kind_of_page_is_there(pages):
    kinds = {name.split("/")[0] for name in pages}
    assert kinds == {
        "index.html", "standings.html", "duel.html", "traps.html", "kills.html", "methodology.html",
        "entrants", "challenges", "cells", "duels",
    }  # fmt: skip


def test_every_link_leads_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            address, fragment = urldefrag(link)
            target = (site / name).parent / address if address else site / name
            assert target.is_file(), f"{name} → {link}"
            inner = target.resolve().relative_to(site.resolve()).as_posix()
            # The duel page reads its fragment itself.
            if fragment and inner in pages and inner != "duel.html":
                assert fragment in pages[inner].ids, f"{name} → {link}"


def test_ids_are_unique_in_a_page(pages):
    for name, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), name


def test_nothing_is_loaded_from_anywhere(pages):
    for page in pages.values():
        assert len(page.loaded) == 1
        assert page.loaded[0].startswith("data:image/svg+xml;base64,")


def test_only_our_scripts_are_in_a_page(pages):
    for name, page in pages.items():
        assert page.scripts == (3 if name == "duel.html" else 2), name


def test_hostile_text_is_shown_not_run(site):
    for path in site.rglob("*.html"):
        assert "<script>document.title" not in path.read_text()
    overview = (site / "index.html").read_text()
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in overview


def test_pages_stay_small(site):
    assert max(path.stat().st_size for path in site.rglob("*.html")) < MOST_BYTES


def test_files_stay_inside_and_have_safe_names(site):
    for path in site.rglob("*"):
        assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", path.name)


def test_answer_with_its_caveat_comes_before_the_matrix(site):
    text = (site / "index.html").read_text()
    places = [text.index(part) for part in ("TL;DR", "Caveat:", ">Ranking<", ">Grades<")]
    assert places == sorted(places)


def test_rubric_isolation_and_red_team_are_on_the_first_page(site):
    text = (site / "index.html").read_text()
    for part in (
        ">Rubric<",
        "bubblewrap",
        "0 of 40 attacks succeeded",
        "No language model took part",
    ):
        assert part in text


def test_bundle_to_download_is_the_one_that_was_graded(site, small_run):
    for path in (site / "bundles").iterdir():
        assert digest(path.read_text()) == path.stem
    assert len(list((site / "bundles").iterdir())) == len(small_run.bundles)


def test_judge_is_named_where_one_was_used(small_run, told):
    cell = small_run.cells[0]
    analysis = cell.dimensions["analysis"].model_copy(
        update={"score": 80.0, "evidence": {"judge": "judge-9"}}
    )
    judged = cell.model_copy(update={"dimensions": cell.dimensions | {"analysis": analysis}})
    page = Site(RunView(cells=[judged]), told=told).render("index.html")
    assert "A language model judged the analysis: judge-9." in page


def test_first_line_says_what_this_is(site):
    text = (site / "index.html").read_text()
    lede = re.search(r'<p class="lede">(.*?)</p>', text)[1]
    assert lede == (
        "Trapline grades code for LLM systems by looking for known bugs. Here 5 entrants answered "
        "4 challenges with 16 traps; graded on 2026-11-15 at isolation level bubblewrap."
    )


def test_standings_have_coverage_cost_tokens_and_date(site):
    text = (site / "index.html").read_text()
    row = re.search(r'<tr data-name="heron">.*?</tr>', text)[0]
    for part in ("4/4", ">1.00<", "20,006", "2026-11-14", '<span class="interval"'):
        assert part in row


def test_entrants_with_few_challenges_are_in_a_block_of_their_own(make_run, told):
    run = make_run(["heron", "otter"], ["rows", "tiles", "tree"])
    made = Site(RunView(cells=run.cells[:4]), told=told)
    page = made.render("index.html")
    assert page.index("Too few challenges for a place") < page.index('data-name="otter"')
    assert "Too few challenges for a place." in made.render("entrants/otter.html")


def test_matrix_has_means_and_marks(small_run, told):
    made = Site(small_run, told=told)
    page = made.render("index.html")
    marks = {square.mark for square in made.reading.field.squares.values()}
    assert marks == {"", "✗", "◆"}
    scores = [cell.score for cell in small_run.cells if cell.challenge == "rows"]
    assert f'<td class="mean">{sum(scores) / len(scores):.1f}</td>' in page
    assert "<b>◆</b> a critical finding: at most 86 points" in page


def test_answer_that_was_not_given_has_a_word(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    none = {"state": "no_answer", "score": 0.0, "letter": "F", "findings": [], "traps": []}
    made = Site(RunView(cells=[run.cells[0], run.cells[1].model_copy(update=none)]), told=told)
    assert ">no answer<" in made.render("index.html")
    assert ">no answer<" in made.render("cells/otter--rows--cpu--1.html")


def test_cell_leads_with_its_gravest_finding(small_run, told, site):
    cell = next(c for c in small_run.cells if len(c.findings) > 1 and c.state in ("pass", "fail"))
    page = (site / Site(small_run, told=told).reading.field.cell_href(cell)).read_text()
    worst = min(cell.findings, key=lambda f: ("critical", "major", "minor").index(f.severity))
    lead = f"The gravest of {len(cell.findings)} findings: {worst.sentence}"
    assert lead in unescape(re.search(r"data-reason>(.*?)</p>", page)[1])
    order = [page.index(part) for part in ("data-reason", 'id="findings"', "Where the score")]
    assert order == sorted(order)
    assert "<mark>   9  " in page
    assert f"trapline reproduce {cell.bundle}.json" in page
    for part in (
        "models.example",
        "temperature 0.7, seed 11",
        "Transcript, redacted",
        "input 2, output 8",
    ):
        assert part in page


def test_only_the_first_finding_is_open(small_run, told):
    cell = next(cell for cell in small_run.cells if len(cell.findings) > 1 and cell.bundle)
    made = Site(small_run, told=told)
    page = made.render(made.reading.field.cell_href(cell))
    assert page.count("<details") > 6
    assert page.count(" open>") == 1


def test_cell_from_before_findings_shows_its_traps(small_run, told):
    cell = next(cell for cell in small_run.cells if cell.findings)
    old = [t.model_copy(update={"state": "fail"}) if t.accuses else t for t in cell.traps]
    made = Site(RunView(cells=[cell.model_copy(update={"findings": [], "traps": old})]), told=told)
    page = made.render(made.reading.field.cell_href(cell))
    for name in cell.fallen():
        assert f'id="trap-{name}"' in page


def test_kill_matrix_lists_mutants_and_what_they_fell_to(small_run, told):
    findings = [
        Outcome(kind="right", subject="solution", fell_to="", message=""),
        Outcome(kind="named", subject="offset-cancels", fell_to="offset-cancels", message="got 0"),
        Outcome(kind="mechanical", subject="solution.py:9:swap", fell_to="", message="survives"),
    ]
    certificate = Certificate(challenge="rows", seed=1, findings=findings)
    page = Site(small_run, told=told, certificates=[certificate]).render("kills.html")
    assert (
        "1 of 1 named mutants were killed; 1 of 1 right answers pass; "
        "0 of 1 mechanical mutants were killed" in page
    )
    footer = page[page.index("<footer") :]
    assert "Every figure on this page is from the certificates of the traps" in footer
    assert "computed from the run's records" not in footer


def test_overview_says_what_a_pass_is(small_run, told):
    """A pass may carry a critical finding: it holds the cases, not the whole contract."""
    page = Site(small_run, told=told).render("index.html")
    passed = sum(cell.state == "pass" for cell in small_run.cells)
    assert f"{passed} hold every contract case" in page
    assert "the whole contract" not in page
    assert "computed from the run's records" in page[page.index("<footer") :]


@pytest.mark.parametrize(
    ("value", "text"), [(-0.004, "0.00"), (0.004, "0.00"), (-0.006, "-0.01"), (1.5, "+1.50")]
)
def test_zero_has_no_sign(value, text):
    assert formats.signed(value) == text


def test_published_certificates_make_a_page_of_bounded_size():
    waiting = {CellKey("heron", name, "cpu", 1): "waiting" for name in load_all()}
    known = read_certificates(PUBLISHED_CERTIFICATES)
    page = Site(RunView(cells=[], waiting=waiting), certificates=known).render("kills.html")
    assert "more mutants were killed" in page
    assert len(page.encode()) < MOST_BYTES


def test_kill_matrix_draws_mutants_and_the_traps_that_notice_them(small_run, told):
    names = [trap.id for trap in told["rows"].traps]
    kills = {names[0]: frozenset(names[:2]), names[1]: frozenset(names[2:3])}
    drawn = told | {"rows": replace(told["rows"], kills=kills)}
    page = Site(small_run, told=drawn).render("kills.html")
    assert "1 of 2 mutants are detected by their own trap" in page
    assert f"<title>{names[0]}: detected by its own trap and 1 other trap</title>" in page
    assert f"<title>{names[1]}: detected by 0 traps, not by its own</title>" in page
    assert page.count('class="missed"') == 1


def test_kill_matrix_of_all_challenges_is_a_small_page():
    challenges = load_all()
    told = describe([], {CellKey("heron", name, "cpu", 1): "waiting" for name in challenges})
    waiting = {CellKey("heron", name, "cpu", 1): "waiting" for name in challenges}
    page = Site(RunView(cells=[], waiting=waiting), told=told).render("kills.html")
    assert page.count('<svg class="kills"') == len(challenges)
    assert len(page.encode()) < MOST_BYTES


def test_preview_has_a_picture_where_the_address_is_known(make_run, told, tmp_path):
    run = make_run(["heron", "otter"], ["rows"])
    write_site(run, tmp_path, told=told, url="https://example.org/run/")
    page = (tmp_path / "cells/heron--rows--cpu--1.html").read_text()
    assert '<meta property="og:image" content="https://example.org/run/preview.png">' in page
    assert (tmp_path / "preview.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    write_site(run, tmp_path, told=told)
    assert "og:image" not in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "preview.png").exists()


def test_chosen_entrants_have_a_page_together(small_run, told):
    made = Site(small_run.only(["heron", "otter", "stoat"]), told=told)
    page = made.render("comparison.html")
    for part in ("Outright wins over", "lines of code", "findings", "time per call", "tokens"):
        assert part in page
    assert "marten" not in made.render("index.html")
    assert not [path for path in made.pages if "marten" in path]
    assert len(made.files) == 2 + len(made.reading.run.bundles)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [(["heron", "lynx"], "no entrant 'lynx'"), (["heron"], "takes 2 to 8 different entrants")],
)
def test_entrants_to_compare_must_exist(small_run, chosen, reason):
    with pytest.raises(UsageError, match=reason):
        small_run.only(chosen)


def test_score_is_plotted_against_cost_and_tokens(small_run, told):
    page = Site(small_run, told=told).render("standings.html")
    assert 'aria-label="Mean score against cost"' in page
    assert 'aria-label="Mean score against tokens"' in page


def test_single_file_holds_every_page_and_no_link_leaves_it(small_run, told):
    made = Site(small_run, told=told)
    page = Page(single_file(made))
    assert {page_id(path) for path in made.pages} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link.startswith(("#", "data:"))
        if link.startswith("#"):
            assert link[1:] in page.ids, link


@pytest.mark.parametrize("path", ["../secret", "cells/../../x", "nothing.html", ""])
def test_unknown_path_has_no_page(small_run, told, path):
    assert Site(small_run, told=told).render(path) is None


def test_run_without_any_grade_has_a_report(told):
    planned = {CellKey("heron", "rows", "cpu", 1): "waiting"}
    page = Site(RunView(cells=[], waiting=planned), told=told, live=True).render("index.html")
    assert "Nothing was measured, so nothing can be concluded." in page
    assert "waiting" in page


def test_several_attempts_share_a_square_and_link_each_other(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    again = run.cells[0].model_copy(update={"attempt": 2, "score": 50.0, "letter": "F"})
    made = Site(RunView(cells=[*run.cells, again]), told=told)
    assert "· 2×" in made.render("index.html")
    assert "cells/heron--rows--cpu--2.html" in made.render("cells/heron--rows--cpu--1.html")


def test_cost_is_on_the_cell_and_in_the_standings(make_run, told):
    run = make_run(["one", "two"], ["rows"])
    spent = Origin(input_tokens=12_340, output_tokens=2050, turns=7, seconds=185.0, cost_usd=0.125)
    silent = [cell.model_copy(update={"origin": None}) for cell in run.cells]
    cells = [silent[0].model_copy(update={"origin": spent}), silent[1]]
    made = Site(RunView(cells=cells), told=told)
    told_of = "12,340 tokens in, 2,050 out, 7 turns, 3 min 5 s, 0.12 USD"
    pages = [made.render(f"cells/{name}--rows--cpu--1.html") for name in ("one", "two")]
    assert [told_of in page for page in pages] == [True, False]
    standings = made.render("standings.html")
    assert "Tokens, time and cost of the answers" in standings
    assert standings.count("3 min 5 s") == 1
    assert "Tokens, time and cost of the answers" not in Site(RunView(silent), told=told).render(
        "standings.html"
    )


def test_attempts_have_pass_at_k_and_a_spread(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    first = run.cells[0].model_copy(update={"state": "pass", "score": 90.0})
    again = first.model_copy(update={"attempt": 2, "state": "fail", "score": 50.0})
    page = Site(RunView(cells=[first, again, run.cells[1]]), told=told).render("standings.html")
    row = re.search(r'<th scope="row">heron</th>(<td>2</td>.*?)</tr>', page)[1]
    assert re.findall("<td>(.*?)</td>", row) == ["2", "50 %", "100 %", "28.3"]
    assert "pass@" not in Site(run, told=told).render("standings.html")


def test_methodology_says_whether_grading_noise_is_inside(small_run, told):
    assert "deviation of 0.3 points, from four gradings" in Site(small_run, told=told).render(
        "methodology.html"
    )
    cell = small_run.cells[0]
    past = [cell, cell.model_copy(update={"score": cell.score - 2.0})]
    again = replace(small_run, history=past)
    text = Site(again, told=told).render("methodology.html")
    assert "1 cell graded again differ by a standard deviation of 1.41 points" in text


def test_planted_flaws_have_a_column_and_a_table(make_run, told):
    run = make_run(["one", "two"], ["rows"])
    outcomes = ("noticed", "followed")
    cells = [c.model_copy(update={"flaw": o}) for c, o in zip(run.cells, outcomes, strict=True)]
    made = Site(RunView(cells=cells), told=told)
    page = made.render("challenges/rows.html")
    assert "Planted flaw" in page
    assert [f"<td>{outcome}</td>" in page for outcome in outcomes] == [True, True]
    assert "planted flaw: followed" in made.render("cells/two--rows--cpu--1.html")
    assert "Who noticed the planted flaws" in made.render("standings.html")
    assert "Planted flaw" not in Site(run, told=told).render("challenges/rows.html")


def test_tracks_have_columns_of_their_own(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    gpu = [cell.model_copy(update={"track": "gpu"}) for cell in run.cells]
    page = Site(RunView(cells=[*run.cells, *gpu]), told=told).render("index.html")
    assert "Layer norm backward (gpu)" in page


def test_pages_of_a_hundred_entrants_have_bounded_size(make_run, told):
    run = make_run([f"entrant-{n:03d}" for n in range(100)], ["rows", "tiles"])
    made = Site(run, told=told)
    assert not [path for path in made.pages if path.startswith("duels/")]
    for path in ("index.html", "duel.html", "challenges/rows.html"):
        assert len(made.render(path).encode()) < MOST_BYTES


def test_odd_names_make_whole_reports(make_run, told, tmp_path):
    names = ["名前", "$x^$", "a\nb", "\u202eevil", "'\";&", "x" * 300]
    index = write_site(make_run(names, ["rows"]), tmp_path, told=told)
    assert index.is_file()
    assert len(list((tmp_path / "entrants").iterdir())) == len(names)


def test_pages_of_an_earlier_report_do_not_stay(make_run, told, tmp_path):
    write_site(make_run(["heron", "otter"], ["rows"]), tmp_path, told=told)
    (tmp_path / "mine.txt").write_text("kept")
    with (tmp_path / MANIFEST).open("a") as manifest:
        manifest.write("../outside.html\n")
    (tmp_path.parent / "outside.html").write_text("kept")
    write_site(make_run(["heron"], ["rows"]), tmp_path, told=told)
    assert not list(tmp_path.glob("*/otter*"))
    assert not list((tmp_path / "duels").iterdir())
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path.parent / "outside.html").exists()


def test_foreign_manifest_removes_nothing(make_run, told, tmp_path):
    (tmp_path / "manifest.txt").write_text("data.csv\n")
    (tmp_path / "data.csv").write_text("kept")
    for _ in range(2):
        write_site(make_run(["heron"], ["rows"]), tmp_path, told=told)
    assert (tmp_path / "data.csv").exists()
    assert (tmp_path / "manifest.txt").read_text() == "data.csv\n"


@pytest.mark.full
def test_a_hundred_entrants_on_eight_challenges_make_a_whole_site(make_run, told, tmp_path):
    run = make_run([f"entrant-{n:03d}" for n in range(100)], list(told))
    seconds = []
    # Other work on the machine makes the same instructions slower: the best of three counts.
    while len(seconds) < 3 and min(seconds, default=MOST_SECONDS) >= MOST_SECONDS:
        started = time.process_time()
        write_site(run, tmp_path, told=told)
        seconds.append(time.process_time() - started)
    assert min(seconds) < MOST_SECONDS
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.html")]
    assert len(sizes) > 900
    assert max(sizes) < MOST_BYTES


def test_every_cell_trap_and_duel_has_a_link_to_copy(site):
    for folder in ("cells", "duels"):
        assert all("data-copy-link" in path.read_text() for path in (site / folder).iterdir())
    for path in (site / "challenges").iterdir():
        text = path.read_text()
        anchors = re.findall(r'<li data-bug class="[^"]*" id="([^"]+)">', text)
        assert anchors
        assert all(f'data-copy-link="{anchor}"' in text for anchor in anchors)
