"""What an oracle computed is kept for equal arguments only, and belongs to who asks."""

from typing import NamedTuple

import numpy as np
import pytest

from trapline.arena.judge import remembered as module
from trapline.arena.judge.remembered import remembered


class Pair(NamedTuple):
    total: np.ndarray
    double: np.ndarray


class Counted:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: np.ndarray, factor: float = 1.0) -> Pair:
        self.calls += 1
        return Pair(np.asarray(x.sum()), 2 * factor * x)


@pytest.fixture
def counted():
    function = Counted()
    return function, remembered(function.__call__)


def test_equal_arguments_are_computed_once(counted):
    function, once = counted
    first = once(np.arange(100.0))
    second = once(np.arange(100.0))
    assert function.calls == 1
    assert type(second) is Pair
    assert np.array_equal(first.double, second.double)


def test_a_changed_answer_does_not_change_what_is_kept(counted):
    _, once = counted
    x = np.arange(100.0)
    for _ in range(3):
        got = once(x)
        assert np.array_equal(got.double, 2 * x)
        got.double[:] = 7.0


@pytest.mark.parametrize(
    "other",
    [
        np.arange(100.0) + 1e-9,
        np.arange(100.0, dtype=np.float32),
        np.arange(100.0).reshape(10, 10),
        np.asfortranarray(np.arange(100.0).reshape(10, 10)),
        np.arange(200.0)[::2],
        -np.arange(100.0),
    ],
)
def test_other_arrays_are_computed(counted, other):
    function, once = counted
    for x in (np.arange(100.0), np.arange(100.0).reshape(10, 10).copy()):
        once(x)
    known = function.calls
    got = once(other)
    assert function.calls == known + (other.shape != (10, 10) or not other.flags.c_contiguous)
    assert np.array_equal(got.double, 2 * other)


def test_numbers_that_are_equal_but_not_the_same_are_told_apart(counted):
    function, once = counted
    for factor in (0.0, -0.0, 0, False, 1.0, 1, True, np.float64(1.0), np.float32(1.0)):
        once(np.ones(3), factor=factor)
    assert function.calls == 9


def test_what_cannot_be_kept_is_computed(counted, monkeypatch):
    function, once = counted
    monkeypatch.setattr(module, "MOST_GIVEN", 64)
    for _ in range(2):
        once(np.ones(100))
    assert function.calls == 2
    plain = remembered(lambda x: [x])
    assert plain(np.ones(2))[0] is not plain(np.ones(2))[0]


def test_what_was_not_asked_for_longest_goes_first(counted, monkeypatch):
    function, once = counted
    monkeypatch.setattr(module, "MOST_BYTES", 4 * 8 * 101)
    for start in (*range(4), 0, 4, 0):
        once(np.arange(100.0) + start)
    assert function.calls == 5
    once(np.arange(100.0) + 1)
    assert function.calls == 6


def test_an_exception_is_not_kept(counted):
    calls = []

    @remembered
    def refuses(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            refuses(np.ones(2))
    assert len(calls) == 2
