"""Whether known bugs answer the failing checks as a submission does: their mutants are run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.judge.comparison import (
    Comparison,
    compare,
    same_magnitude,
    without_numbers,
)
from trapline.arena.judge.failures import Failure
from trapline.arena.judge.in_order import InOrder
from trapline.arena.judge.mutants import BOTH, GOLD, MutantHost, Run
from trapline.arena.judge.patterns import Patterns
from trapline.arena.process.transcript import Transcript

#: Mutants that are run on all checks in their order, because they keep state.
MOST_IN_ORDER = 6
#: In the message of a check that measures memory.
MEASURED = "memory rose by"


class Answers:
    """Compares one submission's wrong answers with those of mutants, each at most once."""

    def __init__(
        self,
        challenge: Challenge,
        host: MutantHost,
        patterns: Patterns,
        failures: Mapping[str, Failure],
        most_runs: float,
    ) -> None:
        self.challenge, self.host, self.patterns = challenge, host, patterns
        self.failures, self.most_runs = failures, most_runs
        self._same: dict[tuple[str, str], bool] = {}
        self._right: dict[str, bool] = {}
        #: What bugs that keep state answer to the failing checks, one after the other.
        self._in_order: dict[str, InOrder] = {}
        self._comparisons: dict[tuple[str, str], Comparison] = {}
        #: By its identity: a transcript, and the parts of it that are judged.
        self._judged_parts: dict[int, tuple[Transcript, Transcript]] = {}

    def comparison(self, form: str, check: str) -> Comparison:
        key = form, check
        if key not in self._comparisons:
            mutant, right = self.host.run(form, check), self.host.run(GOLD, check)
            got = self.failures[check].transcript
            self._comparisons[key] = self._compare(got, mutant.transcript, right.transcript)
        return self._comparisons[key]

    def is_telling(self, form: str, checks: Iterable[str]) -> bool:
        """In one of these checks, as far as they were compared, the mutant gives the same answer
        and few other bugs would; or it fails alike by what is seen beside the answers."""
        return any(
            self._same.get((form, check), False)
            and (not (found := self.comparison(form, check)).is_same or found.is_telling)
            for check in checks
        )

    def by(self, causes: Sequence[str], check: str) -> bool:
        """One of these causes, or all of them together, answer as the submission does."""
        alone = any(self.same(cause, check) for cause in causes)
        return alone or self.together(causes, check)

    def together(self, forms: Sequence[str], check: str) -> bool:
        """A mutant with all these bugs answers as the submission does; not for slow checks.

        Only those that may show in the check are planted: the same few serve many causes.
        """
        showing = [form for form in forms if self.patterns.may_show(form, check)]
        if len(showing) < 2 or check in self.challenge.slow:
            return False
        if not self.host.can_plant(BOTH.join(forms)):
            return False
        return self.same(BOTH.join(showing), check)

    def matched(self, form: str, checks: Sequence[str], least: int) -> int:
        """How many checks this mutant answers alike; 0 if no more than `least`."""
        found = 0
        for place, check in enumerate(checks):
            found += self.same(form, check)
            if found + len(checks) - place - 1 <= least:
                return 0
        return found

    def same(self, form: str, check: str) -> bool:
        key = form, check
        if key not in self._same:
            self._same[key] = self._is_same(form, check)
        return self._same[key]

    def _is_same(self, form: str, check: str) -> bool:
        if self._is_same_in_order(form, check):
            return True
        if self._answers_rightly(check) and not self.patterns.may_fail(form, check):
            return self._has_same_message(form, check)
        mutant = self.host.run(form, check)
        if not mutant.failed:
            return False
        found = self.comparison(form, check)
        if found.is_same:
            return self._end_alike(check, mutant)
        same_reason = self._has_same_reason(check, mutant)
        # A check that measures memory does not judge the answers.
        if not same_reason or found.is_right or MEASURED in mutant.message:
            return same_reason
        got = self.failures[check].transcript
        return same_magnitude(got, mutant.transcript) and self._varies(form, check)

    def fails_alike_by_chance(self, form: str, check: str) -> bool:
        """The mutant fails this check with the same words, by answers that differ from run to run:
        how large they are says nothing against it."""
        mutant = self.host.run(form, check)
        return mutant.failed and self._has_same_reason(check, mutant) and self._varies(form, check)

    def _has_same_message(self, form: str, check: str) -> bool:
        """The mutant fails this check, which the dictionary's draw missed, with the same numbers:
        what is measured, such as memory, is never the same twice."""
        if check in self.challenge.slow:
            return False
        mutant = self.host.run(form, check)
        return mutant.failed and mutant.message == self.failures[check].message

    def _is_same_in_order(self, form: str, check: str) -> bool:
        """A bug that keeps state answers as the submission does after the same checks."""
        keeps = any(self.patterns.trap_of(one).keeps_state for one in form.split(BOTH))
        if not keeps or check in self.challenge.slow:
            return False
        if form not in self._in_order:
            # Checks that passed have left their state, too.
            asked = [other for other in self.patterns.checks if other not in self.challenge.slow]
            is_spent = self.host.runs + len(asked) > self.most_runs
            if is_spent or len(self._in_order) == MOST_IN_ORDER:
                return False
            self._in_order[form] = InOrder(self.host, form, asked, self.failures)
        mutant, right = self._in_order[form].run(check), self.host.run(GOLD, check)
        got = self.failures[check].transcript
        found = self._compare(got, mutant.transcript, right.transcript)
        if not mutant.failed:
            return False
        if found.is_right:  # it failed for what was seen beside the answers
            return self._has_same_reason(check, mutant)
        return found.is_same and self._end_alike(check, mutant)

    def _has_same_reason(self, check: str, mutant: Run) -> bool:
        """The check says the same of both, but for numbers."""
        return without_numbers(self.failures[check].message) == without_numbers(mutant.message)

    def _end_alike(self, check: str, mutant: Run) -> bool:
        """Both checks end with an exception of the answer itself, or both for another reason: what
        our callbacks raise when they are asked amiss comes back as an exception, too."""
        messages = self.failures[check].message, mutant.message
        one, other = (message.startswith("raised ") for message in messages)
        return one == other

    def _answers_rightly(self, check: str) -> bool:
        """The check failed for what it saw beside the answers, such as memory."""
        if check not in self._right:
            got, right = self.failures[check].transcript, self.host.run(GOLD, check).transcript
            self._right[check] = self._compare(got, right, right).is_right
        return self._right[check]

    def _varies(self, form: str, check: str) -> bool:
        """The mutant's own answers differ from run to run, so that only the reason can be equal."""
        first, right = self.host.run(form, check), self.host.run(GOLD, check)
        again = self.host.run_again(form, check)
        found = self._compare(first.transcript, again.transcript, right.transcript)
        return not np.all(found.same)

    def _compare(self, got: Transcript, mutant: Transcript, right: Transcript) -> Comparison:
        transcripts = map(self._judged, (got, mutant, right))
        return compare(*transcripts, lowered=self.challenge.track == "gpu")

    def _judged(self, transcript: Transcript) -> Transcript:
        """Only the parts of the answers whose form the contract fixes, and that were asked for.

        Kept, since each answer is compared with those of many mutants.
        """
        known = self._judged_parts.get(id(transcript))
        if known is None or known[0] is not transcript:
            hooks, scope = self.challenge.module("cases"), self.challenge.scope
            asked = getattr(hooks, "asked", lambda entry, answer, scope: answer)
            judged = getattr(hooks, "judged", lambda entry, answer: answer)
            parts = [
                replace(e, answer=judged(e.entry, asked(e.entry, e.answer, scope)))
                for e in transcript.exchanges
            ]
            known = self._judged_parts[id(transcript)] = transcript, Transcript(parts)
        return known[1]
