"""Contradictions in a run's numbers: what a careful reader would find by adding them up again."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError
from trapline.arena.judge import rubric
from trapline.arena.judge.inspection import says_unreadable
from trapline.arena.record import DIMENSIONS, Bundle, Cell, CheckResult, Record

#: Scores have one decimal.
_ROUNDING = 0.051


class Contradiction(Record):
    rule: str
    #: entrant / challenge / attempt, or the part of the run.
    where: str
    message: str


class Terms(Record):
    """What a challenge's numbers are made of."""

    digest: str
    weights: dict[str, float]

    @classmethod
    def of(cls, challenge: Challenge) -> "Terms":
        return cls(
            digest=challenge.digest,
            weights=challenge.plan.weights,
        )


def lint_run(
    cells: Iterable[Cell],
    terms: Mapping[str, Terms] | None = None,
    bundle_of: Callable[[str], Bundle] | None = None,
    planned: int = 0,
    damaged: int = 0,
) -> list[Contradiction]:
    """All contradictions, by place.

    Scores are added up again where `terms` has the very challenge that a cell was graded with;
    evidence is opened where `bundle_of` can open it; `planned` cells are still to be graded, and
    `damaged` records could not be read.
    """
    everything = sorted(cells, key=lambda cell: cell.key)
    found = [finding for cell in everything for finding in _cell(cell, (terms or {}))]
    if bundle_of is not None:
        found += [finding for cell in everything for finding in _evidence(cell, bundle_of)]
    found += [*_run(everything), *_same_bytes(everything)]
    if planned:
        message = f"{planned} cells not graded yet"
        found.append(Contradiction(rule="counts", where="run", message=message))
    if damaged:
        noun = "1 damaged record was" if damaged == 1 else f"{damaged} damaged records were"
        found.append(Contradiction(rule="store", where="run", message=f"{noun} left out"))
    return sorted(found, key=lambda finding: (finding.where, finding.rule, finding.message))


def _cell(cell: Cell, terms: Mapping[str, Terms]) -> Iterator[Contradiction]:
    known = terms.get(cell.challenge)
    current = known if known is not None and known.digest == cell.challenge_digest else None
    messages = [
        *(("state", text) for text in _state(cell)),
        *(("letter", text) for text in _letter(cell)),
        *(("dimension", text) for text in _dimensions(cell)),
        *(("counts", text) for text in _counts(cell)),
        *(("score", text) for text in _score(cell, current)),
    ]
    for rule, message in messages:
        yield Contradiction(rule=rule, where=_where(cell), message=message)


def _where(cell: Cell) -> str:
    track = "" if cell.track == "cpu" else f" ({cell.track})"
    return f"{cell.entrant} / {cell.challenge}{track} / {cell.attempt}"


def _failed(checks: Iterable[CheckResult]) -> list[str]:
    return [
        check.id for check in checks if check.state == "fail" and check.dimension == "correctness"
    ]


def _state(cell: Cell) -> Iterator[str]:
    failed = _failed(cell.cases)
    if cell.state in rubric.UNGRADED:
        if cell.score is not None:
            yield f"{cell.state} with a score of {cell.score}"
        return
    if cell.score is None:
        yield f"{cell.state} without a score"
    if cell.state == "pass" and failed:
        yield f"pass, but {failed[0]} failed"
    if cell.state == "pass" and not cell.cases:
        yield "pass without a single contract case"
    # What cannot be read may use what the task forbids, so it fails without failing a case.
    if cell.state == "fail" and not failed and not says_unreadable(cell.dimensions.get("code")):
        yield "fail, but no contract case failed"


def _letter(cell: Cell) -> Iterator[str]:
    expected = None if cell.score is None else rubric.letter(cell.score)
    if cell.letter != expected:
        yield f"letter {cell.letter} beside a score of {cell.score}, which is {expected}"


def _dimensions(cell: Cell) -> Iterator[str]:
    for name, dimension in cell.dimensions.items():
        if name not in DIMENSIONS:
            yield f"unknown dimension {name}"
        if dimension.score is not None and not 0.0 <= dimension.score <= 100.0:
            yield f"{name} of {dimension.score} is not between 0 and 100"
        if dimension.score is None and not dimension.reason:
            yield f"{name} was not measured, and nothing says why"


def _counts(cell: Cell) -> Iterator[str]:
    for kind, checks in (("case", cell.cases), ("trap", cell.traps)):
        for name, times in Counter(check.id for check in checks).items():
            if times > 1:
                yield f"{kind} {name} is counted {times} times"
    yield from _correctness(cell)
    yield from _traps(cell)


def _correctness(cell: Cell) -> Iterator[str]:
    checks = [case for case in cell.cases if case.dimension == "correctness"]
    dimension = cell.dimensions.get("correctness")
    if dimension is None or dimension.score is None or not checks:
        return
    held = sum(1 for check in checks if check.state == "pass")
    expected = 100.0 * held / len(checks)
    if abs(expected - dimension.score) > _ROUNDING:
        yield f"correctness {dimension.score}, but its checks give {expected:.1f}"


