"""One cell: its findings first; cases, dimensions, origin and source are folded."""

from typing import Any

from markupsafe import Markup

from trapline.arena.judge.draws import is_held_out
from trapline.arena.record import DIMENSIONS, Bundle, Cell, Origin
from trapline.arena.report import evidence, findings, source
from trapline.arena.report.field import WORDS, Column, letter_class, word
from trapline.arena.report.findings import ShownFinding
from trapline.arena.report.pages import gpu
from trapline.arena.report.reading import Reading
from trapline.arena.standings.costs import total_cost
from trapline.arena.standings.criteria import BY_NAME

MOST_FILES = 12
#: Characters of all files of one page together, and of its transcript.
MOST_SOURCE = 60_000
MOST_TRANSCRIPT = 40_000
#: Findings that are open when the page is.
OPEN_FINDINGS = 1


def context(reading: Reading, cell: Cell) -> dict[str, Any]:
    challenge = reading.field.challenges[cell.challenge]
    square = reading.field.square(cell.entrant, Column(cell.challenge, cell.track))
    bundle = reading.run.bundles.get(cell.bundle)
    shown, left_out = files(bundle) if bundle else ([], 0)
    graded = cell.letter and cell.state not in WORDS
    state_class = "s-" + cell.state.replace("_", "-")
    found = findings.shown(cell, challenge, bundle)
    return {
        "title": f"{cell.entrant}: {challenge.title}",
        "cell": cell,
        "held_out": is_held_out(cell.seed),
        "challenge": challenge,
        "siblings": square.attempts,
        "cost": total_cost([cell]),
        "shown": cell.letter if graded else word(cell.state, [cell]),
        "heat": letter_class(cell.letter) if graded and cell.letter else state_class,
        "lead": lead(cell, found),
        "finding_count": findings.counted([one.finding for one in found]),
        "groups": _groups(found),
        "open_findings": OPEN_FINDINGS,
        **_checks(cell),
        "dimensions": [
            (name, cell.dimensions[name], evidence.rows(cell.dimensions[name].evidence))
            for name in DIMENSIONS
            if name in cell.dimensions and cell.dimensions[name].score is not None
        ],
        "measures": [(name, measure_text(name, cell)) for name in cell.measures],
        "unmeasured": [
            (name, dimension.reason)
            for name, dimension in cell.dimensions.items()
            if dimension.score is None
        ],
        "gpu": gpu.context(cell, bundle),
        "microseconds": gpu.microseconds,
        "leaks": bundle.raw.get("contamination", []) if bundle else [],
        "origin": origin_rows(cell.origin) if cell.origin else [],
        "transcript": _transcript(bundle),
        "files": shown,
        "left_out": left_out,
        "bundle_href": f"bundles/{cell.bundle}.json" if bundle else "",
    }


def measure_text(name: str, cell: Cell) -> str:
    """A figure that the challenge names, with its unit."""
    value = cell.measures[name]
    return BY_NAME[name].text(value) if name in BY_NAME else evidence.number(value)


def _checks(cell: Cell) -> dict[str, Any]:
    return {
        "failed_cases": [case for case in cell.cases if case.state == "fail"],
        "passed_cases": [case for case in cell.cases if case.state == "pass"],
        "held": [trap for trap in cell.traps if trap.state == "pass"],
        "behind": [trap for trap in cell.traps if trap.state in ("hidden", "crashed")],
        "unasked": [check for check in [*cell.cases, *cell.traps] if not check.was_asked],
    }


def lead(cell: Cell, found: list[ShownFinding]) -> str:
    """The likely bug in a sentence; without findings, why the state is what it is."""
    if not found or cell.state in WORDS:
        return findings.opening(cell.reason)
    first = found[0]
    if first.finding.cause == "unnamed":
        kind = "A bug that no trap names"
    elif len(found) > 1:
        kind = f"The gravest of {len(found)} findings"
    else:
        kind = "The bug" if first.finding.certainty == "confirmed" else "The likely bug"
    return f"{kind}: {first.finding.sentence}"


def _groups(found: list[ShownFinding]) -> list[tuple[str, list[ShownFinding]]]:
    bugs = [one for one in found if one.finding.dimension == "traps"]
    accepted = [one for one in found if one.finding.dimension != "traps"]
    groups = [("Bugs", bugs), ("Bad input that it does not refuse", accepted)]
    return [(title, members) for title, members in groups if members]


def origin_rows(origin: Origin) -> list[tuple[str, str]]:
    """What is known about the making of the answer, as (label, text)."""
    rows = [
        ("answered", origin.answered.replace("T", " ")[:16]),
        ("provider", origin.provider),
        ("model version", origin.model_version),
        ("harness version", origin.harness_version),
        ("status", origin.status),
        ("sampling", _pairs(origin.sampling)),
        ("USD per million tokens", _pairs(origin.price_usd)),
        ("limits", _pairs(origin.limits)),
    ]
    return [(label, text) for label, text in rows if text]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {evidence.text(v)}" for name, v in values.items())


def _transcript(bundle: Bundle | None) -> list[tuple[str, str]]:
    """Who said what, in order, up to the limit of a page."""
    steps = bundle.raw.get("transcript", []) if bundle else []
    shown, room = [], MOST_TRANSCRIPT
    for step in steps:
        text = str(step.get("message", ""))
        shown.append((str(step.get("source", "")), evidence.cut(text, max(room, 2))))
        room -= len(text)
        if room <= 0:
            break
    return shown


def files(bundle: Bundle) -> tuple[list[tuple[str, Markup, str]], int]:
    """The submitted text files, the solution first, up to the limits of a page."""
    ordered = sorted(bundle.files.items(), key=lambda item: (_rank(item[0]), item[0]))
    shown: list[tuple[str, Markup, str]] = []
    room = MOST_SOURCE
    for path, text in ordered[:MOST_FILES]:
        if room <= 0:
            break
        part = text[:room]
        lines = text.count("\n") + bool(text and not text.endswith("\n"))
        cut = min(len(part), source.LONGEST)
        note = f"{lines} lines" + ("" if cut >= len(text) else f", the first {cut} characters")
        shown.append((path, source.render(path, part), note))
        room -= cut
    return shown, len(bundle.files) + len(bundle.binary_files) - len(shown)


def _rank(path: str) -> int:
    if path in ("solution.py", "solution.cu"):
        return 0
    return 1 if path.endswith((".py", ".cu")) else 2
