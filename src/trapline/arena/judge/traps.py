"""Cases and traps: how a challenge states what it checks.

A case is a part of the contract. A trap is one named bug, the smallest situation that provokes it,
and the name of the mutant that proves it. Both are functions of the submission (seen through
`proxy.Submission`) and a random generator whose seed is drawn per run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np

from trapline.arena.process.proxy import Submission

Severity = Literal["critical", "major", "minor"]
T = TypeVar("T")
Check = Callable[[Submission, np.random.Generator], None]


@dataclass(frozen=True)
class Case:
    """One part of the contract."""

    id: str
    run: Check


@dataclass(frozen=True)
class Trap:
    """One named bug and the situation that provokes it."""

    id: str
    catches: str
    severity: Severity
    story: str
    mutant: str
    run: Check


def case(id: str) -> Callable[[Check], Case]:  # noqa: A002 - it is the id
    """Makes a contract case of a function."""
    return lambda run: Case(id, run)


def trap(
    id: str,  # noqa: A002 - it is the id
    *,
    catches: str,
    severity: Severity,
    story: str,
    mutant: str | None = None,
) -> Callable[[Check], Trap]:
    """Makes a trap of a function; its mutant carries the trap's own id unless another is named."""
    return lambda run: Trap(id, catches, severity, story, mutant or id, run)


def collect(module: ModuleType, kind: type[T]) -> list[T]:
    """The cases or traps of a module, in the order of their definition."""
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