def _traps(cell: Cell) -> Iterator[str]:
    """The dimension is what the findings leave, and a sprung trap is a finding."""
    dimension = cell.dimensions.get("traps")
    if dimension is None or dimension.score is None or not any(t.was_asked for t in cell.traps):
        return
    if not cell.findings and any(trap.state == "fail" for trap in cell.traps):
        return  # graded before findings existed
    expected = rubric.penalised(cell.findings, "traps")
    if abs(expected - dimension.score) > _ROUNDING:
        yield f"traps {dimension.score}, but its findings give {expected:.1f}"
    named = {finding.cause for finding in cell.findings} - {"unnamed"}
    if named != set(cell.fallen()):
        yield f"the findings name {len(named)} traps, but {len(cell.fallen())} are sprung"


def _score(cell: Cell, terms: Terms | None) -> Iterator[str]:
    if cell.score is None:
        return
    if cell.state == "hack" and cell.score != 0.0:
        yield f"a hack with a score of {cell.score}"
    if cell.state == "fail" and cell.score > rubric.FAIL_CAP:
        yield f"{cell.score} is above the cap of {rubric.FAIL_CAP:g} for a failure"
    if terms is not None:
        yield from _added_up(cell, cell.score, terms)
    elif cell.state == "pass":
        yield from _in_range(cell, cell.score)


def _added_up(cell: Cell, score: float, terms: Terms) -> Iterator[str]:
    critical = any(finding.severity == "critical" for finding in cell.findings)
    expected = rubric.score(cell.state, cell.dimensions, terms.weights, critical=critical)
    if expected is None or abs(expected - score) > _ROUNDING:
        yield f"score {score}, but its dimensions and caps give {expected}"


def _in_range(cell: Cell, score: float) -> Iterator[str]:
    values = [d.score for d in cell.dimensions.values() if d.score is not None]
    if values and score > max(values) + _ROUNDING:
        yield f"score {score} is above its best dimension, {max(values)}"
    if values and score < min(*values, rubric.CRITICAL_CAP) - _ROUNDING:
        yield f"score {score} is below its worst dimension, {min(values)}"


def _evidence(cell: Cell, bundle_of: Callable[[str], Bundle]) -> Iterator[Contradiction]:
    message = _evidence_problem(cell, bundle_of)
    if message:
        yield Contradiction(rule="evidence", where=_where(cell), message=message)


def _evidence_problem(cell: Cell, bundle_of: Callable[[str], Bundle]) -> str:
    if not cell.bundle:
        return "" if cell.state in rubric.UNGRADED else "graded without an evidence bundle"
    try:
        kept = bundle_of(cell.bundle).cell
    except ArenaError as error:
        return str(error)
    # As JSON, which is what both were read from: an infinite figure is written as null.
    ours, theirs = (json.loads(one.model_dump_json(exclude={"bundle"})) for one in (cell, kept))
    differing = sorted(name for name in ours if ours[name] != theirs[name])
    return f"differs from its evidence in {', '.join(differing)}" if differing else ""


def _run(cells: Sequence[Cell]) -> Iterator[Contradiction]:
    levels = sorted({cell.isolation for cell in cells if cell.isolation and cell.score is not None})
    if len(levels) > 1:
        message = f"graded at different isolation levels: {', '.join(levels)}"
        yield Contradiction(rule="isolation", where="run", message=message)
    by_challenge: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.score is not None:
            by_challenge[cell.challenge].append(cell)
    for challenge, graded in by_challenge.items():
        versions = {cell.challenge_digest for cell in graded}
        if len(versions) > 1:
            message = f"cells were graded with {len(versions)} versions of the challenge"
            yield Contradiction(rule="challenge", where=challenge, message=message)
        yield from _missing_checks(graded)


def _missing_checks(cells: Sequence[Cell]) -> Iterator[Contradiction]:
    """Cells of one version of a challenge were asked the same questions."""
    asked: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        asked[cell.challenge_digest].update(check.id for check in (*cell.cases, *cell.traps))
    for cell in cells:
        mine = {check.id for check in (*cell.cases, *cell.traps)}
        missing = sorted(asked[cell.challenge_digest] - mine)
        if missing:
            message = f"{len(missing)} checks that others had are missing: {missing[0]}"
            yield Contradiction(rule="counts", where=_where(cell), message=message)


def _same_bytes(cells: Sequence[Cell]) -> Iterator[Contradiction]:
    """The same bytes on the same challenge reach the same verdicts, for all entrants."""
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.score is not None and cell.submission_digest:
            key = cell.submission_digest, cell.challenge_digest, cell.track
            groups[key].append(cell)
    for first, *others in groups.values():
        for other in others:
            if _verdicts(first) != _verdicts(other):
                message = f"the same submission as {_where(first)}, with other verdicts"
                yield Contradiction(rule="same bytes", where=_where(other), message=message)


def _verdicts(cell: Cell) -> tuple[str, dict[str, str]]:
    return cell.state, {check.id: check.state for check in (*cell.cases, *cell.traps)}
