"""Which comparisons with a mutant a diagnosis leaves out because they cannot tell anything."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.failures import Failure
from trapline.arena.judge.mutants import Run
from trapline.arena.process.transcript import Exchange, Transcript


def said(answer):
    return Transcript([Exchange("entry", (), {}, answer=answer)])


class Host:
    """Each bug answers its own trap as the submission does, and all else rightly."""

    def __init__(self):
        self.runs, self.asked = 0, []

    def can_plant(self, subject):
        return True

    def run(self, subject, check):
        self.runs += 1
        self.asked.append((subject, check))
        wrong = check in subject.split(" + ")
        return Run(wrong, f"{check} is wrong", said(7.0 if wrong else 1.0))


def asked_for(challenge, *failing):
    host = Host()
    failures = [Failure(check, f"{check} is wrong", said(7.0)) for check in failing]
    Diagnoser(load(challenge), host, failures).diagnose()
    return host.asked


@pytest.mark.parametrize(
    ("bug", "tried"),
    [
        ("setting-missing", False),  # accepts bad input; all ordinary answers are right
        ("scales-broadcast", False),  # so does this one, in a case as well
        ("scale-by-largest", True),  # fails a case: what it trains may be worse, too
    ],
)
def test_slow_checks_are_asked_of_bugs_that_may_fail_them(bug, tried):
    asked = asked_for("ternary_training", bug, "quantises-normal-weights", "learns")
    assert ((bug, "learns") in asked) is tried


def test_bug_that_differs_in_one_slow_check_is_not_tried_on_the_others():
    failing = ["learns", "learns-a-rule-two-back", "recalls-the-first-token", "group-filled-up"]
    asked = asked_for("ternary_training", "scale-by-largest", "quantises-normal-weights", *failing)
    tried = {check for bug, check in asked if bug == "scale-by-largest"}
    assert tried & load("ternary_training").slow == {"learns"}
    assert "group-filled-up" in tried


def test_bugs_that_cannot_show_in_a_check_are_not_planted_for_it():
    narrow = ["complex-draft-accepted", "complex-laws-accepted", "negative-limit-accepted"]
    asked = asked_for("dflash", *narrow, "negative-node-accepted")
    assert {subject for subject, _ in asked} == {"gold", *narrow, "negative-node-accepted"}
