"""Searches two bugs that together answer the failing checks as a submission does."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from trapline.arena.judge.answers import Answers
from trapline.arena.judge.mutants import BOTH
from trapline.arena.judge.patterns import Patterns

#: Of the failing checks, the share that a mutant with two bugs must answer alike; and the number of
#: checks on which it is compared.
LEAST_BY_PAIR = 0.9
MOST_COMPARED = 40
#: Bugs by their pattern alone that are tried as one of the two.
MOST_BROAD = 4
#: Where no bug is confirmed, so many pairs are tried, of so many bugs that fit best and whose
#: mutants fail nearly nothing that passes here.
MOST_PAIRS = 96
MOST_PAIRED = 64
LEAST_PAIRED = 0.9


class PairSearch:
    def __init__(
        self,
        patterns: Patterns,
        answers: Answers,
        causes: Collection[str],
        confirmed: Collection[str],
        is_spent: Callable[[], bool],
    ) -> None:
        """`causes` are those found so far; `is_spent` says that no more mutants may be run."""
        self.patterns, self.answers = patterns, answers
        self.causes, self.confirmed = causes, confirmed
        self._is_spent = is_spent

    def find(self) -> tuple[str, str] | None:
        """Two bugs whose mutant answers nearly every failing check as the submission does, where
        the causes so far answer fewer.

        Two bugs change each other's answers, so that a third may answer a few checks as both do.
        """
        checks = self._compared_checks()
        best, most = None, sum(self.answers.by([*self.causes], check) for check in checks)
        if most == len(checks):
            return None
        most = max(most, math.ceil(LEAST_BY_PAIR * len(checks)) - 1)
        for pair in self._pairs(checks):
            both, own = BOTH.join(pair), [self.patterns.forms[form] for form in reversed(pair)]
            if all(self.answers.same(both, check) for check in own):
                found = self.answers.matched(both, checks, most)
                best, most = (pair, found) if found else (best, most)
            if most == len(checks):
                break
        return best

    def _compared_checks(self) -> list[str]:
        """Failing checks, at most so many, spread over all; the causes' own come first."""
        asked = self.patterns.asked - self.patterns.challenge.slow
        own = sorted({self.patterns.forms[cause] for cause in self.causes} & asked)
        others = sorted(asked.difference(own))
        step = max(1, math.ceil(len(others) / MOST_COMPARED))
        return [*own, *others[::step]]

    def _pairs(self, checks: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Bugs that show in many answers, each with every other bug whose trap failed."""
        others = [
            form
            for form, trap in self.patterns.forms.items()
            if trap in self.patterns.asked - self.patterns.challenge.slow
            and self.patterns.precision(form) >= 0.5
            and not self.patterns.traps[trap].keeps_state
        ]
        for one in self._broad(others, checks):
            for other in itertools.takewhile(lambda form: not self._is_spent(), others):
                if self._can_be_pair(one, other):
                    yield one, other
        if not self.confirmed:
            yield from self._fitting_pairs(others)

    def _can_be_pair(self, one: str, other: str) -> bool:
        if self.patterns.forms[one] == self.patterns.forms[other]:
            return False
        return self.answers.host.can_plant(one + BOTH + other)

    def _fitting_pairs(self, forms: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Bugs that together fail what fails here; of neither alone need an answer be seen."""

        def fit(pair: tuple[str, str]) -> tuple[float, float]:
            fails = self.patterns.fails(pair[0]) | self.patterns.fails(pair[1])
            return self.patterns.overlap(fails), sum(map(self._overlap, pair))

        fitting = [form for form in forms if self.patterns.precision(form) >= LEAST_PAIRED]
        fitting.sort(key=lambda form: (-self._overlap(form), form))
        pairs = itertools.combinations(fitting[:MOST_PAIRED], 2)
        for one, other in sorted(pairs, key=fit, reverse=True)[:MOST_PAIRS]:
            if self._can_be_pair(one, other) and not self._is_spent():
                yield one, other

    def _broad(self, forms: Sequence[str], checks: Sequence[str]) -> list[str]:
        """Confirmed causes; and bugs whose pattern fits and that answer at least half of the checks
        alike, even if not their own trap, in which a second bug may show."""

        def answers_most(form: str) -> bool:
            return self.answers.matched(form, checks, (len(checks) - 1) // 2) > 0

        confirmed = [form for form in forms if form in self.confirmed]
        others = set(forms).difference(confirmed)
        likely = sorted(others, key=lambda form: (-self._overlap(form), form))
        return [*confirmed, *filter(answers_most, likely[:MOST_BROAD])]

    def _overlap(self, form: str) -> float:
        return self.patterns.overlap(self.patterns.fails(form))
