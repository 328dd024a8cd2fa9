"""Findings for reading: the causes of a cell, the gravest first, with call, code and reproducer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trapline.arena.record import Bundle, Cell, Finding, Severity
from trapline.arena.report import source
from trapline.arena.report.catalog import ChallengeInfo, TrapInfo

SEVERITIES: tuple[Severity, ...] = ("critical", "major", "minor")
GRAVITY: dict[str, int] = {name: place for place, name in enumerate(SEVERITIES)}


@dataclass(frozen=True)
class ShownFinding:
    #: From 1, as `trapline reproduce` counts.
    number: int
    finding: Finding
    info: TrapInfo
    #: The message of the check that shows it best.
    message: str
    #: The lines around the one that raised, or empty.
    code: Markup

    @property
    def sentence(self) -> str:
        return opening(self.finding.sentence)

    @property
    def anchor(self) -> str:
        named = self.finding.cause != "unnamed"
        return f"trap-{self.finding.cause}" if named else f"finding-{self.number}"


def opening(sentence: str) -> str:
    """The sentence with a capital letter, unless it begins with a name of the code."""
    first = sentence.partition(" ")[0]
    return sentence if set(first) & set("()_.[]=") else sentence[:1].upper() + sentence[1:]


def of_cell(cell: Cell, challenge: ChallengeInfo) -> list[Finding]:
    """The findings of a cell; of one graded before findings existed, a finding for each trap."""
    if cell.findings:
        return cell.findings
    return [
        Finding(
            cause=trap.id,
            certainty="likely",
            severity=_severity(challenge.trap(trap.id)),
            sentence=challenge.trap(trap.id).catches or trap.message,
            explains=[trap.id],
        )
        for trap in cell.traps
        if trap.accuses
    ]


def _severity(info: TrapInfo) -> Severity:
    return next((name for name in SEVERITIES if name == info.severity), "minor")


def gravest_first(findings: Sequence[Finding]) -> list[Finding]:
    """Bugs before accepted bad input, then by severity; the order of certainty inside."""
    return sorted(findings, key=lambda f: (f.dimension != "traps", GRAVITY[f.severity]))


def shown(cell: Cell, challenge: ChallengeInfo, bundle: Bundle | None) -> list[ShownFinding]:
    messages = {check.id: check.message for check in [*cell.cases, *cell.traps]}
    found = of_cell(cell, challenge)
    number = {id(finding): place for place, finding in enumerate(found, start=1)}
    return [
        ShownFinding(
            number[id(finding)],
            finding,
            challenge.trap(finding.cause),
            messages.get(finding.explains[0], ""),
            source.excerpt(finding.where, bundle.files if bundle else {}),
        )
        for finding in gravest_first(found)
    ]


def counted(findings: Sequence[Finding]) -> str:
    """2 critical, 1 minor; empty where there are none."""
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name])
