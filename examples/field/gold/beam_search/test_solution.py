"""Beam search against hand-made tables, an exhaustive enumeration and a slow restatement."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from solution import beam_search

E, A, B, C = 0, 1, 2, 3


class TableModel:
    """Says exactly what a table says; what it does not mention has probability 0."""

    def __init__(self, tables, vocabulary=4, dtype=np.float64):
        self.tables = {tuple(prompt): table for prompt, table in tables}
        self.vocabulary = vocabulary
        self.dtype = dtype
        self.calls = []

    def log_probs(self, prefixes):
        self.calls.append([tuple(prefix) for prefix in prefixes])
        return np.stack([self.row(tuple(prefix)) for prefix in prefixes]).astype(self.dtype)

    def row(self, prefix):
        for prompt, table in self.tables.items():
            if prefix[: len(prompt)] == prompt:
                row = np.full(self.vocabulary, -np.inf)
                for token, value in table[prefix[len(prompt) :]].items():
                    row[token] = value
                return row
        raise KeyError(prefix)


class RandomModel:
    def __init__(self, seed, vocabulary, sparse=0.0, coarse=False):
        self.seed, self.vocabulary, self.sparse, self.coarse = seed, vocabulary, sparse, coarse
        self.calls = []

    def row(self, prefix):
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        if self.coarse:
            row = -0.5 * rng.integers(1, 4, self.vocabulary)
        else:
            row = np.log(rng.dirichlet(np.ones(self.vocabulary)))
        row[rng.random(self.vocabulary) < self.sparse] = -np.inf
        return row

    def log_probs(self, prefixes):
        self.calls.append([tuple(prefix) for prefix in prefixes])
        return np.stack([self.row(tuple(prefix)) for prefix in prefixes])


def search(table, prompt=(7, 8), **settings):
    model = TableModel([(prompt, table)])
    settings = {
        "beam_width": 2,
        "max_new_tokens": 3,
        "eos_id": E,
        "length_penalty": 0.0,
        **settings,
    }
    return beam_search(model, [list(prompt)], **settings)[0], model


def slow_search(model, prompt, width, longest, eos, penalty):
    """The contract once more, in tuples that sort; also returns the prefixes of every step."""
    live, pool, asked = [(0.0, ())], [], []
    for n in range(1, longest + 1):
        asked.append(sorted(tuple(prompt) + tokens for _, tokens in live))
        found = [
            (-(total + value), parent, token, (*tokens, token))
            for parent, (total, tokens) in enumerate(live)
            for token, value in enumerate(model.row(tuple(prompt) + tokens).tolist())
            if value > -math.inf
        ]
        ended = [(s / n**penalty, n, 0, p, t, seq) for s, p, t, seq in found if t == eos]
        best = sorted(f for f in found if f[2] != eos)[:width]
        if n == longest:
            ended += [(s / n**penalty, n, 1, p, t, seq) for s, p, t, seq in best]
        pool = sorted(pool + ended)[:width]
        live = [(-s, seq) for s, _, _, seq in best]
        bounds = [total / m**penalty for total, _ in live for m in range(n + 1, longest + 1)]
        if len(pool) == width and all(bound <= -pool[-1][0] for bound in bounds):
            break
        if not live:
            break
    return [(list(entry[-1]), -entry[0]) for entry in pool], asked


def test_a_finished_hypothesis_is_kept_and_wins_by_its_frozen_score():
    found, _ = search({(): {E: -3.0, A: -1.0}, (A,): {B: -4.0}}, max_new_tokens=2)
    assert found == [([E], -3.0), ([A, B], -5.0)]


def test_two_ends_of_different_length_are_ranked_by_score():
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -2.0}}
    assert search(table, length_penalty=1.0)[0] == [([A, E], -1.5), ([E], -2.0)]
    assert search(table, length_penalty=0.0)[0] == [([E], -2.0), ([A, E], -3.0)]
    assert search(table, length_penalty=-1.0)[0] == [([E], -2.0), ([A, E], -6.0)]


def test_the_prompt_does_not_count():
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -2.0}}
    found, _ = search(table, prompt=(9,) * 50, length_penalty=1.0)
    assert found[0] == ([A, E], -1.5)


def test_the_penalty_never_touches_the_running_sum():
    table = {(): {A: -2.0}, (A,): {B: -2.0}, (A, B): {E: -2.0}}
    assert search(table, length_penalty=1.0)[0] == [([A, B, E], -2.0)]


def test_ends_take_no_place_from_live_beams():
    table = {(): {E: -1.0, A: -2.0, B: -3.0}, (A,): {E: -9.0}, (B,): {E: -0.5}}
    assert search(table)[0] == [([E], -1.0), ([B, E], -3.5)]


def test_values_are_used_as_they_are():
    assert search({(): {E: -3.0, A: -9.0}, (A,): {E: -1.0}})[0][0] == ([E], -3.0)


def test_the_bound_looks_to_the_maximum_length_for_a_positive_penalty():
    table = {(): {E: -2.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {E: -0.25}}
    found, model = search(table, beam_width=1, max_new_tokens=4, length_penalty=1.0)
    assert found == [([A, B, E], -1.0)]
    assert len(model.calls) == 3


def test_the_bound_looks_one_step_ahead_for_a_negative_penalty():
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -0.5}}
    settings = {"beam_width": 1, "max_new_tokens": 8, "length_penalty": -1.0}
    assert search(table, **settings)[0] == [([A, E], -3.0)]
    assert len(search({(): {E: -3.0, A: -2.0}}, **settings)[1].calls) == 1


def test_a_tie_with_the_worst_stops():
    found, model = search(
        {(): {E: -1.0, A: -4.0}}, beam_width=1, max_new_tokens=4, length_penalty=1.0
    )
    assert found == [([E], -1.0)]
    assert len(model.calls) == 1


def test_ties_go_to_the_earlier_then_the_lower_parent_then_the_lower_token():
    assert search({(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}})[0][0] == ([E], -2.0)
    crossed = {(): {B: -1.0, A: -2.0}, (B,): {C: -3.0}, (A,): {A: -2.0}}
    assert [t for t, _ in search(crossed, max_new_tokens=2)[0]] == [[B, C], [A, A]]
    level = search({(): {A: -1.0, B: -1.0, C: -1.0}}, max_new_tokens=1)[0]
    assert [t for t, _ in level] == [[A], [B]]


def test_probability_zero_is_no_continuation():
    assert search({(): {A: -1.0}}, beam_width=3, max_new_tokens=1)[0] == [([A], -1.0)]
    assert search({(): {A: -1.0}, (A,): {}})[0] == []


def test_sums_are_float64():
    big = -(2.0**24)
    model = TableModel([((5,), {(): {A: big}, (A,): {B: -1.5, C: -1.25}})], dtype=np.float32)
    settings = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E, "length_penalty": 0.0}
    assert beam_search(model, [[5]], **settings)[0] == [([A, C], big - 1.25)]


def test_a_batch_makes_one_call_a_step_and_forgets_the_finished():
    slow = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {B: -1.0}, (A, A): {E: -1.0}, (B, B): {}}
    model = TableModel([((5,), {(): {E: -1.0}}), ((6, 6), slow)])
    settings = {"beam_width": 2, "max_new_tokens": 5, "eos_id": E}
    quick, other = beam_search(model, [[5], [6, 6]], **settings)
    assert quick == [([E], -1.0)]
    assert other == [([A, A, E], -1.0)]
    sizes = [len(call) for call in model.calls]
    assert sizes == [2, 2, 2]


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, -0.5])
@pytest.mark.parametrize("coarse", [False, True])
def test_random_batches_follow_the_contract(penalty, coarse):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        model = RandomModel(seed, 5, sparse=0.2, coarse=coarse)
        prompts = [[int(t)] * int(n) for t, n in zip(rng.permutation(5), range(1, 4), strict=False)]
        width, longest, eos = int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(5))
        if coarse:
            penalty = 0.0
        got = beam_search(
            model,
            prompts,
            beam_width=width,
            max_new_tokens=longest,
            eos_id=eos,
            length_penalty=penalty,
        )
        calls = model.calls
        truth = [slow_search(model, p, width, longest, eos, penalty) for p in prompts]
        for found, (want, _) in zip(got, truth, strict=True):
            assert [t for t, _ in found] == [t for t, _ in want]
            assert [s for _, s in found] == pytest.approx([s for _, s in want])
        steps = itertools.zip_longest(*(asked for _, asked in truth), fillvalue=[])
        assert [sorted(call) for call in calls] == [sorted(itertools.chain(*s)) for s in steps]


def test_a_beam_wider_than_the_space_finds_everything():
    model = RandomModel(3, 3)
    found = beam_search(model, [[1]], beam_width=99, max_new_tokens=3, eos_id=E)[0]
    assert len(found) == 1 + 2 + 4 + 8
    assert found == sorted(found, key=lambda h: -h[1])


def test_nothing_is_asked_for_an_empty_batch_and_prompts_stay_as_they_are():
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    assert beam_search(None, [], **settings) == []
    prompts = [[], [E]]
    before = [list(p) for p in prompts]
    assert len(beam_search(RandomModel(0, 4), prompts, **settings)) == 2
    assert prompts == before


@pytest.mark.parametrize(
    "change",
    [
        {"beam_width": 0},
        {"beam_width": 1.5},
        {"beam_width": True},
        {"max_new_tokens": 0},
        {"eos_id": -1},
        {"eos_id": 4},
        {"length_penalty": math.nan},
        {"length_penalty": math.inf},
        {"length_penalty": "1"},
    ],
)
def test_bad_settings_are_refused(change):
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E, **change}
    with pytest.raises((ValueError, TypeError)):
        beam_search(RandomModel(0, 4), [[1]], **settings)


@pytest.mark.parametrize(
    "answer",
    [np.full((2, 4), -1.0), np.full(4, -1.0), np.full((1, 4), np.nan), np.full((1, 4), np.inf)],
)
def test_a_broken_model_is_noticed(answer):
    model = SimpleNamespace(log_probs=lambda prefixes: answer)
    with pytest.raises(ValueError, match="log_probs"):
        beam_search(model, [[1]], beam_width=2, max_new_tokens=2, eos_id=E)


def test_bad_prompts_are_refused():
    for prompts in ([1, 2], [[1.5]]):
        with pytest.raises((ValueError, TypeError)):
            beam_search(RandomModel(0, 4), prompts, beam_width=2, max_new_tokens=2, eos_id=E)
