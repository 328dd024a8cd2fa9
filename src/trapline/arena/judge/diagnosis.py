"""From failed checks to root causes.

Each challenge knows what every named bug does: its fault dictionary lists the checks that the bug's
mutant fails. A cause is chosen in two steps. First by the pattern: a bug whose mutant fails checks
that the submission passes is not its bug. Then by the answers: the mutant is run on the failing
checks, and where it gives the same wrong answers the cause is confirmed. What a chosen cause
explains is set aside, and the search goes on with the rest.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.judge import rubric
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.comparison import (
    Comparison,
    compare,
    same_magnitude,
    without_numbers,
)
from trapline.arena.judge.mutants import BOTH, GOLD, MutantHost, Run
from trapline.arena.judge.neighbours import Neighbours
from trapline.arena.judge.reproduction import call_in_words, call_size
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Transcript
from trapline.arena.record import CheckResult, CheckState, Finding

#: So many candidates are compared by their answers, with all their forms, and on so many checks.
MOST_CANDIDATES = 16
MOST_CHECKS = 12
#: Checks beyond those of the dictionary on which a confirmed cause is compared.
MOST_ECHOES = 40
#: Further ones that are tried where none of the best fits.
MOST_NARROW_CANDIDATES = 96
#: A pattern alone makes a cause likely only if it says something: the bug's mutant fails a small
#: part of the checks, nearly all of them fail here, and no other bug fits as well.
LEAST_PRECISION = 0.8
LEAST_FIT = 0.5
MOST_NARROW = 0.2
MARGIN = 0.1
#: Of two bugs at once, each shows in most of the checks that its mutant fails.
LEAST_CONTAINED = 0.6
#: A confirmed cause of so small a share of the failures is a side effect where one pattern fits
#: nearly all of them: rounding at another place than the mutant's makes a tie of its own.
MOST_SIDE = 0.34
LEAST_WHOLE = 0.7
#: Of the failing checks, the share that a mutant with two bugs must answer alike; and the number of
#: causes that such a pair may replace.
LEAST_BY_PAIR = 0.9
MOST_IN_DOUBT = 3
#: Bugs by their pattern alone that are tried as one of the two.
MOST_BROAD = 4
#: Where no bug is confirmed, so many pairs are tried, of so many bugs that fit best and whose
#: mutants fail nearly nothing that passes here.
MOST_PAIRS = 96
MOST_PAIRED = 64
LEAST_PAIRED = 0.9
#: Mutants that are run on all failing checks in their order, because they keep state, and checks.
MOST_IN_ORDER = 6
MOST_ASKED_IN_ORDER = 120
#: A quick diagnosis looks for no further cause after so many comparisons with a mutant.
QUICK_RUNS = 120
#: Findings without a name in one cell; the last of them stands for all further ones.
MOST_UNNAMED = 2
#: Failures that no cause explains, as a share of all, that are still taken for echoes of one.
ECHO = 0.25


@dataclass(frozen=True)
class Failure:
    """One failed check with what was said in it."""

    id: str
    message: str
    transcript: Transcript
    #: Why no answer came, as (exception, place, message without numbers); empty if one did.
    crash: tuple[str, str, str] = ("", "", "")
    #: What the submission does not offer, in words; empty when the check could be asked.
    not_offered: str = ""

    @property
    def crashed(self) -> bool:
        return bool(self.crash[0])


@dataclass
class Diagnosis:
    findings: list[Finding] = field(default_factory=list)
    #: Of every trap that failed.
    states: dict[str, CheckState] = field(default_factory=dict)
    #: Of every trap that failed and is not sprung: behind what it is hidden.
    behind: dict[str, str] = field(default_factory=dict)


class Diagnoser:
    """Explains one submission's failures."""

    def __init__(
        self,
        challenge: Challenge,
        host: MutantHost,
        failures: Sequence[Failure],
        control_passes: Callable[[Trap], bool] = lambda trap: True,
        *,
        quick: bool = False,
    ) -> None:
        self.challenge, self.host = challenge, host
        self.most_runs = QUICK_RUNS if quick else math.inf
        self.most_echoes = MOST_CHECKS if quick else MOST_ECHOES
        #: Checks that are never run on mutants, beside those whose own bug they are.
        self._too_slow = challenge.slow if quick else frozenset()
        self.control_passes = control_passes
        self.asked = {f.id: f for f in failures if not f.not_offered}
        self.failures = {f.id: f for f in failures}
        self.traps = {trap.id: trap for trap in challenge.traps}
        #: Form of a bug → the trap that names it.
        self.forms = {form: trap.id for form, trap in challenge.forms.items()}
        checks: list[Case | Trap] = [*challenge.cases, *challenge.traps]
        self._checks = len(checks)
        #: Checks of what happens to bad input.
        self._refusals = {check.id for check in checks if check.dimension == "robustness"}
        self.rest = set(self.asked)
        #: By the form of the bug: the checks that it explains.
        self.causes: dict[str, set[str]] = {}
        self.confirmed: set[str] = set()
        self._same: dict[tuple[str, str], bool] = {}
        self._right: dict[str, bool] = {}
        #: What bugs that keep state answer to the failing checks, one after the other.
        self._in_order: dict[str, dict[str, Run]] = {}
        self._comparisons: dict[tuple[str, str], Comparison] = {}
        #: By its identity: a transcript, and the parts of it that are judged.
        self._judged_parts: dict[int, tuple[Transcript, Transcript]] = {}

    @cached_property
    def neighbours(self) -> Neighbours:
        checks = [*(case.id for case in self.challenge.cases), *self.traps]
        return Neighbours(self.dictionary, checks)

    @cached_property
    def dictionary(self) -> Mapping[str, frozenset[str]]:
        return self.challenge.fault_dictionary

    def diagnose(self) -> Diagnosis:
        while self.rest and not self._is_spent():
            cause = self._next_cause()
            if cause is None:
                break
            self._set_aside(cause)
        self._try_pairs()
        self._drop_needless()
        return self._report()

    def _is_echo(self) -> bool:
        """What is left is so little that the causes so far may have brought it about: of all
        failures, and of those that are not about bad input, which hide others by their number."""
        few = len(self.rest) <= ECHO * len(self.asked)
        answers = self.asked.keys() - self._refusals
        return few and len(answers & self.rest) <= ECHO * len(answers)

    def _is_spent(self) -> bool:
        return self.host.runs >= self.most_runs

    def _affordable(self, forms: Iterable[str]) -> Iterator[str]:
        """The first of these bugs, as many as there are runs for."""
        return itertools.takewhile(lambda form: not self._is_spent(), forms)

    # -- choosing a cause -------------------------------------------------------------------------

    def _next_cause(self) -> str | None:
        """A confirmed cause, unless it explains little and a likely one nearly everything."""
        confirmed = self._confirmed_cause()
        if confirmed is None:
            return self._contained_cause() or self._likely_cause()
        if len(self._fails(confirmed) & self.rest) <= MOST_SIDE * len(self.rest):
            likely = self._likely_cause()
            if likely is not None and self._fit(likely) >= LEAST_WHOLE:
                return likely
        self.confirmed.add(confirmed)
        return confirmed

    def _confirmed_cause(self) -> str | None:
        """The bug whose mutant gives the same wrong answers to the most failing checks."""
        best = self._best_by_fit()
        others = [form for form in self._by_fit() if form not in best]
        # What state does to other checks is a matter of chance, so its pattern never fits.
        stateful = [form for form in others if self.traps[self.forms[form]].keeps_state]
        # Of several bugs at once a narrow one fits little of the rest, but fails here entirely.
        narrow = [form for form in others if self._precision(form) == 1.0]
        batches = [*best, *stateful], narrow[:MOST_NARROW_CANDIDATES]
        for batch in batches:
            candidates = [
                form
                for form in self._affordable(batch)
                if self._precision(form) >= 0.5 and self._confirms(form, self.forms[form])
            ]
            if candidates:
                break
        if not candidates:
            return None
        checks = self._deciding(candidates)
        return max(
            candidates,
            key=lambda form: (
                self._agreement(form, checks),
                self._fit(form),
                -self._rivals_that_show(form, candidates),
                self._same_messages(form, checks),
            ),
        )

    def _rivals_that_show(self, form: str, candidates: Sequence[str]) -> int:
        """How many other candidates fail this one's own trap, so that it need not be this bug."""
        own = self.forms[form]
        return sum(own in self._fails(other) for other in candidates if self.forms[other] != own)

    def _contained_cause(self) -> str | None:
        """With two bugs at once: one whose wrong elements are all there, among others."""
        candidates = [
            form
            for form in self._affordable(self._best_by_fit())
            if self._precision(form) == 1.0
            and self._comparison(form, self.forms[form]).contains_mutant
            and self._adds(form, self.forms[form])
        ]
        if not candidates:
            return None
        checks = self._deciding(candidates)
        contained = {
            form: sum(
                self._comparison(form, check).contains_mutant
                for check in checks
                if check in self._fails(form)
            )
            / sum(1 for check in checks if check in self._fails(form))
            for form in candidates
        }
        best = max(candidates, key=lambda form: (contained[form], self._fit(form)))
        return best if contained[best] >= LEAST_CONTAINED else None

    def _likely_cause(self) -> str | None:
        if self.causes and self._is_echo():
            return None
        if (only := self._only_failure()) is not None:
            return only
        # A crash says nothing about the trap's bug: its situation was never answered.
        ordered = [form for form in self._by_fit() if not self.failures[self.forms[form]].crashed]
        if not ordered or self._fit(ordered[0]) < LEAST_FIT:
            return None
        best = ordered[0]
        rivals = [form for form in ordered if self.forms[form] != self.forms[best]]
        runner_up = self._fit(rivals[0]) if rivals else 0.0
        is_narrow = len(self._fails(best)) <= MOST_NARROW * self._checks
        is_alone = self._fit(best) - runner_up >= MARGIN
        if not (is_narrow and is_alone and self._precision(best) >= LEAST_PRECISION):
            return None
        return best if self._may_be(self.traps[self.forms[best]]) else None

    def _may_be(self, trap: Trap) -> bool:
        """The trap fails as its bug does, and its situation without the trigger passes."""
        if len(self.failures) == 1 and not self._is_wrong_alike(trap):
            return False
        return self._is_beside_right_answers(trap)

    def _is_wrong_alike(self, trap: Trap) -> bool:
        """One of the trap's mutants fails its check with what is wrong here, such as an argument
        that stays changed; the message names that before its first number."""

        def subject(message: str) -> str:
            return without_numbers(message).partition("#")[0]

        found = subject(self.failures[trap.id].message)
        return any(subject(self.host.run(form, trap.id).message) == found for form in trap.forms)

    def _is_beside_right_answers(self, trap: Trap) -> bool:
        """The situation that differs from the trap's by its trigger is answered rightly."""
        if trap.control is not None:
            return self.control_passes(trap)
        nearest = self.neighbours.control(trap)
        if nearest is not None:
            return nearest not in self.failures
        return all(check in self.traps for check in self.failures)  # ordinary calls are answered

    def _only_failure(self) -> str | None:
        """The one check that fails is a trap, and its situation without the trigger passes."""
        if len(self.failures) != 1:
            return None
        ((check, failure),) = self.failures.items()
        trap = self.traps.get(check)
        if trap is None or failure.crashed or check not in self.rest:
            return None
        return next(iter(trap.forms)) if self._may_be(trap) else None

    def _by_fit(self) -> list[str]:
        """Bugs whose traps failed and are not explained yet, by how well their pattern fits."""
        named = {self.forms[cause] for cause in self.causes}
        candidates = [
            form for form, trap in self.forms.items() if trap in self.rest and trap not in named
        ]
        return sorted(candidates, key=lambda form: (-self._fit(form), -self._precision(form), form))

    def _best_by_fit(self) -> list[str]:
        """The forms of the bugs that fit best: the forms of one bug take no other's place."""
        ordered = self._by_fit()
        traps = list(dict.fromkeys(self.forms[form] for form in ordered))[:MOST_CANDIDATES]
        return [form for form in ordered if self.forms[form] in traps]

    def _fails(self, form: str) -> frozenset[str]:
        own = self.forms[form]
        if self.traps[own].keeps_state:
            return frozenset({own})
        return self.dictionary.get(form, frozenset()) | {own}

    def _fit(self, form: str) -> float:
        """Overlap of what the mutant fails with what is left to explain, over their union."""
        fails = self._fails(form)
        unexplained = fails - (self.asked.keys() - self.rest)
        return len(unexplained & self.rest) / len(unexplained | self.rest)

    def _precision(self, form: str) -> float:
        """The share of the checks that the mutant fails which the submission fails, too."""
        fails = self._fails(form)
        return len(fails & self.failures.keys()) / len(fails)

    def _deciding(self, candidates: Sequence[str]) -> list[str]:
        """The checks on which the candidates are compared: their own traps come first."""
        own = sorted({self.forms[form] for form in candidates} & self.rest)
        others = sorted(self.rest.difference(own, self._too_slow))
        return [*own, *others][: max(MOST_CHECKS, len(own))]

    def _agreement(self, form: str, checks: Sequence[str]) -> int:
        """On how many of these checks the mutant answers as the submission does."""
        fails = self._fails(form)
        same = sum(1 for check in checks if check in fails and self._confirms(form, check))
        return same - len(fails - self.failures.keys())

    def _same_messages(self, form: str, checks: Sequence[str]) -> int:
        """On how many of these checks the mutant fails with the same numbers in the message."""
        shared = [check for check in checks if check in self._fails(form)]
        return sum(
            self.host.run(form, check).message == self.failures[check].message for check in shared
        )

    def _comparison(self, form: str, check: str) -> Comparison:
        key = form, check
        if key not in self._comparisons:
            mutant, right = self.host.run(form, check), self.host.run(GOLD, check)
            got = self.failures[check].transcript
            self._comparisons[key] = self._compare(got, mutant.transcript, right.transcript)
        return self._comparisons[key]

    def _confirms(self, form: str, check: str) -> bool:
        """The mutant answers as the submission does, alone or beside the causes so far."""
        if self._same_answers(form, check):
            return True
        return self._together([*self.causes, form], check) and not self._is_explained(check)

    def _is_explained(self, check: str) -> bool:
        """The causes so far, one of them or all together, answer as the submission does."""
        return self._by([*self.causes], check)

    def _together(self, forms: Sequence[str], check: str) -> bool:
        """A mutant with all these bugs answers as the submission does; not for slow checks.

        Only those that may show in the check are planted: the same few serve many causes.
        """
        showing = [form for form in forms if self._may_show(form, check)]
        if len(showing) < 2 or check in self.challenge.slow:
            return False
        if not self.host.can_plant(BOTH.join(forms)):
            return False
        return self._same_answers(BOTH.join(showing), check)

    def _may_show(self, form: str, check: str) -> bool:
        """The bug fails this check, or keeps state, or breaks the contract: then it shows wherever
        another bug lets a call through that should be refused."""
        keeps_state = self.traps[self.forms[form]].keeps_state
        return check in self._fails(form) or keeps_state or self._breaks_contract(form)

    def _breaks_contract(self, form: str) -> bool:
        """The bug's mutant fails a case, one that is not about bad input."""
        return not self._fails(form) <= self.traps.keys() | self._refusals

    def _same_answers(self, form: str, check: str) -> bool:
        key = form, check
        if key not in self._same:
            self._same[key] = self._is_same(form, check)
        return self._same[key]

    def _is_same(self, form: str, check: str) -> bool:
        if self._is_same_in_order(form, check):
            return True
        if self._answers_rightly(check) and not self._may_fail(form, check):
            return self._has_same_message(form, check)
        mutant = self.host.run(form, check)
        if not mutant.failed:
            return False
        found = self._comparison(form, check)
        if found.is_same:
            return self._end_alike(check, mutant)
        same_reason = without_numbers(self.failures[check].message) == without_numbers(
            mutant.message
        )
        if not same_reason or found.is_right:
            return same_reason
        got = self.failures[check].transcript
        return same_magnitude(got, mutant.transcript) and self._varies(form, check)

    def _has_same_message(self, form: str, check: str) -> bool:
        """The mutant fails this check, which the dictionary's draw missed, with the same numbers:
        what is measured, such as memory, is never the same twice."""
        if check in self.challenge.slow:
            return False
        mutant = self.host.run(form, check)
        return mutant.failed and mutant.message == self.failures[check].message

    def _is_same_in_order(self, form: str, check: str) -> bool:
        """A bug that keeps state answers as the submission does after the same failing checks."""
        keeps = any(self.traps[self.forms[one]].keeps_state for one in form.split(BOTH))
        if not keeps or check in self.challenge.slow:
            return False
        if form not in self._in_order:
            asked = [other for other in self.asked if other not in self.challenge.slow]
            is_spent = self.host.runs + len(asked) > self.most_runs
            is_long = len(asked) > MOST_ASKED_IN_ORDER
            if is_spent or is_long or len(self._in_order) == MOST_IN_ORDER:
                return False
            self._in_order[form] = self.host.run_in_order(form, asked)
        mutant, right = self._in_order[form][check], self.host.run(GOLD, check)
        got = self.failures[check].transcript
        found = self._compare(got, mutant.transcript, right.transcript)
        return mutant.failed and found.is_same and self._end_alike(check, mutant)

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

    def _may_fail(self, form: str, check: str) -> bool:
        """Whether the dictionary has this check for one of these bugs."""
        return any(check in self._fails(one) for one in form.split(BOTH))

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

    # -- what a cause explains --------------------------------------------------------------------

    def _set_aside(self, cause: str) -> None:
        """Removes what this cause explains, but not what another bug explains better."""
        own = self.forms[cause]
        explained = {own}
        self.causes[cause] = explained
        by_chance = self.traps[own].keeps_state
        for check in sorted(self.rest if by_chance else self.rest & self._fails(cause)):
            if self._is_spent() or not self._has_own_cause(cause, check):
                explained.add(check)
        if cause in self.confirmed:
            explained |= self._same_crash(own)
        if cause in self.confirmed and not self._is_spent():
            explained |= set(self._echoes(cause))
        self.rest -= explained

    def _echoes(self, cause: str) -> Iterator[str]:
        """Further checks that fail by this cause: the dictionary's seeds may have missed some.

        A bug that answers one slow check in another way is not tried on the other slow ones.
        """
        tried = self.rest - self.causes[cause] - self._not_tried(cause)
        slow = self.challenge.slow if self.forms[cause] not in self.challenge.slow else frozenset()
        differs = False
        for check in sorted(tried)[: self.most_echoes]:
            if differs and check in slow:
                continue
            if self._same_answers(cause, check) or self._together([*self.causes], check):
                yield check
            else:
                differs = differs or check in slow

    def _not_tried(self, cause: str) -> frozenset[str]:
        """Checks too slow to be run on this bug's mutant: slow ones ask for ordinary answers, which
        a bug that no case of the contract notices leaves right."""
        own, slow = self.forms[cause], self.challenge.slow
        return self._too_slow if own in slow or self._breaks_contract(cause) else slow

    def _same_crash(self, check: str) -> set[str]:
        """Checks that are left and end at the same place with the same message."""
        crash = self.failures[check].crash
        return {other for other in self.rest if crash[0] and self.failures[other].crash == crash}

    def _has_own_cause(self, cause: str, check: str) -> bool:
        """This trap's own bug explains what the causes so far leave open."""
        own = self.forms[cause]
        if check not in self.traps or check == own or self._same_answers(cause, check):
            return False
        if self._together([*self.causes], check):
            return False
        if cause not in self.confirmed and not self._comparison(cause, own).contains_mutant:
            return False
        return any(self._explains_itself(form, check) for form in self.traps[check].forms)

    def _explains_itself(self, form: str, check: str) -> bool:
        if self._confirms(form, check):
            return True
        own = self._comparison(form, check)
        return self._precision(form) == 1.0 and own.contains_mutant and self._adds(form, check)

    def _adds(self, form: str, check: str) -> bool:
        """The mutant explains wrong elements of this check that the causes so far do not."""
        covered = np.zeros(len(self._comparison(form, check).wrong), bool)
        for cause in self.causes:
            explained = self._comparison(cause, check).explained
            length = min(len(covered), len(explained))
            covered[:length] |= explained[:length]
        return self._comparison(form, check).unexplained(covered)

    # -- two bugs at once -------------------------------------------------------------------------

    def _try_pairs(self) -> None:
        """Replaces the causes by two bugs whose mutant answers nearly every failing check as the
        submission does, where the causes so far answer fewer.

        Two bugs change each other's answers, so that a third may answer a few checks as both do.
        """
        if self._is_spent() or len(self.causes) > MOST_IN_DOUBT:
            return
        checks = self._compared_checks()
        best, most = None, sum(map(self._is_explained, checks))
        if most == len(checks):
            return
        most = max(most, math.ceil(LEAST_BY_PAIR * len(checks)) - 1)
        for pair in self._pairs(checks):
            both, own = BOTH.join(pair), [self.forms[form] for form in reversed(pair)]
            if all(self._same_answers(both, check) for check in own):
                found = self._matched(both, checks, most)
                best, most = (pair, found) if found else (best, most)
            if most == len(checks):
                break
        if best is not None:
            self._take_pair(best)

    def _compared_checks(self) -> list[str]:
        """Failing checks, at most so many, spread over all; the causes' own come first."""
        asked = self.asked.keys() - self.challenge.slow
        own = sorted({self.forms[cause] for cause in self.causes} & asked)
        others = sorted(asked.difference(own))
        step = max(1, math.ceil(len(others) / MOST_ECHOES))
        return [*own, *others[::step]]

    def _pairs(self, checks: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Bugs that show in many answers, each with every other bug whose trap failed."""
        others = [
            form
            for form, trap in self.forms.items()
            if trap in self.asked.keys() - self.challenge.slow
            and self._precision(form) >= 0.5
            and not self.traps[trap].keeps_state
        ]
        for one in self._broad(others, checks):
            for other in self._affordable(others):
                if self._can_be_pair(one, other):
                    yield one, other
        if not self.confirmed:
            yield from self._fitting_pairs(others)

    def _can_be_pair(self, one: str, other: str) -> bool:
        return self.forms[one] != self.forms[other] and self.host.can_plant(one + BOTH + other)

    def _fitting_pairs(self, forms: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Bugs that together fail what fails here; of neither alone need an answer be seen."""

        def fit(pair: tuple[str, str]) -> tuple[float, float]:
            fails = self._fails(pair[0]) | self._fails(pair[1])
            return self._overlap(fails), sum(self._overlap(self._fails(form)) for form in pair)

        fitting = [form for form in forms if self._precision(form) >= LEAST_PAIRED]
        fitting.sort(key=lambda form: (-self._overlap(self._fails(form)), form))
        pairs = itertools.combinations(fitting[:MOST_PAIRED], 2)
        for one, other in sorted(pairs, key=fit, reverse=True)[:MOST_PAIRS]:
            if self._can_be_pair(one, other) and not self._is_spent():
                yield one, other

    def _overlap(self, fails: Set[str]) -> float:
        """Of these checks and those that fail here, the share that is among both."""
        return len(fails & self.asked.keys()) / len(fails | self.asked.keys())

    def _broad(self, forms: Sequence[str], checks: Sequence[str]) -> list[str]:
        """Confirmed causes; and bugs whose pattern fits and that answer at least half of the checks
        alike, even if not their own trap, in which a second bug may show."""

        def overlap(form: str) -> float:
            return self._overlap(self._fails(form))

        def answers_most(form: str) -> bool:
            return self._matched(form, checks, (len(checks) - 1) // 2) > 0

        confirmed = [form for form in forms if form in self.confirmed]
        likely = sorted(set(forms).difference(confirmed), key=lambda form: (-overlap(form), form))
        return [*confirmed, *filter(answers_most, likely[:MOST_BROAD])]

    def _matched(self, form: str, checks: Sequence[str], least: int) -> int:
        """How many checks this mutant answers alike; 0 if no more than `least`."""
        found = 0
        for place, check in enumerate(checks):
            found += self._same_answers(form, check)
            if found + len(checks) - place - 1 <= least:
                return 0
        return found

    def _take_pair(self, pair: tuple[str, str]) -> None:
        one, other = pair
        both = BOTH.join(pair)
        self.causes = {form: {self.forms[form]} for form in pair}
        self.confirmed = set(pair)
        self.rest = self.asked.keys() - {self.forms[form] for form in pair}
        for check in sorted(self.rest - self.challenge.slow):
            if self._same_answers(both, check):
                self.causes[one if self._same_answers(one, check) else other].add(check)
                self.rest.discard(check)

    def _drop_needless(self) -> None:
        """Removes a cause if the others together answer all that it explains as the submission."""
        if len(self.causes) > MOST_IN_DOUBT:
            return
        for cause in sorted(self.causes, key=lambda cause: len(self.causes[cause])):
            others = [other for other in self.causes if other != cause]
            if others and all(self._by(others, check) for check in sorted(self.causes[cause])):
                self.causes[others[0]] |= self.causes.pop(cause)
                self.confirmed.discard(cause)

    def _by(self, causes: Sequence[str], check: str) -> bool:
        """One of these causes, or all of them together, answer as the submission does."""
        alone = any(self._same_answers(cause, check) for cause in causes)
        return alone or self._together(causes, check)

    # -- findings ---------------------------------------------------------------------------------

    def _report(self) -> Diagnosis:
        diagnosis = Diagnosis()
        order = self._ordered()
        diagnosis.findings = [self._named(cause) for cause in order]
        if not order or not self._is_echo() or self._is_spent():
            diagnosis.findings += self._unnamed()
        diagnosis.findings += self._not_offered()
        diagnosis.findings = _with_penalties(diagnosis.findings, self.traps)
        for check in self.failures:
            if check in self.traps:
                state, behind = self._state(check, diagnosis.findings)
                diagnosis.states[check] = state
                diagnosis.behind[check] = behind
        return diagnosis

    def _ordered(self) -> list[str]:
        """The surest causes first, the gravest of them first. What explains most of the failures
        leads; its number is taken by powers of two, since a draw moves it a little."""

        def weight(cause: str) -> tuple[bool, float, str]:
            penalty = rubric.PENALTY[self.traps[self.forms[cause]].severity]
            return cause not in self.confirmed, -penalty, cause

        def lead(cause: str) -> tuple[bool, int, tuple[bool, float, str]]:
            magnitude = len(self.causes[cause]).bit_length()
            return cause not in self.confirmed, -magnitude, weight(cause)

        first = min(self.causes, key=lead, default="")
        return sorted(self.causes, key=lambda cause: (cause != first, weight(cause)))

    def _named(self, cause: str) -> Finding:
        own = self.forms[cause]
        trap, failure = self.traps[own], self.failures[own]
        return Finding(
            cause=own,
            certainty="confirmed" if cause in self.confirmed else "likely",
            severity=trap.severity,
            sentence=_sentence(trap.catches),
            explains=[own, *sorted(self.causes[cause] - {own})],
            call=call_in_words(failure.transcript),
            where=failure.crash[1],
            dimension=trap.dimension,
        )

    def _unnamed(self) -> list[Finding]:
        """One finding for each place that raises, and one for all other wrong answers."""
        groups: dict[tuple[str, str, str], list[Failure]] = {}
        for check in self.asked:
            if check in self.rest:
                groups.setdefault(self.failures[check].crash, []).append(self.failures[check])
        _join_unplaced(groups)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        if len(ordered) > MOST_UNNAMED:  # many places that raise are one broken program
            last = MOST_UNNAMED - 1
            others = [failure for _, failures in ordered[last:] for failure in failures]
            ordered[last:] = [(ordered[last][0], others)]
        return [self._unnamed_finding(crash, failures) for crash, failures in ordered]

    def _unnamed_finding(self, crash: tuple[str, str, str], failures: list[Failure]) -> Finding:
        def by_size(failure: Failure) -> tuple[bool, int, str]:
            return failure.id in self._refusals, call_size(failure.transcript), failure.id

        smallest = min(failures, key=by_size)
        is_contract = any(failure.id not in self.traps for failure in failures)
        severe = is_contract or any(
            self.traps[failure.id].severity == "critical" for failure in failures
        )
        return Finding(
            cause="unnamed",
            certainty="likely",
            severity="major" if severe else "minor",
            sentence=_crash_sentence(crash) if crash[0] else _sentence(smallest.message),
            explains=[smallest.id, *(f.id for f in failures if f is not smallest)],
            call=call_in_words(smallest.transcript),
            where=crash[1],
        )

    def _not_offered(self) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for failure in self.failures.values():
            if failure.not_offered:
                groups.setdefault(failure.not_offered, []).append(failure.id)
        return [
            Finding(
                cause="unnamed",
                certainty="confirmed",
                severity="major",
                sentence=_sentence(f"{what} is not offered"),
                explains=checks,
                call=call_in_words(self.failures[checks[0]].transcript),
            )
            for what, checks in groups.items()
        ]

    def _state(self, check: str, findings: Sequence[Finding]) -> tuple[CheckState, str]:
        failure = self.failures[check]
        if failure.not_offered:
            return "not_asked", f"{failure.not_offered} is not offered"
        if check in {self.forms[cause] for cause in self.causes}:
            return "sprung", ""
        for finding in findings:
            if check in finding.explains and finding.cause != "unnamed":
                return "hidden", finding.cause
        if failure.crashed:
            return "crashed", failure.message
        return "hidden", findings[0].cause if findings else "unnamed"


def _join_unplaced(groups: dict[tuple[str, str, str], list[Failure]]) -> None:
    """A crash whose place is unknown joins the one with the same message whose place is known."""
    for kind, where, message in [crash for crash in groups if crash[0] and not crash[1]]:
        placed = [c for c in groups if c[1] and (c[0], c[2]) == (kind, message)]
        if len(placed) == 1:
            groups[placed[0]] += groups.pop((kind, where, message))


def _with_penalties(findings: Sequence[Finding], traps: Mapping[str, Trap]) -> list[Finding]:
    """Each finding with what it costs; constructed bugs cost little."""
    left, priced = rubric.CONSTRUCTED_MOST, []
    for finding in findings:
        penalty = rubric.PENALTY[finding.severity]
        trap = traps.get(finding.cause)
        if trap is not None and not trap.seen:
            penalty = min(left, rubric.CONSTRUCTED_SHARE * penalty)
            left -= penalty
        priced.append(finding.model_copy(update={"penalty": penalty}))
    return priced


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def _crash_sentence(crash: tuple[str, str, str]) -> str:
    kind, where, message = crash
    place = f" at {where}" if where else ""
    return _sentence(f"{kind}{place}: {message}" if message else f"{kind}{place}")


def failure_of(result: CheckResult, transcript: Transcript, not_offered: str = "") -> Failure:
    """A failed check, with the crash that ended it, if one did."""
    last = transcript.exchanges[-1] if transcript.exchanges else None
    crash = ("", "", "")
    if last is not None and last.died and result.message.startswith(last.died[:40]):
        crash = ("its process ends", "", without_numbers(last.died)[:200])
    elif last is not None and last.raised and result.message.startswith(f"raised {last.raised}"):
        if " was due" not in result.message:
            crash = (f"raises {last.raised}", last.where, without_numbers(last.message)[:200])
    elif result.message.startswith("not asked"):
        crash = ("its process ends", "", "hangs or dies again and again")
    return Failure(result.id, result.message, transcript, crash, not_offered)


def diagnose(
    challenge: Challenge,
    failures: Sequence[tuple[CheckResult, Transcript]],
    submission: Submission,
    host: MutantHost,
    *,
    quick: bool = False,
) -> Diagnosis:
    """The root causes of these failures; our mutants run on the same calls for comparison."""
    if not failures:
        return Diagnosis()
    offered = getattr(challenge.module("cases"), "not_offered", _not_implemented)
    found = [
        failure_of(result, transcript, offered(transcript) if transcript.exchanges else "")
        for result, transcript in failures
    ]

    def control_passes(trap: Trap) -> bool:
        assert trap.control is not None
        return run_check(Case(trap.id, trap.control), submission, host.seed).state == "pass"

    return Diagnoser(challenge, host, found, control_passes, quick=quick).diagnose()


def _not_implemented(transcript: Transcript) -> str:
    last = transcript.exchanges[-1]
    return f"{last.entry} as asked for here" if last.raised == "NotImplementedError" else ""
