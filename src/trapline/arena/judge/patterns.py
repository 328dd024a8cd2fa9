"""Which checks each known bug fails, beside those that a submission fails."""

from collections.abc import Collection, Set
from functools import cached_property

from trapline.arena.challenge import Challenge
from trapline.arena.judge.mutants import BOTH
from trapline.arena.judge.neighbours import Neighbours
from trapline.arena.judge.traps import Case, Trap


class Patterns:
    """The fault dictionary of a challenge, next to one submission's failures."""

    def __init__(
        self, challenge: Challenge, failing: Collection[str], asked: Collection[str]
    ) -> None:
        """`asked` are the failing checks that could be asked at all."""
        self.challenge = challenge
        self.failing, self.asked = frozenset(failing), frozenset(asked)
        self.traps = {trap.id: trap for trap in challenge.traps}
        #: Form of a bug → the trap that names it.
        self.forms = {form: trap.id for form, trap in challenge.forms.items()}
        checks: list[Case | Trap] = [*challenge.cases, *challenge.traps]
        self.checks = [check.id for check in checks]
        #: Checks of what happens to bad input.
        self.refusals = {check.id for check in checks if check.dimension == "robustness"}
        # Asked for with every comparison.
        self._fails: dict[str, frozenset[str]] = {}
        self._breaks_contract: dict[str, bool] = {}

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours(self.challenge.fault_dictionary, self.checks)

    def trap_of(self, form: str) -> Trap:
        return self.traps[self.forms[form]]

    def fails(self, form: str) -> frozenset[str]:
        """The checks that the bug's mutant fails; of one that keeps state, its own trap alone."""
        if form not in self._fails:
            own = self.trap_of(form)
            known = self.challenge.fault_dictionary.get(form, frozenset())
            self._fails[form] = frozenset({own.id}) | (frozenset() if own.keeps_state else known)
        return self._fails[form]

    def precision(self, form: str) -> float:
        """The share of the checks that the mutant fails which the submission fails, too."""
        fails = self.fails(form)
        return len(fails & self.failing) / len(fails)

    def overlap(self, fails: Set[str]) -> float:
        """Of these checks and those that fail here, the share that is among both."""
        return len(fails & self.asked) / len(fails | self.asked)

    def breaks_contract(self, form: str) -> bool:
        """The bug's mutant fails a case, one that is not about bad input."""
        if form not in self._breaks_contract:
            cases = self.fails(form) - self.traps.keys() - self.refusals
            self._breaks_contract[form] = bool(cases)
        return self._breaks_contract[form]

    def may_show(self, form: str, check: str) -> bool:
        """The bug fails this check, or keeps state, or breaks the contract: then it shows wherever
        another bug lets a call through that should be refused."""
        keeps_state = self.trap_of(form).keeps_state
        return check in self.fails(form) or keeps_state or self.breaks_contract(form)

    def may_fail(self, form: str, check: str) -> bool:
        """Whether the dictionary has this check for one of these bugs."""
        return any(check in self.fails(one) for one in form.split(BOTH))
