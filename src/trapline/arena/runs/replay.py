"""Grades an evidence bundle again: same bytes, same inputs, and the same verdicts expected."""

from pathlib import Path
from typing import Any

from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import UsageError
from trapline.arena.judge.grade import failing_calls, grade
from trapline.arena.judge.intake import Intake, from_texts
from trapline.arena.judge.request import NO_ANSWER, TROUBLE, GradeRequest
from trapline.arena.record import Bundle, Cell, Level, Record


class Replay(Record):
    """A verdict, the same verdict again, and where they differ."""

    before: Cell
    after: Cell
    differences: list[str]

    @property
    def moved(self) -> dict[str, float]:
        """Points by which the score and the dimensions differ, now minus before."""
        pairs = {"score": (self.before.score, self.after.score)}
        for name, dimension in self.before.dimensions.items():
            now = self.after.dimensions.get(name)
            pairs[name] = (dimension.score, now.score if now else None)
        return {
            name: round(now - before, 1)
            for name, (before, now) in pairs.items()
            if before is not None and now is not None and round(now - before, 1)
        }

    @property
    def agreement(self) -> str:
        """What is the same where nothing differs but measured values."""
        if self.measured_once:
            names = ", ".join(self.measured_once)
            return f"same checks and findings; measured in one of the two only: {names}"
        if self.before.letter == self.after.letter:
            return "same verdicts"
        return "same checks and findings; the letter differs by what was measured"

    @property
    def measured_once(self) -> list[str]:
        """Dimensions with a score before or now, but not both; a replay asks no judge."""
        before, after = (
            {name for name, dimension in cell.dimensions.items() if dimension.score is not None}
            for cell in (self.before, self.after)
        )
        return sorted((before ^ after) - {"analysis"})


def replay(bundle: Bundle, level: Level, trap_set: Path | None = None) -> Replay:
    before, challenge = bundle.cell, _challenge_of(bundle, trap_set)
    after = grade(_request_of(bundle, level), challenge).cell
    return Replay(before=before, after=after, differences=_differences(before, after))


def calls_again(
    bundle: Bundle, check: str, level: Level, trap_set: Path | None = None
) -> list[dict[str, Any]]:
    """The calls of one failing check, which the bundle need not hold."""
    challenge = _challenge_of(bundle, trap_set)
    return failing_calls(_request_of(bundle, level), challenge, check)


def _challenge_of(bundle: Bundle, trap_set: Path | None) -> Challenge:
    before = bundle.cell
    if before.trap_set is not None and trap_set is None:
        raise UsageError(
            f"private traps ({before.trap_set}) graded this bundle: give their folder with --traps"
        )
    challenge = load(before.challenge, before.track, before.profile, trap_set)
    if challenge.digest != before.challenge_digest:
        changed = (
            f"{before.challenge} has" if trap_set is None else "the challenge or its traps have"
        )
        raise UsageError(f"{changed} changed since this bundle was made")
    return challenge


def _request_of(bundle: Bundle, level: Level) -> GradeRequest:
    before = bundle.cell
    return GradeRequest(
        before.entrant,
        before.challenge,
        before.attempt,
        Path(),
        before.harness,
        before.model,
        before.origin,
        profile=before.profile,
        level=level,
        seed=before.seed,
        full=before.full,
        track=before.track,
        intake=_intake(bundle),
        **_without_answer(before),
    )


def _intake(bundle: Bundle) -> Intake:
    """The submission's bytes; where none were taken, the reason of the cell says why."""
    before = bundle.cell
    taken = from_texts(bundle.files, bundle.binary_files)
    if not taken.files and before.state in ("fail", "no_answer"):
        return Intake({}, before.reason)
    return taken


def _without_answer(before: Cell) -> dict[str, Any]:
    """Why there was no answer, as the request had it; it counts only if the bytes agree."""
    beginning, end = NO_ANSWER
    if before.state == "no_answer" and before.reason.startswith(beginning):
        return {"unanswered": before.reason.removeprefix(beginning).removesuffix(end)}
    if before.state == "infra_error" and before.reason.startswith(TROUBLE):
        return {"trouble": before.reason.removeprefix(TROUBLE)}
    return {}


def _differences(before: Cell, after: Cell) -> list[str]:
    """State and checks must be the same; times may differ, so scores may a little."""
    found = []
    if before.submission_digest != after.submission_digest:
        found.append("the submission's bytes differ")
    if before.state != after.state:
        found.append(f"state: {before.state} before, {after.state} now ({after.reason})")
    if _causes(before) != _causes(after):
        found.append(f"findings: {_causes(before)} before, {_causes(after)} now")
    for kind in ("cases", "traps"):
        now = {check.id: check.state for check in getattr(after, kind)}
        found += [
            f"{kind[:-1]} {check.id}: {check.state} before, {now.get(check.id, 'absent')} now"
            for check in getattr(before, kind)
            if now.get(check.id) != check.state
        ]
    return found


def _causes(cell: Cell) -> str:
    found = [f"{finding.cause} ({finding.certainty})" for finding in cell.findings]
    return ", ".join(found) or "none"
