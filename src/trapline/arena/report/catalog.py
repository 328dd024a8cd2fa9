"""Descriptions of challenges for a report: from their folders, or else from the cells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trapline.arena.challenge import Challenge, load, load_all
from trapline.arena.record import Cell, CellKey

#: Easiest first; unknown difficulties come last.
DIFFICULTIES = ("medium", "hard", "extra hard", "research")


@dataclass(frozen=True)
class TrapInfo:
    id: str
    catches: str = ""
    severity: str = ""
    story: str = ""


@dataclass(frozen=True)
class ChallengeInfo:
    id: str
    title: str
    difficulty: str = ""
    summary: str = ""
    prompt: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    max_exponent: float | None = None
    traps: Sequence[TrapInfo] = ()
    #: Trap id → the checks that fail when its bug is put into the solution.
    kills: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def trap(self, trap_id: str) -> TrapInfo:
        """This trap, or a bare entry for one that the challenge no longer has."""
        return next((trap for trap in self.traps if trap.id == trap_id), TrapInfo(trap_id))


def describe(
    cells: Iterable[Cell],
    waiting: Iterable[CellKey] = (),
    told: Mapping[str, ChallengeInfo] | None = None,
) -> dict[str, ChallengeInfo]:
    """All challenges of a run, easiest first; `told` overrides what the package knows."""
    seen: dict[str, list[Cell]] = {}
    for cell in cells:
        seen.setdefault(cell.challenge, []).append(cell)
    planned_tracks = {planned.challenge: planned.track for planned in waiting}
    for challenge_id in planned_tracks:
        seen.setdefault(challenge_id, [])
    shipped = load_all()
    found = []
    for challenge_id, its_cells in seen.items():
        if told and challenge_id in told:
            found.append(told[challenge_id])
        elif challenge_id in shipped:
            printed_only = its_cells and not any(cell.challenge_digest for cell in its_cells)
            profile = next((cell.profile for cell in its_cells if cell.profile), "")
            # A run holds cells of one track.
            track = its_cells[0].track if its_cells else planned_tracks[challenge_id]
            judge = load(challenge_id, track, profile)
            known = _from_folder(judge, told_only=bool(printed_only))
            found.append(replace(known, traps=[*known.traps, *_private(its_cells)]))
        else:
            found.append(_from_cells(challenge_id, its_cells))
    order = {challenge_id: place for place, challenge_id in enumerate(shipped)}
    found.sort(key=lambda info: (_hardness(info), order.get(info.id, len(order)), info.id))
    return {info.id: info for info in found}


def _private(cells: Sequence[Cell]) -> list[TrapInfo]:
    """The private traps that graded these cells; a report names them and does not describe them."""
    ids = (trap for cell in cells if cell.trap_set for trap in cell.trap_set.traps)
    return [TrapInfo(trap) for trap in dict.fromkeys(ids)]


def _hardness(info: ChallengeInfo) -> int:
    known = info.difficulty in DIFFICULTIES
    return DIFFICULTIES.index(info.difficulty) if known else len(DIFFICULTIES)


def _from_folder(challenge: Challenge, *, told_only: bool) -> ChallengeInfo:
    """Prompt, weights and traps are left out where other graders gave the grades."""
    plan = challenge.plan
    basics = ChallengeInfo(plan.id, plan.title, plan.difficulty, plan.summary)
    if told_only:
        return basics
    return replace(
        basics,
        prompt=challenge.prompt,
        weights=plan.weights,
        max_exponent=plan.memory.max_exponent if plan.memory else None,
        traps=[
            TrapInfo(trap.id, trap.catches, trap.severity, trap.story) for trap in challenge.traps
        ],
        kills=challenge.fault_dictionary,
    )


def _from_cells(challenge_id: str, cells: Sequence[Cell]) -> ChallengeInfo:
    traps = dict.fromkeys(trap.id for cell in cells for trap in cell.traps)
    return ChallengeInfo(
        id=challenge_id,
        title=challenge_id.replace("_", " ").capitalize(),
        traps=[TrapInfo(trap_id) for trap_id in traps],
    )
