"""Cases and traps: how a challenge states what it checks.

A case is a part of the contract. A trap is one named bug, the smallest situation that provokes it,
and a mutant: edits that put the bug into the gold solution and so prove that the trap catches it.
Both are functions of the submission (seen through `proxy.Submission`) and a random generator whose
seed the submission cannot know; their ids are the functions' names with hyphens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from trapline.arena.errors import ArenaError
from trapline.arena.process.proxy import Submission
from trapline.arena.record import CaseDimension, FindingDimension, Severity

T = TypeVar("T")
Check = Callable[[Submission, np.random.Generator], None]


@dataclass(frozen=True)
class Case:
    id: str
    run: Check
    #: `robustness` for refusing bad input, which the contract's state does not depend on.
    dimension: CaseDimension = "correctness"


@dataclass(frozen=True)
class Mutant:
    """A bug as textual edits (old, new) of one file of the gold solution."""

    edits: tuple[tuple[str, str], ...]
    file: str


@dataclass(frozen=True)
class Trap:
    id: str
    catches: str
    severity: Severity
    story: str
    mutant: Mutant
    run: Check
    #: What a finding of this trap lowers: `robustness` when the bug is accepting bad input.
    dimension: FindingDimension = "traps"
    #: Where the bug was seen, such as a published answer or a public issue; "" when constructed,
    #: and then it is never critical.
    seen: str = ""
    #: The nearest situation without the bug's trigger: the trap accuses only if this passes.
    control: Check | None = None
    #: The same bug in other forms, for example with another number or another exception.
    also: tuple[Mutant, ...] = ()
    #: The bug is what earlier calls left behind: which other checks it fails is a matter of chance.
    keeps_state: bool = False

    @cached_property
    def forms(self) -> dict[str, Mutant]:
        """The bug's mutants by name: the trap's id, then `id#2`, `id#3` and so on."""
        others = {f"{self.id}#{number}": form for number, form in enumerate(self.also, 2)}
        return {self.id: self.mutant, **others}

    def plant(self, solution: dict[str, str], form: str = "") -> dict[str, str]:
        """The solution's files with the bug in them. Each edited text must occur exactly once."""
        mutant = self.forms[form or self.id]
        source = solution[mutant.file]
        for old, new in mutant.edits:
            if source.count(old) != 1:
                raise ArenaError(
                    f"mutant of trap {form or self.id}: {old!r} occurs {source.count(old)} times "
                    f"in {mutant.file}, expected once; update the edit to the gold solution"
                )
            source = source.replace(old, new)
        return {**solution, mutant.file: source}


def edit(old: str, new: str, file: str = "solution.py") -> Mutant:
    """A mutant: replace the old text, which occurs exactly once, by the new one."""
    return Mutant(((old, new),), file)


def insert_after(old: str, added: str, file: str = "solution.py") -> Mutant:
    """A mutant: add a text right after the old one, which occurs exactly once."""
    return edit(old, old + added, file)


def insert_before(old: str, added: str, file: str = "solution.py") -> Mutant:
    """A mutant: add a text right before the old one, which occurs exactly once."""
    return edit(old, added + old, file)


def edits(*pairs: tuple[str, str], file: str = "solution.py") -> Mutant:
    """A mutant of several edits (old, new), applied in their order."""
    return Mutant(pairs, file)


def case(run: Check) -> Case:
    """A part of the contract: a submission that breaks it fails."""
    return Case(_id_of(run), run)


def robustness(run: Check) -> Case:
    """Bad input that the prompt asks to refuse."""
    return Case(_id_of(run), run, "robustness")


def trap(
    *,
    catches: str,
    severity: Severity,
    story: str,
    mutant: Mutant,
    dimension: FindingDimension = "traps",
    seen: str = "",
    control: Check | None = None,
    also: Sequence[Mutant] = (),
    keeps_state: bool = False,
) -> Callable[[Check], Trap]:
    return lambda run: Trap(
        id=_id_of(run),
        catches=catches,
        severity=severity,
        story=story,
        mutant=mutant,
        run=run,
        dimension=dimension,
        seen=seen,
        control=control,
        also=tuple(also),
        keeps_state=keeps_state,
    )


def _id_of(run: Check) -> str:
    return run.__name__.replace("_", "-")


def collect(module: ModuleType, kind: type[T]) -> list[T]:
    return [value for value in vars(module).values() if isinstance(value, kind)]


@dataclass(frozen=True)
class Call:
    """One call to be timed or weighed: an entry point, or a method of a remote object."""

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Says, with `expect`, whether an answer is right. Runs after the clock has stopped.
    check: Callable[[Any], None] = lambda _: None
    #: The remote object whose method `entry` is; None for a function of the submission.
    on: Any = None


@dataclass(frozen=True)
class Precision:
    """An answer, the float64 truth, and what a careful computation in the same dtype gets."""

    got: Any
    exact: np.ndarray
    careful: np.ndarray
