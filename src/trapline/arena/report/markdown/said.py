"""What was said, what was measured: a published report beside the grades of the same answers."""

from collections.abc import Sequence

from trapline.arena.record import Cell
from trapline.arena.report.markdown.syntax import join, table
from trapline.arena.report.runview import RunView
from trapline.arena.studies.published import load
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.said import (
    Agreement,
    CheckedClaim,
    Files,
    SaidCell,
    checked_claims,
    criterion_agreement,
    letter_agreement,
    said_cells,
)


def document(run: RunView) -> str:
    """The page; empty where the run holds no answer that the report speaks of."""
    field = ReportedField.of(load())
    found = said_cells(field, run.cells)
    if not found:
        return ""

    def files_of(cell: Cell) -> Files:
        return run.bundles[cell.bundle].files if cell.bundle in run.bundles else {}

    claims = checked_claims(field, run.cells, files_of)
    graded = [one for one in found if one.score is not None]
    return join(
        "# What was said, what was measured",
        "A published evaluation printed letters for these answers; a language model had read "
        "them. Here the same answers were executed under the profile `published`, which asks what "
        "their prompts asked. A finding is `confirmed` when the wrong answers equal those of a "
        "known bug.",
        f"{len(graded)} of {len(found)} answers were executed. {_summary(graded)}",
        "## Each answer",
        _cells(found),
        "## Agreement of the two orders",
        "Kendall's τ-b over pairs of entrants within a challenge: 1 is the same order, −1 the "
        "opposite one. The interval is from resampling the challenges.",
        _agreements(letter_agreement(found)),
        "### Each criterion of the report, against the measured score",
        _agreements(criterion_agreement(field, found)),
        "## Claims that can be checked by reading the files",
        _claims(claims, known=True),
        "## Claims that cannot be known here",
        _claims(claims, known=False),
    )


def _summary(graded: Sequence[SaidCell]) -> str:
    failed = [one for one in graded if one.state == "fail"]
    praised = [one for one in failed if one.said.startswith("A")]
    return (
        f"Failing their own prompt: {len(failed)}, of which {len(praised)} had an A+, A or A− in "
        "the report."
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

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    rows = [
        (
            one.of,
            shown(one.tau),
            f"{shown(one.low)} to {shown(one.high)}" if one.low is not None else "–",
            one.alike,
            one.opposite,
            one.pairs - one.alike - one.opposite,
        )
        for one in found
    ]
    heads = ("of", "τ", "95 %", "pairs alike", "opposite", "tied in one of the two")
    return table(heads, rows)


def _claims(claims: Sequence[CheckedClaim], *, known: bool) -> list[str]:
    chosen = [one for one in claims if (one.verdict != "cannot be known") == known]
    if not chosen:
        return ["None."]
    if known:
        heads: tuple[str, ...] = ("challenge", "model", "claim", "said", "found", "")
        rows: list[tuple[str, ...]] = [
            (one.challenge, one.model, one.quantity, one.said, one.found, one.verdict)
            for one in chosen
        ]
    else:
        heads = ("challenge", "model", "claim", "said", "why not")
        rows = [
            (one.challenge, one.model, one.quantity, one.said, one.found.strip("– ()"))
            for one in chosen
        ]
    return table(heads, dict.fromkeys(rows))
