"""The report in a real browser: reading, clicking, keys, dark mode, a run that goes on."""

from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe

from trapline.arena.record import CellKey
from trapline.arena.report.runview import RunView
from trapline.arena.report.single_file import single_file
from trapline.arena.report.site import Site

SECONDS = 60_000
KINDS = (
    "index.html",
    "standings.html",
    "duel.html",
    "traps.html",
    "kills.html",
    "methodology.html",
    "entrants/otter.html",
    "challenges/tiles.html",
    "cells/otter--tiles--cpu--1.html",
    "duels/heron--marten.html",
)


@pytest.fixture
def open_page(browser):
    """Opens pages; afterwards none of them may have complained or asked for anything elsewhere."""
    contexts, troubles = [], []

    def start(**options):
        context = browser.new_context(**options)
        context.set_default_timeout(SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on(
            "request",
            lambda request: troubles.append(request.url) if _is_outside(request.url) else None,
        )
        return page

    yield start
    for context in contexts:
        context.close()
    assert troubles == []


def _is_outside(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("file", "data", "blob") and parts.hostname != "127.0.0.1"


def address(site, name="index.html"):
    return (site / name).as_uri()


def test_matrix_leads_to_the_failed_trap_of_a_cell(site, small_run, open_page):
    cell = next(c for c in small_run.cells if c.findings and c.state == "pass")
    mark = ["◆"] if any(f.severity == "critical" for f in cell.findings) else []
    page = open_page()
    page.goto(address(site))
    row = page.locator(f".matrix tr[data-name='{cell.entrant}']")
    square = row.locator(f"a[href*='--{cell.challenge}--']")
    assert square.inner_text().split() == [cell.letter, *mark, f"{cell.score:.1f}"]
    square.click()
    page.wait_for_url("**/cells/*.html")
    failed = page.locator(f"#trap-{cell.fallen()[0]}")
    page.goto(f"{page.url.split('#')[0]}#trap-{cell.fallen()[0]}")
    assert "row 3: got 0.25, expected 0.75" in failed.locator("pre.message").inner_text()


def test_states_without_a_letter_are_words(site, open_page):
    page = open_page()
    page.goto(address(site))
    assert page.locator("#square--marten--ternary--cpu").inner_text() == "error"
    assert page.locator("#square--otter--ternary--cpu").inner_text() == "hack"
    assert page.locator("#square--stoat--ternary--cpu").inner_text() == "—"


def test_hostile_text_does_nothing(site, small_run, open_page):
    name = small_run.cells[-1].entrant
    page = open_page()
    page.goto(address(site))
    page.get_by_role("link", name=name).first.click()
    page.wait_for_url("**/entrants/*.html")
    assert page.locator("h1").inner_text() == name
    page.locator("tbody a").first.click()
    page.wait_for_url("**/cells/*.html")
    page.locator("summary", has_text="solution.py").first.click()
    shown = page.locator("pre.source[aria-label='solution.py']").inner_text()
    assert "</script><script>document.title" in shown
    assert page.title().endswith("Trapline")


def test_two_entrants_are_compared(site, open_page):
    page = open_page()
    page.goto(address(site, "duel.html"))
    page.select_option("#duel-a", label="heron")
    page.select_option("#duel-b", label="stoat")
    shown = page.locator("[data-verdict]").inner_text()
    assert shown == "heron leads 3–0–0 (won–lost–tied)."
    page.reload()
    assert page.locator("[data-verdict]").inner_text() == shown
    page.get_by_role("link", name="3–0–0").first.click()
    page.wait_for_url("**/duels/*.html")
    assert "leads 3-0-0" in page.locator("[data-verdict]").inner_text()


def test_script_and_python_agree_on_every_duel(site, small_run, told, open_page):
    from trapline.arena.standings.duel import duel

    page = open_page()
    page.goto(address(site, "duel.html"))
    names = sorted({cell.entrant for cell in small_run.cells})
    for a in names:
        for b in names:
            if a != b:
                page.select_option("#duel-a", label=a)
                page.select_option("#duel-b", label=b)
                tally = duel(small_run.cells, [a, b]).record(a, b)
                best, least = max(tally.won, tally.lost), min(tally.won, tally.lost)
                assert f"{best}–{least}–{tally.tied}" in page.locator("[data-verdict]").inner_text()


def test_script_rounds_points_as_python_does(site, open_page):
    page = open_page()
    page.goto(address(site, "duel.html"))
    values = [0.0, 77.25, 77.75, 77.3, 99.95, 100.0, *(n / 20 for n in range(40, 80))]
    assert page.evaluate(f"{values}.map(points)") == [f"{value:.1f}" for value in values]


def test_dark_mode_is_toggled_and_remembered(site, open_page):
    page = open_page(color_scheme="light")
    page.goto(address(site))

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    button = page.get_by_role("button", name="Dark mode")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    dark = background()
    assert dark != light

    def remembered():
        page.reload()
        return background() == dark

    # The browser stores a choice when it finds the time: on a busy machine a reload is faster.
    assert any(remembered() for _ in range(20))


def test_system_scheme_holds_until_one_is_chosen(site, open_page):
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    colours = []
    for page in (light, dark):
        page.goto(address(site))
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_keyboard_walks_through_the_matrix(site, open_page):
    page = open_page()
    page.goto(address(site))
    page.locator("#square--heron--rows--cpu a").focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    focused = page.evaluate("document.activeElement.closest('td').id")
    assert focused == "square--marten--tiles--cpu"
    page.keyboard.press("Enter")
    page.wait_for_url("**/cells/marten--tiles--cpu--1.html")


def test_standings_are_sorted_by_a_click(site, open_page):
    page = open_page()
    page.goto(address(site))
    column = page.locator("#standings table.standings").first

    def values():
        cells = column.locator("tbody tr td:nth-child(3)").all_inner_texts()
        return [float(text) for text in cells]

    head = column.get_by_role("button", name="Mean score")
    head.click()
    assert values() == sorted(values())
    assert column.locator("th[aria-sort=ascending]").count() == 1
    head.click()
    assert values() == sorted(values(), reverse=True)


def test_search_finds_bugs_by_any_word(site, open_page):
    page = open_page()
    page.goto(address(site, "traps.html"))
    box = page.get_by_role("searchbox")
    box.fill("variance tiles-does-not-exist")
    assert page.locator("#bugs tbody tr:visible").count() == 0
    box.fill("flash CONTIGUOUS")
    rows = page.locator("#bugs tbody tr:visible").all_inner_texts()
    assert rows
    assert all("Flash" in row and "contiguous" in row for row in rows)
    box.fill("")
    assert page.locator("#bugs tbody tr:visible").count() > len(rows)


def test_link_to_a_folded_finding_opens_it(site, small_run, open_page):
    cell = next(cell for cell in small_run.cells if len(cell.findings) > 1 and cell.bundle)
    page = open_page()
    path = f"cells/{cell.entrant}--{cell.challenge}--cpu--1.html"
    page.goto(address(site, path))
    folded = page.locator("details.finding:not([open])").first
    name = folded.get_attribute("id")
    page.goto(address(site, path) + f"#{name}")
    assert page.locator(f"#{name}[open]").count() == 1


def test_link_and_command_are_copied(serve, small_run, open_page):
    cell = next(cell for cell in small_run.cells if cell.findings and cell.bundle)
    server = serve(lambda: small_run)
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"{server.url}cells/{cell.entrant}--{cell.challenge}--cpu--1.html")
    page.locator("details.finding[open] button[data-copy-link]").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "#trap-" in copied
    assert copied.startswith(server.url)
    page.locator("details.finding[open] button[data-copy]").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("trapline reproduce ")


def test_single_file_shows_one_page_at_a_time(small_run, told, open_page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(single_file(Site(small_run, told=told)))
    for scripts in (True, False):
        page = open_page(java_script_enabled=scripts)
        page.goto(path.as_uri())
        assert page.locator("section.page:visible").count() == 1
        assert page.locator("h1:visible").inner_text() == "Run made-up"
        page.locator(".matrix a.square:visible").first.click()
        assert page.locator("section.page:visible").count() == 1
        assert page.locator("h1:visible").inner_text() == "heron on Layer norm backward"
        page.get_by_role("link", name="Duel").first.click()
        assert page.locator("h1:visible").inner_text() == "Head to head"
    page = open_page()
    page.goto(path.as_uri() + "#duel")
    page.select_option("#duel-b", label="otter")
    page.locator("#duel-result a").first.click()
    assert " on " in page.locator("h1:visible").inner_text()


def test_print_on_a4_shows_what_is_folded_and_cuts_nothing(site, open_page):
    page = open_page(viewport={"width": 690, "height": 1000})
    page.emulate_media(media="print")
    for name in KINDS:
        page.goto(address(site, name))
        assert page.evaluate("document.documentElement.scrollWidth") <= 690, name
    page.goto(address(site, "cells/otter--tiles--cpu--1.html"))
    shown = page.locator("pre.source[aria-label='solution.py']")
    assert shown.bounding_box()["height"] > 100


def test_search_dims_no_row_that_matches_in_the_kill_matrix(small_run, told, open_page, tmp_path):
    names = [trap.id for trap in told["rows"].traps]
    drawn = told | {"rows": replace(told["rows"], kills={n: frozenset([n]) for n in names})}
    path = tmp_path / "kills.html"
    path.write_text(Site(small_run, told=drawn).render("kills.html"))
    page = open_page()
    page.goto(path.as_uri())
    page.get_by_role("searchbox").fill(names[0])
    assert page.locator("svg.kills g:not([hidden])").count() == 1


def test_skip_link_is_the_first_stop(site, open_page):
    page = open_page()
    page.goto(address(site))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_phone_shows_no_page_wider_than_itself(site, open_page):
    page = open_page(viewport={"width": 390, "height": 800})
    for name in KINDS:
        page.goto(address(site, name))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_page_reads_without_scripts(site, open_page):
    page = open_page(java_script_enabled=False)
    page.goto(address(site))
    assert page.locator(".matrix tbody tr").count() == 5
    page.goto(address(site, "duel.html"))
    assert page.locator("#duel-result").is_hidden()
    assert page.get_by_role("link", name="3–0–0").first.is_visible()


# Dark differs from light in its colours only; `test_contrast` has all pairs of them.
LIGHT = {"resultTypes": ["violations"]}
DARK = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}


@pytest.mark.parametrize(
    ("scheme", "rules", "kinds"),
    [("light", LIGHT, KINDS), ("dark", DARK, ("index.html", "duel.html", *KINDS[6:9]))],
    ids=["light", "dark"],
)
def test_axe_finds_no_serious_violation(site, open_page, scheme, rules, kinds):
    page = open_page(color_scheme=scheme)
    found = []
    for name in kinds:
        page.goto(address(site, name))
        for violation in Axe().run(page, options=rules).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = [node["html"][:160] for node in violation["nodes"][:3]]
                found.append((name, violation["id"], nodes))
    assert found == []


def test_view_follows_a_run_without_a_reload(make_run, serve, open_page):
    run = make_run(["heron", "otter"], ["rows"])
    planned = CellKey("otter", "rows", "cpu", 1)
    now = {"run": RunView(cells=run.cells[:1], waiting={planned: "waiting"}, bundles=run.bundles)}
    server = serve(lambda: now["run"])
    page = open_page()
    page.goto(server.url)
    page.evaluate("window.sameDocument = true")
    square = page.locator("#square--otter--rows--cpu")
    assert square.get_attribute("data-state") == "waiting"

    now["run"] = RunView(cells=run.cells[:1], waiting={planned: "running"}, bundles=run.bundles)
    page.wait_for_selector("#square--otter--rows--cpu[data-state=running]")
    now["run"] = run
    page.wait_for_selector("#square--otter--rows--cpu a[href^='cells/']")
    page.wait_for_selector("#standings tr[data-name=otter]")
    page.wait_for_function(
        "document.querySelector('[data-progress]').textContent === 'finished: 2 graded'"
    )
    assert square.inner_text().split()[0] == run.cells[1].letter
    assert page.evaluate("window.sameDocument") is True
    square.locator("a").click()
    page.wait_for_url("**/cells/otter--rows--cpu--1.html")
