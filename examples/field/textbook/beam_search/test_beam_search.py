import numpy as np
import pytest
from solution import beam_search

EOS = 0


class Model:
    def __init__(self, table, vocabulary=4):
        self.table = table
        self.vocabulary = vocabulary
        self.calls = []

    def log_probs(self, prefixes):
        self.calls.append(prefixes)
        rows = np.full((len(prefixes), self.vocabulary), -np.inf)
        for row, prefix in zip(rows, prefixes):
            for token, value in self.table[tuple(prefix[1:])].items():
                row[token] = value
        return rows


def run(table, width=2, longest=3, penalty=0.0):
    model = Model(table)
    result = beam_search(
        model, [[9]], beam_width=width, max_new_tokens=longest, eos_id=EOS, length_penalty=penalty
    )
    return result[0], model


def test_eos_beam_is_kept():
    result, _ = run({(): {EOS: -3.0, 1: -1.0}, (1,): {2: -4.0}}, longest=2)
    assert result == [([EOS], -3.0), ([1, 2], -5.0)]


def test_length_penalty_changes_the_winner():
    table = {(): {EOS: -2.0, 1: -1.0}, (1,): {EOS: -2.0}}
    assert run(table, penalty=1.0)[0][0] == ([1, EOS], -1.5)
    assert run(table, penalty=0.0)[0][0] == ([EOS], -2.0)
    assert run(table, penalty=-1.0)[0][0] == ([EOS], -2.0)


def test_live_beams_compete():
    table = {(): {1: -1.0, 2: -3.0}, (1,): {1: -1.0, 2: -1.5}, (2,): {1: -1.0}}
    assert run(table, longest=2)[0] == [([1, 1], -2.0), ([1, 2], -2.5)]


def test_it_stops_when_nothing_can_improve():
    result, model = run({(): {EOS: -1.0, 1: -4.0}}, width=1, longest=4, penalty=1.0)
    assert result == [([EOS], -1.0)]
    assert len(model.calls) == 1


def test_it_goes_on_while_something_can_improve():
    table = {(): {EOS: -2.0, 1: -2.5}, (1,): {2: -0.25}, (1, 2): {EOS: -0.25}}
    assert run(table, width=1, longest=4, penalty=1.0)[0] == [([1, 2, EOS], -1.0)]


def test_ties():
    assert run({(): {1: -1.0, 2: -1.0, 3: -1.0}}, longest=1)[0] == [([1], -1.0), ([2], -1.0)]


def test_batch_makes_one_call_per_step():
    table = {(): {1: -1.0}, (1,): {EOS: -1.0}}
    model = Model(table)
    result = beam_search(model, [[5], [6], [7]], beam_width=2, max_new_tokens=2, eos_id=EOS)
    assert result == [[([1, EOS], -1.0)]] * 3
    assert [len(call) for call in model.calls] == [3, 3]


@pytest.mark.parametrize("bad", [{"beam_width": 0}, {"max_new_tokens": 0}, {"eos_id": 9}])
def test_bad_input(bad):
    settings = {"beam_width": 1, "max_new_tokens": 1, "eos_id": 0, **bad}
    with pytest.raises(ValueError):
        beam_search(Model({(): {1: -1.0}}), [[9]], **settings)
