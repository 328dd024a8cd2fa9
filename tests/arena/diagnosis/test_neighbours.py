"""The control situation of a trap that has none of its own."""

from types import SimpleNamespace

import pytest

from trapline.arena.challenge import load_all
from trapline.arena.judge.neighbours import Neighbours

FAILS = {
    "late-mask": frozenset({"late-mask", "long-mask"}),
    "mask-missing": frozenset({"late-mask", "causal", "long-mask"}),
    "mask-reversed": frozenset({"late-mask", "causal"}),
    "scale": frozenset({"full", "causal"}),
}


@pytest.fixture
def late_mask():
    return SimpleNamespace(id="late-mask", forms=["late-mask"])


def test_control_fails_for_the_same_bugs_but_not_for_the_traps_own(late_mask):
    checks = ["full", "causal", "long-mask", "late-mask"]
    assert Neighbours(FAILS, checks).control(late_mask) == "causal"


def test_trap_that_shares_no_bug_has_no_such_control(late_mask):
    assert Neighbours(FAILS, ["full", "late-mask"]).control(late_mask) is None


@pytest.mark.parametrize("challenge", load_all().values(), ids=load_all())
def test_control_passes_for_each_form_of_the_bug(challenge):
    checks = [check.id for check in (*challenge.cases, *challenge.traps)]
    neighbours = Neighbours(challenge.fault_dictionary, checks)
    for trap in challenge.traps:
        control = neighbours.control(trap)
        assert all(control not in challenge.fault_dictionary[form] for form in trap.forms)
