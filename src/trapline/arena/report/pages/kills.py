"""The kill matrix: which trap kills which mutant."""

from collections.abc import Sequence
from typing import Any

from trapline.arena.certify.certify import Certificate
from trapline.arena.report.reading import Reading

MOST_MECHANICAL = 150


def context(reading: Reading, certificates: Sequence[Certificate]) -> dict[str, Any]:
    return {
        "title": "Kill matrix",
        "certificates": [_item(reading, certificate) for certificate in certificates],
    }


def _item(reading: Reading, certificate: Certificate) -> dict[str, Any]:
    info = reading.field.challenges.get(certificate.challenge)
    mechanical = certificate.of("mechanical")
    survivors = [finding for finding in mechanical if not finding.fell_to]
    fallen = [finding for finding in mechanical if finding.fell_to]
    others = [finding for finding in certificate.findings if finding.kind != "mechanical"]
    shown = [*others, *survivors, *fallen[:MOST_MECHANICAL]]
    return {
        "title": info.title if info else certificate.challenge,
        "summary": _summary(certificate, len(mechanical), len(survivors)),
        "findings": shown,
        "left_out": len(fallen) - len(fallen[:MOST_MECHANICAL]),
    }


def _summary(certificate: Certificate, mechanical: int, survivors: int) -> str:
    named = certificate.of("named")
    killed = sum(1 for finding in named if finding.fell_to)
    right = certificate.of("right")
    passed = sum(1 for finding in right if not finding.problem)
    text = (
        f"{killed} of {len(named)} named mutants were killed; "
        f"{passed} of {len(right)} right answers pass"
    )
    if mechanical:
        text += f"; {mechanical - survivors} of {mechanical} mechanical mutants were killed"
    return f"{text}. Seed {certificate.seed}."
