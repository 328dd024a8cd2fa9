"""From failed checks to root causes.

Each challenge knows what every named bug does: its fault dictionary lists the checks that the bug's
mutant fails. A cause is chosen in two steps. First by the pattern: a bug whose mutant fails checks
that the submission passes is not its bug. Then by the answers: the mutant is run on the failing
checks, and where it gives the same wrong answers the cause is confirmed. What a chosen cause
explains is set aside, and the search goes on with the rest.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.judge.answers import Answers
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.comparison import without_numbers
from trapline.arena.judge.failures import Failure, failure_of, is_not_refused
from trapline.arena.judge.findings import Diagnosis, Report
from trapline.arena.judge.mutants import BOTH, MutantHost
from trapline.arena.judge.pairs import PairSearch
from trapline.arena.judge.patterns import Patterns
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Transcript
from trapline.arena.record import CheckResult

#: So many candidates are compared by their answers, with all their forms, and on so many checks.
#: Bugs that fail nearly the same checks, such as all of them, count as one.
MOST_CANDIDATES = 16
SAME_PATTERN = 0.9
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
#: Two bugs at once may replace so many causes.
MOST_IN_DOUBT = 3
#: Of many causes at once, one of so few checks may be the work of another one.
MOST_COVERED = 6
#: Of the checks that end alike, the share that a bug must fail to be their cause.
LEAST_OF_ENDS = 0.5
#: Exceptions by which a contract refuses; an answer that refuses too much raises them on purpose.
REFUSALS = ("raises ValueError", "raises TypeError")
#: A quick diagnosis looks for no further cause after so many comparisons with a mutant.
QUICK_RUNS = 200
#: Failures that no cause explains, as a share of all, that are still taken for echoes of one.
ECHO = 0.25


class Diagnoser:
    """Explains one submission's failures."""

    def __init__(
        self,
        challenge: Challenge,
        host: MutantHost,
        failures: Sequence[Failure],
        control_passes: Callable[[Trap], bool] = lambda trap: True,
        fails_alone: Callable[[Trap], bool] = lambda trap: True,
        *,
        quick: bool = False,
    ) -> None:
        self.challenge, self.host = challenge, host
        self.most_runs = QUICK_RUNS if quick else math.inf
        self.most_echoes = MOST_CHECKS if quick else MOST_ECHOES
        #: Checks that are never run on mutants, beside those whose own bug they are.
        self._too_slow = challenge.slow if quick else frozenset()
        self.control_passes, self.fails_alone = control_passes, fails_alone
        self.asked = {f.id: f for f in failures if not f.not_offered}
        self.failures = {f.id: f for f in failures}
        self.patterns = Patterns(challenge, self.failures, self.asked)
        self.answers = Answers(challenge, host, self.patterns, self.failures, self.most_runs)
        self.traps, self.forms = self.patterns.traps, self.patterns.forms
        self.rest = set(self.asked)
        #: By the trap: whether it fails without earlier calls.
        self._alone: dict[str, bool] = {}
        #: By the form of the bug: the checks that it explains.
        self.causes: dict[str, set[str]] = {}
        self.confirmed: set[str] = set()

    def diagnose(self) -> Diagnosis:
        while self.rest and not self._is_spent():
            cause = self._next_cause()
            if cause is None:
                break
            self._set_aside(cause)
        self._try_pairs()
        self._drop_needless()
        self._withdraw_weak()
        is_whole = bool(self.causes) and self._is_echo() and not self._is_spent()
        report = Report(self.patterns, self.failures, self.causes, self.confirmed)
        return report.write(set() if is_whole else self.rest)

    def _is_echo(self) -> bool:
        """What is left is so little that the causes so far may have brought it about: of all
        failures, and of those that are not about bad input, which hide others by their number."""
        few = len(self.rest) <= ECHO * len(self.asked)
        answers = self.asked.keys() - self.patterns.refusals
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
        if len(self.patterns.fails(confirmed) & self.rest) <= MOST_SIDE * len(self.rest):
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
        stateful = [form for form in others if self.patterns.trap_of(form).keeps_state]
        # Of several bugs at once a narrow one fits little of the rest, but fails here entirely.
        narrow = [form for form in others if self.patterns.precision(form) == 1.0]
        # Beside a bug that fails nearly everything, accepted bad input fits worst of all. An answer
        # of nothing to any input has not looked at it.
        narrow, further = narrow[:MOST_NARROW_CANDIDATES], narrow[MOST_NARROW_CANDIDATES:]
        accepting = [
            form
            for form in further
            if (own := self.forms[form]) in self.patterns.refusals
            and self.failures[own].says_something
        ]
        batches = [*best, *stateful], narrow, accepting
        for batch in batches:
            candidates = [
                form
                for form in self._affordable(batch)
                if self.patterns.precision(form) >= 0.5
                and self._may_end_so(form)
                and self._confirms(form, self.forms[form])
            ]
            candidates = self._without_work_of_state(candidates)
            if candidates:
                break
        if not candidates:
            return None
        checks = self._deciding(candidates)
        leading = max(
            candidates,
            key=lambda form: (
                self._agreement(form, checks),
                self._fit(form),
                -self._rivals_that_show(form, candidates),
                self._same_messages(form, checks),
            ),
        )
        return self._form_in_every_check(leading, candidates)

    def _without_work_of_state(self, candidates: Sequence[str]) -> list[str]:
        """Beside a bug that keeps state, only those whose traps fail without earlier calls, too."""

        def keeps_state(form: str) -> bool:
            return self.patterns.trap_of(form).keeps_state

        if not any(map(keeps_state, [*candidates, *self.confirmed])):
            return [*candidates]
        traps = [self.traps[own] for own in sorted({self.forms[form] for form in candidates})]
        own = {trap.id for trap in traps if self._is_not_of_state(trap)}
        return [form for form in candidates if self.forms[form] in own]

    def _form_in_every_check(self, best: str, candidates: Sequence[str]) -> str:
        """Of a bug that keeps state, the form that answers the most checks as the submission does:
        its pattern, which tells the forms of other bugs apart, is a matter of chance."""
        if not self.patterns.trap_of(best).keeps_state:
            return self._form_in_known_checks(best)
        forms = [form for form in candidates if self.forms[form] == self.forms[best]]
        if len(forms) == 1:
            return best
        return max(forms, key=lambda form: self.answers.matched(form, sorted(self.rest), 0))

    def _form_in_known_checks(self, best: str) -> str:
        """This form of a bug, unless another one answers more of the checks that forms of it are
        known to fail: where rounding or an arbitrary order decides, a pattern is chance, too."""
        own = self.forms[best]
        forms = [form for form, trap in self.forms.items() if trap == own and form != best]
        known = self.patterns.fails(best).union(*map(self.patterns.fails, forms))
        checks = sorted(known & self.rest - self._too_slow - self.challenge.slow)[:MOST_CHECKS]
        most = self.answers.matched(best, checks, 0)
        for form in self._affordable(forms):
            if most < len(checks) and self._confirms(form, own):
                found = self.answers.matched(form, checks, most)
                best, most = (form, found) if found else (best, most)
        return best

    def _may_end_so(self, form: str) -> bool:
        """Checks that end at the same place with the same message share a cause: the bug's mutant
        fails most of those that end as its own trap does. Where state strikes is chance."""
        if self.patterns.trap_of(form).keeps_state:
            return True
        alike = self._alike_ends(self.forms[form])
        return len(alike & self.patterns.fails(form)) >= LEAST_OF_ENDS * len(alike)

    def _alike_ends(self, check: str) -> set[str]:
        """Failing checks that end with the same exception as this one, itself included; none where
        it does not end with an exception."""
        end = self.failures[check].end
        return {other for other, failure in self.asked.items() if end[0] and failure.end == end}

    def _rivals_that_show(self, form: str, candidates: Sequence[str]) -> int:
        """How many other candidates fail this one's own trap, so that it need not be this bug."""
        own = self.forms[form]
        return sum(
            own in self.patterns.fails(other) for other in candidates if self.forms[other] != own
        )

    def _contained_cause(self) -> str | None:
        """With two bugs at once: one whose wrong elements are all there, among others."""
        candidates = [
            form
            for form in self._affordable(self._best_by_fit())
            if self.patterns.precision(form) == 1.0
            and not self.failures[self.forms[form]].crashed
            and self.answers.comparison(form, self.forms[form]).contains_mutant
            and self._adds(form, self.forms[form])
        ]
        if not candidates:
            return None
        checks = self._deciding(candidates)
        contained = {
            form: sum(
                self.answers.comparison(form, check).contains_mutant
                for check in checks
                if check in self.patterns.fails(form)
            )
            / sum(1 for check in checks if check in self.patterns.fails(form))
            for form in candidates
        }
        best = max(candidates, key=lambda form: (contained[form], self._fit(form)))
        if contained[best] < LEAST_CONTAINED:
            return None
        return best if self._is_not_of_state(self.patterns.trap_of(best)) else None

    def _likely_cause(self) -> str | None:
        if self.causes and self._is_echo():
            return None
        if (only := self._only_failure()) is not None:
            return only
        # A crash says nothing about a bug that answers wrongly: its situation was never answered.
        ordered = [
            form
            for form in self._affordable(self._by_fit())
            if not self.failures[self.forms[form]].crashed or self._raises_alike(form)
        ]
        if not ordered or self._fit(ordered[0]) < LEAST_FIT:
            return None
        best = ordered[0]
        rivals = [form for form in ordered if self.forms[form] != self.forms[best]]
        runner_up = self._fit(rivals[0]) if rivals else 0.0
        is_narrow = len(self.patterns.fails(best)) <= MOST_NARROW * len(self.patterns.checks)
        is_alone = self._fit(best) - runner_up >= MARGIN
        if not (is_narrow and is_alone and self.patterns.precision(best) >= LEAST_PRECISION):
            return None
        return best if self._may_be(self.patterns.trap_of(best)) else None

    def _raises_alike(self, form: str) -> bool:
        """The bug is to raise, and exactly the checks that its mutant fails raise here, too, with
        one kind of exception. Which one is another matter in every code, but for refusals."""
        fails, kind = self.patterns.fails(form), self.failures[self.forms[form]].crash[0]
        alike = {check for check, failure in self.asked.items() if failure.crash[0] == kind}
        if len(fails) == 1 or alike != fails:
            return False
        mutant = self.host.run(form, self.forms[form])
        last = mutant.transcript.exchanges[-1:]
        raised = {f"raises {exchange.raised}" for exchange in last if exchange.raised}
        return bool(raised) and raised.issubset(REFUSALS) == (kind in REFUSALS)

    def _may_be(self, trap: Trap) -> bool:
        """The trap fails as its bug does, and its situation without the trigger passes."""
        # A slow check measures memory or training; a wrong answer ends it before that.
        may_differ = len(self.failures) > 1 and trap.id not in self.challenge.slow
        if not may_differ and not self._is_wrong_alike(trap):
            return False
        return self._is_beside_right_answers(trap) and self._is_not_of_state(trap)

    def _is_wrong_alike(self, trap: Trap) -> bool:
        """One of the trap's mutants fails its check with what is wrong here, such as an argument
        that stays changed; the message names that before its first number. Where bad input is not
        refused, it does not matter what becomes of it."""
        if trap.id in self.patterns.refusals and is_not_refused(self.failures[trap.id].message):
            runs = (self.host.run(form, trap.id) for form in trap.forms)
            return any(is_not_refused(run.message) for run in runs)

        def subject(message: str) -> str:
            return without_numbers(message).partition("#")[0]

        found = subject(self.failures[trap.id].message)
        return any(subject(self.host.run(form, trap.id).message) == found for form in trap.forms)

    def _is_beside_right_answers(self, trap: Trap) -> bool:
        """The situation that differs from the trap's by its trigger is answered rightly."""
        if trap.control is not None:
            return self.control_passes(trap)
        nearest = self.patterns.neighbours.control(trap)
        if nearest is not None:
            return nearest not in self.failures
        # Ordinary calls are answered.
        return self.failures.keys() <= self.traps.keys() | self.patterns.refusals

    def _is_not_of_state(self, trap: Trap) -> bool:
        """It fails without earlier calls, too: what those left behind is another bug."""
        if trap.id in self.challenge.slow or trap.keeps_state:
            return True
        if trap.id not in self._alone:
            self._alone[trap.id] = self.fails_alone(trap)
        return self._alone[trap.id]

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
        return sorted(
            candidates, key=lambda form: (-self._fit(form), -self.patterns.precision(form), form)
        )

    def _best_by_fit(self) -> list[str]:
        """The forms of the bugs that fit best: the forms of one bug take no other's place, and
        bugs that fail nearly the same checks share one."""
        ordered = self._by_fit()
        traps: set[str] = set()
        patterns: list[frozenset[str]] = []
        for form in ordered:
            fails, own = self.patterns.fails(form), self.forms[form]
            if own in traps:
                continue
            if not any(_overlap(fails, other) >= SAME_PATTERN for other in patterns):
                patterns.append(fails)
            if len(patterns) > MOST_CANDIDATES:
                break
            traps.add(own)
        return [form for form in ordered if self.forms[form] in traps]

    def _fit(self, form: str) -> float:
        """Overlap of what the mutant fails with what is left to explain, over their union."""
        fails = self.patterns.fails(form)
        unexplained = fails - (self.asked.keys() - self.rest)
        return len(unexplained & self.rest) / len(unexplained | self.rest)

    def _deciding(self, candidates: Sequence[str]) -> list[str]:
        """The checks on which the candidates are compared: their own traps come first."""
        own = sorted({self.forms[form] for form in candidates} & self.rest)
        others = sorted(self.rest.difference(own, self._too_slow))
        return [*own, *others][: max(MOST_CHECKS, len(own))]

    def _agreement(self, form: str, checks: Sequence[str]) -> int:
        """On how many of these checks the mutant answers as the submission does."""
        fails = self.patterns.fails(form)
        by_chance = self.patterns.trap_of(form).keeps_state
        shared = [check for check in checks if by_chance or check in fails]
        same = sum(self._confirms(form, check) for check in shared)
        return same - len(fails - self.failures.keys())

    def _same_messages(self, form: str, checks: Sequence[str]) -> int:
        """On how many of these checks the mutant fails with the same numbers in the message."""
        shared = [check for check in checks if check in self.patterns.fails(form)]
        return sum(
            self.host.run(form, check).message == self.failures[check].message for check in shared
        )

    def _confirms(self, form: str, check: str) -> bool:
        """The mutant answers as the submission does, alone or beside the causes so far."""
        if self.answers.same(form, check):
            return True
        return self.answers.together([*self.causes, form], check) and not self._is_explained(check)

    def _is_explained(self, check: str) -> bool:
        """The causes so far, one of them or all together, answer as the submission does."""
        return self.answers.by([*self.causes], check)

    # -- what a cause explains --------------------------------------------------------------------

    def _set_aside(self, cause: str) -> None:
        """Removes what this cause explains, but not what another bug explains better."""
        own = self.forms[cause]
        explained = {own}
        self.causes[cause] = explained
        by_chance = self.traps[own].keeps_state
        for check in sorted(self.rest if by_chance else self.rest & self.patterns.fails(cause)):
            if self._is_spent() or not self._has_own_cause(cause, check):
                explained.add(check)
        if cause in self.confirmed or own in self.patterns.refusals:
            explained |= self._alike_ends(own) & self.rest
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
            if self.answers.same(cause, check) or self.answers.together([*self.causes], check):
                yield check
            else:
                differs = differs or check in slow

    def _not_tried(self, cause: str) -> frozenset[str]:
        """Checks too slow to be run on this bug's mutant: slow ones ask for ordinary answers, which
        a bug that no case of the contract notices leaves right."""
        own, slow = self.forms[cause], self.challenge.slow
        return self._too_slow if own in slow or self.patterns.breaks_contract(cause) else slow

    def _has_own_cause(self, cause: str, check: str) -> bool:
        """This trap's own bug explains what the causes so far leave open."""
        own = self.forms[cause]
        if check not in self.traps or check == own or self.answers.same(cause, check):
            return False
        if self.answers.together([*self.causes], check):
            return False
        if cause not in self.confirmed and not self.answers.comparison(cause, own).contains_mutant:
            return False
        if not any(self._explains_itself(form, check) for form in self.traps[check].forms):
            return False
        return not self.answers.fails_alike_by_chance(cause, check)

    def _explains_itself(self, form: str, check: str) -> bool:
        if self._confirms(form, check):
            return True
        own = self.answers.comparison(form, check)
        return (
            self.patterns.precision(form) == 1.0 and own.contains_mutant and self._adds(form, check)
        )

    def _adds(self, form: str, check: str) -> bool:
        """The mutant explains wrong elements of this check that the causes so far do not."""
        covered = np.zeros(len(self.answers.comparison(form, check).wrong), bool)
        for cause in self.causes:
            explained = self.answers.comparison(cause, check).explained
            length = min(len(covered), len(explained))
            covered[:length] |= explained[:length]
        return self.answers.comparison(form, check).unexplained(covered)

    # -- two bugs at once -------------------------------------------------------------------------

    def _try_pairs(self) -> None:
        """Replaces the causes by two bugs that together answer more checks alike."""
        if self._is_spent() or len(self.causes) > MOST_IN_DOUBT:
            return
        search = PairSearch(
            self.patterns, self.answers, self.causes, self.confirmed, self._is_spent
        )
        pair = search.find()
        if pair is not None and self._without_work_of_state([*pair]) == [*pair]:
            self._take_pair(pair)

    def _take_pair(self, pair: tuple[str, str]) -> None:
        one, other = pair
        both = BOTH.join(pair)
        self.causes = {form: {self.forms[form]} for form in pair}
        self.confirmed = set(pair)
        self.rest = self.asked.keys() - {self.forms[form] for form in pair}
        for check in sorted(self.rest - self.challenge.slow):
            if self.answers.same(both, check):
                self.causes[one if self.answers.same(one, check) else other].add(check)
                self.rest.discard(check)

    def _drop_needless(self) -> None:
        """Removes a cause if the others together answer all that it explains as the submission."""
        if len(self.causes) > MOST_IN_DOUBT:
            self._drop_covered()
            return
        for cause in sorted(self.causes, key=lambda cause: len(self.causes[cause])):
            others = [other for other in self.causes if other != cause]
            if others and all(
                self.answers.by(others, check) for check in sorted(self.causes[cause])
            ):
                self.causes[others[0]] |= self.causes.pop(cause)
                self.confirmed.discard(cause)

    def _drop_covered(self) -> None:
        """Of many causes, removes one of a few checks if another one alone answers all of them as
        the submission does."""
        for cause in sorted(self.causes, key=lambda cause: len(self.causes[cause])):
            explained = sorted(self.causes[cause])
            if cause not in self.confirmed or len(explained) > MOST_COVERED:
                continue
            for other in sorted(self.confirmed - {cause}):
                if self._covers(other, cause, explained):
                    self.causes[other] |= self.causes.pop(cause)
                    self.confirmed.discard(cause)
                    break

    def _covers(self, other: str, cause: str, explained: Sequence[str]) -> bool:
        """`cause` does not explain what gives `other` its name, but `other` all that it does."""
        if not self.patterns.fails(other) >= set(explained) or self._is_spent():
            return False
        if self.answers.same(cause, self.forms[other]):
            return False
        return all(self.answers.same(other, check) for check in explained)

    def _withdraw_weak(self) -> None:
        """Leaves without a name what one unknown bug explains more simply than it and named ones:
        where more fails for an unknown reason than by a bug whose equal answers say little."""
        for cause in sorted(self.causes, key=lambda cause: len(self.causes[cause])):
            explained = self.causes[cause] - self.patterns.refusals
            left = self.rest - self.patterns.refusals
            if not self._is_echo() and len(left) > len(explained) and self._is_weak(cause):
                self.rest |= self.causes.pop(cause)
                self.confirmed.discard(cause)

    def _is_weak(self, cause: str) -> bool:
        """The answers that it shares with the submission are nothing, zero or an exception. A bug
        that refuses is weak only if the same refusal is met where its mutant would not refuse."""
        own = self.forms[cause]
        if cause not in self.confirmed or not self.answers.same(cause, own):
            return False
        if own in self.patterns.refusals or self.traps[own].keeps_state:
            return False
        if self.traps[own].severity == "critical":
            return False  # further bugs must not make a critical one cheaper
        if self.answers.is_telling(cause, self.causes[cause]):
            return False
        is_refusal = self.failures[own].end[0] in REFUSALS
        return not is_refusal or not self._alike_ends(own) <= self.patterns.fails(cause)


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


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

    def fails_alone(trap: Trap) -> bool:
        def clean(submission: Submission, rng: np.random.Generator) -> None:
            trap.run(submission.clean(), rng)

        return run_check(Case(trap.id, clean), submission, host.seed).state == "fail"

    return Diagnoser(challenge, host, found, control_passes, fails_alone, quick=quick).diagnose()


def _not_implemented(transcript: Transcript) -> str:
    last = transcript.exchanges[-1]
    return f"{last.entry} as asked for here" if last.raised == "NotImplementedError" else ""
