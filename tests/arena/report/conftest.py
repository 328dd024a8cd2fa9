"""A made-up run: entrants of known strength on made-up challenges, reproducible from a seed."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapline.arena.judge import rubric
from trapline.arena.record import Bundle, Cell, CheckResult, Dimension, Finding, Origin
from trapline.arena.report.catalog import ChallengeInfo, TrapInfo
from trapline.arena.report.runview import RunView
from trapline.arena.report.server import LiveRun, ViewServer
from trapline.arena.runs.store import canonical, digest

CHROMIUM = "/usr/bin/chromium"
QUIET = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-sync",
    "--no-first-run",
    "--metrics-recording-only",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication",
)
STARTED = datetime(2026, 11, 15, 12, tzinfo=UTC)
HOSTILE_NAME = "<script>document.title='owned'</script>"
HOSTILE_SOURCE = "x = '</script><script>document.title=\"owned\"</script>'\n"
SOURCE = '''"""Normalises rows."""

import numpy as np


def layer_norm(x, gamma, beta, eps=1e-5):
    # Centre first: the other order loses digits.
    centred = x - x.mean(-1, keepdims=True)
    rstd = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return gamma * centred * rstd + beta
'''
TITLES = {
    "rows": ("Layer norm backward", "medium"),
    "topk": ("Fused softmax and top-k", "medium"),
    "cache": ("Key-value cache", "medium"),
    "tiles": ("Flash attention forward", "hard"),
    "beams": ("Beam search", "hard"),
    "gradient": ("Flash attention backward", "extra hard"),
    "tree": ("DFlash", "extra hard"),
    "ternary": ("Ternary training", "research"),
}
TRAPS = (
    TrapInfo(
        "offset-cancels", "variance as E[x²] − E[x]²", "critical", "Seen where means are large."
    ),
    TrapInfo("strided-view", "assumes contiguous input", "major", "Seen with transposed views."),
    TrapInfo("kept-state", "keeps state between calls", "major", "Seen in a cached buffer."),
    TrapInfo("empty-batch", "fails on an empty batch", "minor", "Seen at the end of a data set."),
)
WEIGHTS = {
    "correctness": 0.3,
    "traps": 0.3,
    "precision": 0.1,
    "memory": 0.1,
    "speed": 0.1,
    "tests": 0.1,
}
SIZES = [256, 512, 1024, 2048]


def challenge_infos() -> dict[str, ChallengeInfo]:
    return {
        name: ChallengeInfo(
            id=name,
            title=title,
            difficulty=difficulty,
            summary=f"{title}, so that every input that the contract allows gets a right answer.",
            prompt=f"# {title}\n\nWrite `solve(x)`.\n",
            weights=WEIGHTS,
            traps=TRAPS,
        )
        for name, (title, difficulty) in TITLES.items()
    }


def make_cell(
    entrant: str, challenge: str, strength: float, rng: np.random.Generator, **changes: Any
) -> Cell:
    """A graded cell; strength in 0–1 decides how much goes wrong."""
    fell = rng.random(len(TRAPS)) > strength + 0.15
    traps = [
        CheckResult(
            id=trap.id,
            state="sprung" if bad else "pass",
            dimension="traps",
            message=f"row 3: got 0.25, expected 0.75 ({trap.catches})" if bad else "",
        )
        for trap, bad in zip(TRAPS, fell, strict=True)
    ]
    findings = [
        Finding(
            cause=trap.id,
            certainty="confirmed",
            severity=trap.severity,
            sentence=f"{trap.catches}.",
            explains=[trap.id],
            penalty=rubric.PENALTY[trap.severity],
            call="layer_norm(float32[4, 8] from -1 to 1)",
            where="solution.py:9 in layer_norm",
        )
        for trap, bad in zip(TRAPS, fell, strict=True)
        if bad
    ]
    holds = bool(rng.random() < strength + 0.4)
    cases = [
        CheckResult(
            id="matches-oracle",
            state="pass" if holds else "fail",
            message="" if holds else "off by 2",
        ),
        CheckResult(id="refuses-integers", state="pass"),
    ]
    dimensions = make_dimensions(strength, 1 - fell.mean(), holds, rng)
    state = "pass" if holds else "fail"
    score = rubric.score(state, dimensions, WEIGHTS, critical=bool(fell[0]))
    fields: dict[str, Any] = {
        "entrant": entrant, "challenge": challenge, "state": state, "score": score,
        "letter": rubric.letter(score or 0.0), "isolation": "bubblewrap", "dimensions": dimensions,
        "cases": cases, "traps": traps, "findings": findings,
        "submission_digest": "5" * 64, "challenge_digest": "c" * 64,
        "reason": "every case holds" if holds else "1 of 2 cases does not hold: matches-oracle",
        "seed": 7, "versions": {"numpy": "2.3"}, "started": STARTED, "seconds": 2.5,
    }  # fmt: skip
    return Cell(**(fields | changes))


def make_dimensions(
    strength: float, held: float, holds: bool, rng: np.random.Generator
) -> dict[str, Dimension]:
    ratio, exponent = float(10 ** (2 * (1 - strength) * rng.random())), 1.0 + (1 - strength)
    speed = float(np.exp(rng.normal(strength - 0.8, 0.3)))
    peaks = [int(4e5 * (size / 256) ** exponent) for size in SIZES]

    def noisy(value: float) -> float:
        return round(float(np.clip(100 * value + rng.normal(0, 4), 0, 100)), 1)

    memory = {"exponent": exponent, "sizes": SIZES, "extra_bytes": peaks}
    timing = {"ratio": speed, "milliseconds": {"reference": 5.0, "submission": 5.0 / speed}}
    measured = {
        "precision": (f"{ratio:.2f} times careful", {"ratios": [ratio, 1.0]}),
        "memory": (f"grows as N^{exponent:.2f}", memory),
        "speed": (f"{speed:.2f} times the reference", timing),
        "tests": ("kills mutants", {"own": {"passed": 6, "failed": 0, "code": 0}}),
    }
    return {
        "correctness": Dimension(score=100.0 if holds else 50.0, reason="cases that hold"),
        "traps": Dimension(score=round(100 * held, 1), reason="traps avoided"),
        "analysis": Dimension(score=None, reason="no judge was named"),
    } | {
        name: Dimension(score=noisy(strength), reason=reason, evidence=evidence)
        for name, (reason, evidence) in measured.items()
    }


def make_origin(place: int, number: int) -> Origin:
    return Origin(
        status="solved",
        provider="models.example",
        model_version=f"model-{place}-2026-10",
        answered="2026-11-14T09:30:00+00:00",
        input_tokens=1000 + number,
        output_tokens=4000 - 10 * place,
        turns=2,
        cost_usd=0.25 * (place + 1),
        seconds=61.5,
        sampling={"temperature": 0.7, "seed": 11},
        price_usd={"input": 2.0, "output": 8.0},
        limits={"rounds": 2},
    )


def with_bundle(cell: Cell, source: str) -> tuple[Cell, Bundle]:
    files = {
        "solution.py": source,
        "test_solution.py": "def test_one():\n    assert True\n",
        "ANALYSIS.md": "# Why\n\nBecause.\n",
    }
    said = [
        {"source": "user", "message": "Write `solve(x)`."},
        {"source": "agent", "message": "Done."},
    ]
    bundle = Bundle(cell=cell, files=files, raw={"transcript": said})
    return cell.model_copy(update={"bundle": digest(canonical(bundle))}), bundle


def build_run(
    entrants: Sequence[str], challenges: Sequence[str], source: str = SOURCE, seed: int = 3
) -> RunView:
    """Strengths fall from the first entrant to the last."""
    rng = np.random.default_rng(seed)
    cells, bundles = [], {}
    for place, entrant in enumerate(entrants):
        strength = 0.95 - 0.6 * place / max(1, len(entrants) - 1)
        for number, challenge in enumerate(challenges):
            changes = {
                "harness": ("plain", "full")[place % 2],
                "origin": make_origin(place, number),
                "started": STARTED + timedelta(minutes=number),
            }
            cell = make_cell(entrant, challenge, strength, rng, **changes)
            cell, bundle = with_bundle(cell, source)
            cells.append(cell)
            bundles[cell.bundle] = bundle
    return RunView(
        cells=cells,
        bundles=bundles,
        name="made-up",
        meta={"red_team": {"attacks": 40, "successes": 0}},
    )


@pytest.fixture(scope="session")
def told() -> dict[str, ChallengeInfo]:
    return challenge_infos()


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunView]:
    return build_run


@pytest.fixture(scope="session")
def cell_maker() -> Callable[..., Cell]:
    return make_cell


@pytest.fixture(scope="session")
def small_run() -> RunView:
    """Five entrants on four challenges: a hack, an error of ours, an absence, hostile text."""
    run = build_run(
        ["heron", "marten", "otter", "stoat", HOSTILE_NAME],
        ["rows", "tiles", "tree", "ternary"],
        SOURCE + HOSTILE_SOURCE,
    )
    cells = list(run.cells)
    nothing: dict[str, Any] = {
        "score": None,
        "letter": None,
        "dimensions": {},
        "cases": [],
        "traps": [],
        "findings": [],
        "bundle": "",
    }
    cells[7] = cells[7].model_copy(
        update=nothing | {"state": "infra_error", "reason": "the sandbox could not start"}
    )
    cells[11] = cells[11].model_copy(
        update={"state": "hack", "score": 0.0, "letter": "F", "reason": "it replaced the clock"}
    )
    del cells[15]
    return RunView(cells=cells, bundles=run.bundles, name=run.name, meta=run.meta)


@pytest.fixture
def serve(told: dict[str, ChallengeInfo]) -> Iterator[Callable[..., ViewServer]]:
    """Starts servers of a live view, each on a port of its own; all end with the test."""
    servers = []

    def start(read: Callable[[], RunView]) -> ViewServer:
        server = ViewServer(LiveRun(read, told=told))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# No longer than a module: while Playwright is up, its event loop would be in the way of others'.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that talks to nobody by itself."""
    if not shutil.which(CHROMIUM):
        if os.environ.get("TRAPLINE_NO_SKIP") == "1":
            pytest.fail(f"{CHROMIUM} is missing")
        pytest.skip(f"{CHROMIUM} is missing")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(
    small_run: RunView, told: dict[str, ChallengeInfo], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The small run's report on disk."""
    from trapline.arena.report.site import write_site

    out = tmp_path_factory.mktemp("report")
    write_site(small_run, out, told=told)
    return out
