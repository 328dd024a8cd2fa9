"""Two wrong answers are the same when they are much closer to each other than to the right one."""

import numpy as np
import pytest

from trapline.arena.judge.comparison import compare, same_magnitude, without_numbers
from trapline.arena.process.transcript import Exchange, Transcript


def said(*answers):
    return Transcript([Exchange("f", (), {}, answer=answer) for answer in answers])


def raising(kind):
    return Transcript([Exchange("f", (), {}, raised=kind)])


RIGHT = np.arange(6.0)


@pytest.mark.parametrize("noise", [0.0, 1e-12])
def test_same_wrong_answer_within_rounding(noise):
    wrong = RIGHT * 1.5
    assert compare(said(wrong + noise), said(wrong), said(RIGHT)).is_same


def test_different_wrong_answers_are_not_the_same():
    assert not compare(said(RIGHT * 1.5), said(RIGHT * 1.4), said(RIGHT)).is_same


def test_right_answers_are_no_match():
    found = compare(said(RIGHT), said(RIGHT * 1.5), said(RIGHT))
    assert not found.is_same
    assert not found.contains_mutant


def test_an_error_of_rounding_must_be_the_same_error():
    small = RIGHT.astype(np.float32) * np.float32(1 + 3e-5)
    other = RIGHT.astype(np.float32) * np.float32(1 - 3e-5)
    right = RIGHT.astype(np.float32)
    assert not compare(said(small), said(other), said(right)).is_same


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1e-3, False), (1e3, False)])
def test_rounding_of_float64_to_float32_is_a_class_of_its_own(factor, same):
    mine, theirs = (RIGHT * (1 + 3e-8 * np.cos(RIGHT + place)) for place in (0, 1))
    theirs = RIGHT + (theirs - RIGHT) * factor
    assert compare(said(mine), said(theirs), said(RIGHT)).is_same is same


@pytest.mark.parametrize("lowered", [True, False])
def test_half_precision_of_a_gpu_is_a_class_of_its_own(lowered):
    mine, theirs = (
        (RIGHT * (1 + 4e-4 * np.cos(3 * RIGHT + place))).astype(np.float32) for place in (0, 1)
    )
    right = said(RIGHT.astype(np.float32))
    assert compare(said(mine), said(theirs), right, lowered=lowered).is_same is lowered


def test_same_wrong_dtype_is_compared_within_the_rounding_of_the_right_one():
    """One code stores float32 numbers in float64, another never rounds them."""
    right = (RIGHT / 7).astype(np.float32)
    stored, unrounded = right.astype(np.float64), RIGHT / 7
    assert compare(said(unrounded), said(stored), said(right)).is_same
    assert not compare(said(2 * unrounded), said(stored), said(right)).is_same
    assert not compare(said(unrounded), said(right.astype(np.float16)), said(right)).is_same


def test_wrong_factor_is_not_taken_for_rounding():
    mine, theirs = RIGHT * (1 + 3e-8 * np.cos(RIGHT)), RIGHT * (1 + 3e-8)
    assert not compare(said(mine), said(theirs), said(RIGHT)).is_same


def test_second_bug_in_another_output_contains_the_first():
    first, second = RIGHT * 2, RIGHT * 3
    found = compare(said((first, second)), said((first, RIGHT)), said((RIGHT, RIGHT)))
    assert not found.is_same
    assert found.contains_mutant


def test_exceptions_are_compared_by_kind():
    assert compare(raising("ValueError"), raising("ValueError"), said(RIGHT)).is_same
    assert not compare(raising("ValueError"), raising("KeyError"), said(RIGHT)).is_same
    assert not compare(said(RIGHT), raising("KeyError"), said(RIGHT)).is_same


def test_accepting_what_must_be_refused_is_the_same_whatever_is_answered():
    assert compare(said(RIGHT), said(RIGHT * 7), raising("ValueError")).is_same


def test_number_of_calls_counts():
    found = compare(said(RIGHT * 2), said(RIGHT * 2, RIGHT), said(RIGHT, RIGHT))
    assert not found.is_same


@pytest.mark.parametrize(("a", "b", "same"), [(1e-3, 2e-3, True), (1e-3, 1.0, False)])
def test_varying_numbers_are_compared_by_magnitude(a, b, same):
    assert same_magnitude(said(a), said(b)) is same


@pytest.mark.parametrize(
    ("dx", "dgamma", "same"),
    [(0.5, 0.9, True), (0.1, 0.9, True), (1e-11, 0.9, False), (0.8, 1e-11, True)],
)
def test_of_several_varying_numbers_each_is_compared(dx, dgamma, same):
    mine = {"dx": dx, "dgamma": dgamma, "dbeta": 1e-11}
    assert same_magnitude(said(mine), said({"dx": 0.8, "dgamma": 0.06, "dbeta": 3e-9})) is same


def test_another_magnitude_than_infinity_is_another_error():
    infinite = {"dx": np.inf, "dgamma": 1.0}
    assert same_magnitude(said(infinite), said({"dx": np.inf, "dgamma": 2.0}))
    assert not same_magnitude(said(infinite), said({"dx": 2.0, "dgamma": 1.0}))


def test_messages_without_numbers():
    assert without_numbers("y[3] is 1.5e-3") == without_numbers("y[12] is -7")


@pytest.mark.parametrize(
    ("answer", "telling"),
    [
        (RIGHT * 1.5, True),
        (RIGHT * 0.0, False),
        (RIGHT * np.nan, False),
        ([], False),
        ([([2, 3], -1.5)], True),
        (1 << 80, True),
        (np.array(["text"]), True),
        (None, False),
    ],
)
def test_nothing_zero_and_no_number_tell_little(answer, telling):
    found = compare(said(answer), said(answer), said(RIGHT + 1))
    assert found.is_same
    assert found.is_telling is telling


def test_exceptions_tell_little():
    found = compare(raising("IndexError"), raising("IndexError"), said(RIGHT))
    assert found.is_same
    assert not found.is_telling


def test_addresses_of_objects_are_numbers():
    first, second = ("<Remote object at 0xffff8e1a2b30>", "<Remote object at 0x7f03c1d24abc>")
    assert without_numbers(first) == without_numbers(second) == "<Remote object at #>"
