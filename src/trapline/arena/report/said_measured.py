"""A published report beside the grades of the same answers, for the pages in HTML and Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trapline.arena.record import Cell, Origin
from trapline.arena.report.formats import duration
from trapline.arena.report.runview import RunView
from trapline.arena.studies.claims import Answer, CheckedClaim, Decision, checked_claims
from trapline.arena.studies.published import load
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.said import (
    Agreement,
    SaidCell,
    criterion_agreement,
    letter_agreement,
    models_of,
    said_cells,
)

TITLE = "What was said, what was measured"
LEDE = (
    "A published evaluation printed letters for these answers; a language model had read them. "
    "Here the same answers were executed under the profile `published`, which asks what their "
    "prompts asked. A finding is `confirmed` when the wrong answers equal those of a known bug."
)
ABOUT_ORDERS = (
    "Kendall's τ-b over pairs of entrants within a challenge: 1 is the same order, −1 the opposite "
    "one. The interval is from resampling the challenges, where there are several."
)
ABOUT_CLAIMS = (
    "An error is ours against float64; a claim holds when ours is no larger. Counts hold within "
    "5 %. A claim that was read was counted in the files, in each way that the report may have "
    "counted. Where an answer has other findings, the absence of a bug cannot be known."
)
DECISIONS: dict[Decision, str] = {
    "does not hold": "Claims that do not hold",
    "holds": "Claims that hold",
    "cannot be known": "Claims that cannot be known here",
}


@dataclass(frozen=True)
class SaidMeasured:
    cells: Sequence[SaidCell]
    claims: Sequence[CheckedClaim]
    letters: Sequence[Agreement]
    criteria: Sequence[Agreement]
    #: Answers whose results have the same bytes on the same inputs, by challenge.
    equal: Sequence[Sequence[SaidCell]]
    #: Model, challenge and the log of the session that made the answer.
    sessions: Sequence[tuple[str, str, Origin]]

    @property
    def graded(self) -> list[SaidCell]:
        return [one for one in self.cells if one.score is not None]

    @property
    def failed(self) -> list[SaidCell]:
        return [one for one in self.graded if one.state == "fail"]

    @property
    def praised(self) -> list[SaidCell]:
        """Answers that fail their own prompt and had an A of some kind."""
        return [one for one in self.failed if one.said.startswith("A")]

    @property
    def summary(self) -> str:
        return (
            f"{len(self.graded)} of {len(self.cells)} answers were executed. Failing their own "
            f"prompt: {len(self.failed)}, of which {len(self.praised)} had an A+, A or A− in the "
            "report."
        )

    @property
    def equal_sentences(self) -> list[str]:
        return [
            f"{group[0].challenge}: the results of {_listed(group)} are equal bit for bit on the "
            "same inputs."
            for group in self.equal
        ]

    def decided(self, decision: Decision) -> list[CheckedClaim]:
        """Claims with this verdict; what several pages of a report repeat stands once."""
        once = {
            (one.challenge, one.model, one.quantity, one.said): one
            for one in self.claims
            if one.verdict == decision
        }
        return list(once.values())


def said_measured(run: RunView) -> SaidMeasured | None:
    """None where the run holds no answer that the report speaks of."""
    field = ReportedField.of(load())
    found = said_cells(field, run.cells)
    if not found:
        return None

    def answer_of(cell: Cell) -> Answer:
        if cell.bundle not in run.bundles:
            return Answer(cell)
        bundle = run.bundles[cell.bundle]
        figures, why = bundle.raw.get("figures", {}), bundle.raw.get("not_figured", "")
        return Answer(cell, bundle.files, figures, why)

    models = models_of(field, {cell.entrant for cell in run.cells})
    known = {(cell.entrant, cell.challenge): cell for cell in run.cells}
    digests = {
        one: answer_of(known[one.entrant, one.challenge]).figures.get("digest") for one in found
    }
    return SaidMeasured(
        cells=found,
        equal=_equal(digests),
        claims=checked_claims(field, run.cells, answer_of),
        letters=letter_agreement(found),
        criteria=criterion_agreement(field, found),
        sessions=[
            (models[cell.entrant], cell.challenge, cell.origin)
            for cell in run.cells
            if cell.entrant in models and cell.origin is not None and cell.origin.turns
        ],
    )


def _equal(digests: Mapping[SaidCell, str | None]) -> list[list[SaidCell]]:
    groups: dict[tuple[str, str], list[SaidCell]] = {}
    for one, digest in digests.items():
        if digest:
            groups.setdefault((one.challenge, digest), []).append(one)
    return [group for group in groups.values() if len(group) > 1]


def _listed(group: Sequence[SaidCell]) -> str:
    named = [f"{one.model} ({one.said})" for one in group]
    return f"{', '.join(named[:-1])} and {named[-1]}"


def tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def interval(one: Agreement) -> str:
    return "–" if one.low is None else f"{tau(one.low)} to {tau(one.high)}"


SESSION_HEADS = ("tokens in", "tokens out", "turns", "time")


def session_figures(origin: Origin) -> tuple[str, ...]:
    """One figure for each of SESSION_HEADS."""
    spent = (origin.input_tokens, origin.output_tokens, origin.turns)
    return (*(f"{value:,}" for value in spent), duration(origin.seconds))
