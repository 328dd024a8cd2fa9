"""Writes the causes of a submission's failures as findings."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from trapline.arena.judge import rubric
from trapline.arena.judge.failures import Failure
from trapline.arena.judge.patterns import Patterns
from trapline.arena.judge.reproduction import call_in_words, call_size
from trapline.arena.judge.traps import Trap
from trapline.arena.record import CheckState, Finding, FindingDimension

#: Findings without a name in one cell; the last of them stands for all further ones.
MOST_UNNAMED = 2
#: Of the failures in the largest of them: a smaller group is taken for its side effect.
SIDE_EFFECT = 0.25


@dataclass
class Diagnosis:
    findings: list[Finding] = field(default_factory=list)
    #: Of every trap that failed.
    states: dict[str, CheckState] = field(default_factory=dict)
    #: Of every trap that failed and is not sprung: behind what it is hidden.
    behind: dict[str, str] = field(default_factory=dict)


class Report:
    """Findings for causes, and for what they leave open."""

    def __init__(
        self,
        patterns: Patterns,
        failures: Mapping[str, Failure],
        causes: Mapping[str, Set[str]],
        confirmed: Set[str],
    ) -> None:
        """`causes`: by the form of the bug, the checks that it explains."""
        self.patterns, self.failures = patterns, failures
        self.causes, self.confirmed = causes, confirmed
        self.traps, self.forms = patterns.traps, patterns.forms

    def write(self, unexplained: Set[str]) -> Diagnosis:
        diagnosis = Diagnosis()
        found = [self._named(cause) for cause in self.ordered()]
        found += [*self._not_offered(), *self._unnamed(unexplained)]
        found.sort(key=lambda f: (f.certainty != "confirmed", f.dimension == "robustness"))
        diagnosis.findings = _with_penalties(found, self.traps)
        for check in self.failures:
            if check in self.traps:
                state, behind = self._state(check, diagnosis.findings)
                diagnosis.states[check] = state
                diagnosis.behind[check] = behind
        return diagnosis

    def ordered(self) -> list[str]:
        """The surest causes first, of these bugs before accepted bad input, then the gravest. What
        explains most of the failures leads; its number is taken by powers of two, since a draw
        moves it a little."""

        def rank(cause: str) -> tuple[bool, bool]:
            is_refusal = self.patterns.trap_of(cause).dimension == "robustness"
            return cause not in self.confirmed, is_refusal

        def weight(cause: str) -> tuple[tuple[bool, bool], float, str]:
            return rank(cause), -rubric.PENALTY[self.patterns.trap_of(cause).severity], cause

        def lead(cause: str) -> tuple[object, ...]:
            return rank(cause), -len(self.causes[cause]).bit_length(), weight(cause)

        first = min(self.causes, key=lead, default="")
        return sorted(self.causes, key=lambda cause: (cause != first, weight(cause)))

    def _named(self, cause: str) -> Finding:
        own = self.forms[cause]
        trap, failure = self.traps[own], self.failures[own]
        is_confirmed, severity, sentence = cause in self.confirmed, trap.severity, trap.catches
        if not is_confirmed and own in self.patterns.refusals and failure.end[0]:
            # The check is missing, but the input is not answered either.
            severity, sentence = "minor", f"{sentence} (here: {failure.message})"
        return Finding(
            cause=own,
            certainty="confirmed" if is_confirmed else "likely",
            severity=severity,
            sentence=_sentence(sentence),
            explains=[own, *sorted(self.causes[cause] - {own})],
            call=call_in_words(failure.transcript),
            where=failure.crash[1],
            dimension=trap.dimension,
        )

    def _unnamed(self, unexplained: Set[str]) -> list[Finding]:
        """One finding for each place that raises, and one for all other wrong answers."""
        groups: dict[tuple[str, str, str], list[Failure]] = {}
        for check, failure in self.failures.items():
            if check in unexplained:
                groups.setdefault(failure.crash, []).append(failure)
        _join_unplaced(groups)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        _join_side_effects(ordered)
        if len(ordered) > MOST_UNNAMED:  # many places that raise are one broken program
            last = MOST_UNNAMED - 1
            others = [failure for _, failures in ordered[last:] for failure in failures]
            ordered[last:] = [(ordered[last][0], others)]
        return [self._unnamed_finding(crash, failures) for crash, failures in ordered]

    def _unnamed_finding(self, crash: tuple[str, str, str], failures: list[Failure]) -> Finding:
        def by_size(failure: Failure) -> tuple[bool, int, str]:
            return failure.id in self.patterns.refusals, call_size(failure.transcript), failure.id

        alike = [f for f in failures if (f.crash[0], f.crash[2]) == (crash[0], crash[2])]
        smallest = min(alike, key=by_size)
        checks = [failure.id for failure in failures]
        is_contract = any(self._is_contract(check) for check in checks)
        is_critical = any(self.traps[c].severity == "critical" for c in checks if c in self.traps)
        return Finding(
            cause="unnamed",
            certainty="likely",
            severity="major" if is_contract or is_critical else "minor",
            sentence=_crash_sentence(crash) if crash[0] else _sentence(smallest.message),
            explains=[smallest.id, *(f.id for f in failures if f is not smallest)],
            call=call_in_words(smallest.transcript),
            where=crash[1],
            dimension=self._dimension(checks),
        )

    def _is_contract(self, check: str) -> bool:
        return check not in self.traps and check not in self.patterns.refusals

    def _dimension(self, checks: Collection[str]) -> FindingDimension:
        """What a bug without a name lowers: it is one of bad input if nothing else shows it."""
        return "robustness" if self.patterns.refusals.issuperset(checks) else "traps"

    def _not_offered(self) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for failure in self.failures.values():
            if failure.not_offered:
                groups.setdefault(failure.not_offered, []).append(failure.id)
        return [
            Finding(
                cause="unnamed",
                certainty="confirmed",
                severity="minor" if self._dimension(checks) == "robustness" else "major",
                sentence=_sentence(f"{what} is not offered"),
                explains=checks,
                call=call_in_words(self.failures[checks[0]].transcript),
                dimension=self._dimension(checks),
            )
            for what, checks in groups.items()
        ]

    def _state(self, check: str, findings: Sequence[Finding]) -> tuple[CheckState, str]:
        failure = self.failures[check]
        if failure.not_offered:
            return "not_asked", f"{failure.not_offered} is not offered"
        if check in {self.forms[cause] for cause in self.causes}:
            return "sprung", ""
        causes = [finding.cause for finding in findings if check in finding.explains]
        if named := [cause for cause in causes if cause != "unnamed"]:
            return "hidden", named[0]
        if failure.crashed:
            return "crashed", failure.message
        return "hidden", "unnamed" if causes else ""


def _join_unplaced(groups: dict[tuple[str, str, str], list[Failure]]) -> None:
    """A crash whose place is unknown joins the one with the same message whose place is known."""
    for kind, where, message in [crash for crash in groups if crash[0] and not crash[1]]:
        placed = [c for c in groups if c[1] and (c[0], c[2]) == (kind, message)]
        if len(placed) == 1:
            groups[placed[0]] += groups.pop((kind, where, message))


def _join_side_effects(ordered: list[tuple[tuple[str, str, str], list[Failure]]]) -> None:
    """Small groups join the largest, which comes first: one wrong line may also raise now and then,
    and a program that nearly always raises answers wrongly where it does not."""
    while len(ordered) > 1 and len(ordered[-1][1]) <= SIDE_EFFECT * len(ordered[0][1]):
        ordered[0][1].extend(ordered.pop()[1])


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
