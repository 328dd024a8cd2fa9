"""The control situation of a trap that has none of its own, read from the fault dictionary.

The dictionary says which checks each known bug fails. Two checks that fail for the same bugs ask
nearly the same thing; if a trap's own bug fails only one of them, they differ by the bug's trigger.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from trapline.arena.judge.traps import Trap


class Neighbours:
    def __init__(self, dictionary: Mapping[str, frozenset[str]], checks: Sequence[str]) -> None:
        self._dictionary, self._checks = dictionary, checks

    @cached_property
    def _bugs(self) -> dict[str, set[str]]:
        """Check → the forms of bugs that fail it."""
        found: dict[str, set[str]] = {check: set() for check in self._checks}
        for form, checks in self._dictionary.items():
            for check in checks:
                if check in found:
                    found[check].add(form)
        return found

    def control(self, trap: Trap) -> str | None:
        """The check most like this trap that its own bug passes; None where none is like it."""
        own = {trap.id}.union(*(self._dictionary.get(form, ()) for form in trap.forms))
        bugs = self._bugs[trap.id].difference(trap.forms)

        def likeness(check: str) -> float:
            return len(bugs & self._bugs[check]) / len(bugs | self._bugs[check])

        others = [check for check in self._checks if check not in own and self._bugs[check]]
        best = max(others, key=likeness, default=None)
        return best if best is not None and likeness(best) > 0 else None
