"""Certifies the diagnosis: each named bug is found under its own name, and nothing else is."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from trapline.arena.certify.mechanical import mechanical_mutants
from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.failures import Failure, failure_of
from trapline.arena.judge.mutants import MutantHost, Run
from trapline.arena.judge.traps import Trap
from trapline.arena.record import CheckResult, Finding, Record
from trapline.arena.runs.executor import run_all

#: Situations are drawn at random: a check counts when it fails for each of these seeds.
SEEDS = (1,)

LEAST_LEADING = 0.97
MOST_ACCUSED = 0.1
LEAST_PAIRS = 0.8
MOST_THIRD = 0.05
#: Findings of a mechanical mutant: the median, and how many nearly all of them have at most.
MEDIAN_FINDINGS = 1
MOST_FINDINGS, LEAST_WITHIN = 3, 0.95

#: Kind, name, bugs and files.
Subject = tuple[str, str, list[str], dict[str, str]]


class Diagnosed(Record):
    """One subject: the bugs that it carries and the findings."""

    subject: str
    carries: list[str]
    findings: list[Finding]

    @property
    def causes(self) -> list[str]:
        return [finding.cause for finding in self.findings if finding.cause != "unnamed"]

    @property
    def leads(self) -> bool:
        """The first finding is the bug that it carries, confirmed."""
        if not self.findings or not self.carries:
            return not self.findings and not self.carries
        first = self.findings[0]
        return first.cause in self.carries and first.certainty == "confirmed"

    @property
    def is_exact(self) -> bool:
        """The findings are its bugs, confirmed, and nothing else: no other name, none unnamed."""
        confirmed = [f.cause for f in self.findings if f.certainty == "confirmed"]
        return sorted(confirmed) == sorted(self.carries) and len(confirmed) == len(self.findings)

    @property
    def confirms(self) -> bool:
        """Each bug that it carries is a finding, confirmed."""
        return set(self.carries) <= {f.cause for f in self.findings if f.certainty == "confirmed"}

    @property
    def named(self) -> bool:
        return set(self.carries) <= set(self.causes)

    @property
    def unnamed(self) -> int:
        return sum(finding.cause == "unnamed" for finding in self.findings)

    @property
    def accused(self) -> list[Finding]:
        """Findings that name a bug which it does not carry."""
        return [f for f in self.findings if f.cause not in (*self.carries, "unnamed")]


class DiagnosisCertificate(Record):
    challenge: str
    seed: int
    mutants: list[Diagnosed]
    pairs: list[Diagnosed]
    right: list[Diagnosed]
    mechanical: list[Diagnosed] = []

    def summary(self) -> dict[str, float]:
        """The shares and means that the goals are about."""
        counts = [len(d.findings) for d in self.mechanical if d.findings]
        return {
            "mutants": len(self.mutants),
            "lead_with_their_own_finding": _share([d.leads for d in self.mutants]),
            "own_finding_confirmed": _share([d.confirms for d in self.mutants]),
            "exactly_their_own_finding": _share([d.is_exact for d in self.mutants]),
            "unnamed_findings_a_mutant": _mean([d.unnamed for d in self.mutants]),
            "accusations_of_others_a_mutant": _mean([len(d.accused) for d in self.mutants]),
            "critical_accusations_of_others": sum(
                finding.severity == "critical" for d in self.mutants for finding in d.accused
            ),
            "pairs": len(self.pairs),
            "pairs_with_both_named": _share([d.named for d in self.pairs]),
            "pairs_with_a_third_accused": _share([bool(d.accused) for d in self.pairs]),
            "right_answers": len(self.right),
            "right_answers_with_findings": sum(bool(d.findings) for d in self.right),
            "mechanical_mutants_caught": len(counts),
            "median_of_their_findings": median(counts) if counts else 0,
            "share_with_at_most_three_findings": _share([n <= MOST_FINDINGS for n in counts]),
        }

    def holds(self) -> bool:
        """The goals: 97 % lead, no critical accusation of another bug, no finding in right ones."""
        found = self.summary()
        pairs_hold = (
            found["pairs_with_both_named"] >= LEAST_PAIRS
            and found["pairs_with_a_third_accused"] <= MOST_THIRD
        )
        mechanical_hold = (
            found["median_of_their_findings"] <= MEDIAN_FINDINGS
            and found["share_with_at_most_three_findings"] >= LEAST_WITHIN
        )
        return (
            found["lead_with_their_own_finding"] >= LEAST_LEADING
            and found["accusations_of_others_a_mutant"] <= MOST_ACCUSED
            and not found["critical_accusations_of_others"]
            and not found["right_answers_with_findings"]
            and (not self.pairs or pairs_hold)
            and (not found["mechanical_mutants_caught"] or mechanical_hold)
        )


def _share(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


class DiagnosisCertifier:
    """Runs subjects of ours in mutant hosts, one host a thread."""

    def __init__(self, challenge: Challenge, seed: int) -> None:
        self.challenge, self.seed = challenge, seed
        self.gold = challenge.solution_files()
        self.checks = [case.id for case in challenge.cases] + [t.id for t in challenge.traps]
        self.slow = challenge.slow
        self._local = threading.local()
        self._hosts: list[MutantHost] = []

    def __enter__(self) -> "DiagnosisCertifier":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()

    def host(self, seed: int) -> MutantHost:
        hosts: dict[int, MutantHost] = self._local.__dict__.setdefault("hosts", {})
        if seed not in hosts:
            hosts[seed] = MutantHost(self.challenge, seed)
            self._hosts.append(hosts[seed])
        return hosts[seed]

    def certify(
        self, subjects: Sequence[Subject], on_result: Callable[[Diagnosed], None] = lambda _: None
    ) -> DiagnosisCertificate:
        kinds = "mutants", "pairs", "right", "mechanical"
        found: dict[str, list[Diagnosed]] = {kind: [] for kind in kinds}
        for (kind, *_), diagnosed in run_all(self._diagnose, subjects):
            found[kind].append(diagnosed)
            on_result(diagnosed)
        for results in found.values():
            results.sort(key=lambda diagnosed: diagnosed.subject)
        return DiagnosisCertificate(challenge=self.challenge.id, seed=self.seed, **found)

    def subjects(self, pairs: int, mechanical: int = 0) -> Iterator[Subject]:
        """Right answers, every named bug, so many pairs of them and so many mechanical mutants."""
        for folder in [self.challenge.solution, *self.challenge.alternates]:
            files = {
                str(path.relative_to(folder)): path.read_text(encoding="utf-8")
                for path in sorted(folder.rglob("*.py"))
            }
            yield "right", folder.name, [], files
        for trap in self.challenge.traps:
            for form in trap.forms:
                yield "mutants", form, [trap.id], trap.plant(self.gold, form)
        draw = random.Random(self.seed)
        made = 0
        while made < pairs:
            one, other = draw.sample(self.challenge.traps, 2)
            try:
                files = other.plant(one.plant(self.gold))
            except ArenaError:
                continue  # the two edits touch the same text
            made += 1
            yield "pairs", f"{one.id} + {other.id}", [one.id, other.id], files
        equivalent = self.challenge.equivalent
        mutants = [m for m in mechanical_mutants(self.gold) if m.id not in equivalent]
        for mutant in draw.sample(mutants, min(mechanical, len(mutants))):
            yield "mechanical", mutant.id, [], mutant.files

    def _diagnose(self, subject: Subject) -> Diagnosed:
        _, name, carries, files = subject
        host = self.host(self.seed)
        failures = list(self.failures(host, files, carries))

        def fails_alone(trap: Trap) -> bool:
            return host.run_again(files, trap.id).failed

        found = Diagnoser(self.challenge, host, failures, fails_alone=fails_alone).diagnose()
        return Diagnosed(subject=name, carries=carries, findings=found.findings)

    def failures(
        self, host: MutantHost, files: dict[str, str], carries: Sequence[str]
    ) -> Iterator[Failure]:
        for check in self.checks:
            if check in self.slow and check not in carries:
                continue
            run = host.run_files(files, check)
            if run.failed:
                yield _failure(check, run)

    def dictionary(self, on_result: Callable[[], None] = lambda: None) -> dict[str, list[str]]:
        """Form of a trap's bug → the checks that it fails for every seed."""
        forms = {form: trap.id for form, trap in self.challenge.forms.items()}
        jobs = [(form, trap, seed) for form, trap in forms.items() for seed in SEEDS]
        fails: dict[str, set[str]] = {}
        for (form, trap, _), failed in run_all(lambda job: self._fails(*job), jobs):
            fails[form] = fails.get(form, failed) & failed | {trap}
            on_result()
        order = {check: place for place, check in enumerate(self.checks)}
        return {form: sorted(fails[form], key=order.__getitem__) for form in forms}

    def _fails(self, form: str, trap: str, seed: int) -> set[str]:
        host = self.host(seed)
        asked = [check for check in self.checks if check not in self.slow and check != trap]
        return {check for check in asked if host.run(form, check).failed}


def _failure(check: str, run: Run) -> Failure:
    result = CheckResult(id=check, state="fail", message=run.message)
    return failure_of(result, run.transcript)


def write_dictionary(challenge: Challenge, fails: dict[str, list[str]]) -> Path:
    path = challenge.dictionary_path
    lines = [f"  {json.dumps(trap)}: {json.dumps(checks)}" for trap, checks in fails.items()]
    path.write_text('{"fails": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    return path
