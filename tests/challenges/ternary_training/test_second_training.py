"""A verdict that rests on training grants a second one: luck alone calls no right answer wrong."""

import pytest

from trapline.arena.errors import Violation
from trapline.challenges.ternary_training import cases


def by_rule(*shares):
    """The verdict on trainings that reach these shares, and how many of them were asked for."""
    left = list(shares)
    cases._by_rule(lambda _seconds: left.pop(0), 0.3, "the rule")
    return len(shares) - len(left)


def test_second_training_may_pass_after_a_failure():
    assert by_rule(0.45, 0.2) == 2


def test_no_second_training_after_a_pass():
    assert by_rule(0.2, 0.1) == 1


def test_after_two_failures_the_better_one_is_reported():
    with pytest.raises(Violation, match=r"the rule: perplexity 0\.44"):
        by_rule(0.45, 0.44)
