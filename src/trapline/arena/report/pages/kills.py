"""The kill matrix: the solution with each known bug, and the traps that notice it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from trapline.arena.certify.certify import Certificate, Outcome
from trapline.arena.report.catalog import ChallengeInfo
from trapline.arena.report.reading import Reading

#: Killed mutants that a table lists; the drawing has them all.
MOST_KILLED = 10
#: Units of the drawing for one mutant and for one trap.
STEP = 6


def context(reading: Reading, certificates: Sequence[Certificate]) -> dict[str, Any]:
    return {
        "title": "Kill matrix",
        "matrices": [_matrix(info) for info in reading.field.challenges.values() if info.kills],
        "certificates": [_item(reading, certificate) for certificate in certificates],
    }


def _matrix(info: ChallengeInfo) -> dict[str, Any]:
    """The challenge's mutants down, its traps across, both in the order of the traps."""
    names = [trap.id for trap in info.traps if trap.id in info.kills]
    own = sum(name in info.kills[name] for name in names)
    unique = sum(len(info.kills[name].intersection(names)) == 1 for name in names)
    return {
        "title": info.title,
        "summary": f"{own} of {len(names)} mutants are detected by their own trap; "
        f"{unique} by no other.",
        "svg": _drawn(info, names),
    }


def _drawn(info: ChallengeInfo, names: Sequence[str]) -> Markup:
    """One path for each mutant, so that a hundred thousand squares stay a small picture."""
    column = {name: place for place, name in enumerate(names)}
    rows = []
    for place, name in enumerate(names):
        hits = sorted(column[check] for check in info.kills[name] if check in column)
        squares = "".join(
            f"M{first * STEP} {place * STEP + STEP // 2}h{length * STEP - 1}"
            for first, length in _runs(hits)
        )
        others = f"{len(hits) - 1} other traps" if len(hits) != 2 else "1 other trap"
        told = f"{name}: detected by its own trap and {others}"
        if name not in info.kills[name]:
            told = f"{name}: detected by {len(hits)} traps, not by its own"
        rows.append(
            Markup('<g data-bug><title>{}</title><path d="{}"/>{}</g>').format(
                told, squares, _own(place, name in info.kills[name])
            )
        )
    size = len(names) * STEP
    label = f"Kill matrix of {info.title}: {len(names)} mutants by {len(names)} traps"
    return Markup(
        '<svg class="kills" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>'
    ).format(label, size, size, Markup("").join(rows))


def _runs(hits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring places as (first, length); the style sheet's dashes part their squares."""
    for _, group in groupby(enumerate(hits), key=lambda pair: pair[1] - pair[0]):
        places = [hit for _, hit in group]
        yield places[0], len(places)


def _own(place: int, noticed: bool) -> Markup:
    square = f"M{place * STEP} {place * STEP + STEP // 2}h{STEP - 1}"
    return Markup('<path class="{}" d="{}"/>').format("own" if noticed else "missed", square)


def _item(reading: Reading, certificate: Certificate) -> dict[str, Any]:
    info = reading.field.challenges.get(certificate.challenge)
    mechanical = certificate.of("mechanical")
    survivors = [finding for finding in mechanical if not finding.fell_to]
    shown = [finding for finding in certificate.findings if not _is_killed(finding)]
    killed = [finding for finding in certificate.findings if _is_killed(finding)]
    return {
        "title": info.title if info else certificate.challenge,
        "summary": _summary(certificate, len(mechanical), len(survivors)),
        "findings": [*shown, *killed[:MOST_KILLED]],
        "left_out": len(killed) - len(killed[:MOST_KILLED]),
    }


def _is_killed(finding: Outcome) -> bool:
    """Whether it is a mutant that fell as it should."""
    mutant = finding.kind in ("named", "mechanical")
    return mutant and bool(finding.fell_to) and not finding.problem


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
