"""What was said, what was measured: a published report beside the grades of the same answers."""

from collections.abc import Sequence

from trapline.arena.report.markdown.syntax import join, table, text
from trapline.arena.report.runview import RunView
from trapline.arena.report.said_measured import (
    ABOUT_CLAIMS,
    ABOUT_ORDERS,
    DECISIONS,
    LEDE,
    SESSION_HEADS,
    TITLE,
    SaidMeasured,
    interval,
    said_measured,
    session_figures,
    tau,
)
from trapline.arena.studies.claims import CheckedClaim
from trapline.arena.studies.said import Agreement, SaidCell


def document(run: RunView) -> str:
    """The page; empty where the run holds no answer that the report speaks of."""
    found = said_measured(run)
    if found is None:
        return ""
    claims = [
        block
        for decision, title in DECISIONS.items()
        for block in (f"### {title}", _claims(found.decided(decision)))
    ]
    return join(
        f"# {TITLE}",
        LEDE,
        found.summary,
        "## Each answer",
        _cells(found.cells),
        *map(text, found.equal_sentences),
        "## Agreement of the two orders",
        ABOUT_ORDERS,
        _agreements(found.letters),
        "### Each criterion of the report, against the measured score",
        _agreements(found.criteria),
        "## Claims",
        ABOUT_CLAIMS,
        *claims,
        *_sessions(found),
    )


def _cells(found: Sequence[SaidCell]) -> list[str]:
    heads = ("challenge", "model", "said", "measured", "score", "findings")
    rows = [
        (
            one.challenge,
            one.model,
            one.said,
            one.letter or one.state.replace("_", " "),
            "–" if one.score is None else f"{one.score:.1f}",
            one.measured,
        )
        for one in found
    ]
    return table(heads, rows)


def _agreements(found: Sequence[Agreement]) -> list[str]:
    if not found:
        return ["The run holds no answer to which the report gave points."]
    rows = [
        (
            one.of,
            tau(one.tau),
            interval(one),
            one.alike,
            one.opposite,
            one.pairs - one.alike - one.opposite,
        )
        for one in found
    ]
    heads = ("of", "τ", "95 %", "pairs alike", "opposite", "tied in one of the two")
    return table(heads, rows)


def _claims(claims: Sequence[CheckedClaim]) -> list[str]:
    if not claims:
        return ["None."]
    heads = ("challenge", "model", "claim", "said", "found", "by")
    return table(
        heads,
        [(one.challenge, one.model, one.quantity, one.said, one.found, one.by) for one in claims],
    )


def _sessions(found: SaidMeasured) -> list[list[str] | str]:
    if not found.sessions:
        return []
    rows = [(model, challenge, *session_figures(o)) for model, challenge, o in found.sessions]
    return ["## What the sessions took", table(("model", "challenge", *SESSION_HEADS), rows)]
