"""The host of compact rounds: how many rounds it starts, and how often it looks, by counting."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trapline.gold.tree_decoding import fast_generate, statistics
from trapline.gold.tree_decoding.fast_drafters import State
from trapline.gold.tree_decoding.fast_generate import FastGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig

pytest.importorskip("triton")
DEPTH, TOKENS = 7, 128


class CountedRounds:
    """Rounds that commit as many tokens as a list for every prompt says; its first token names it.

    Tokens count up from 0, so an answer shows what was committed and nothing else.
    """

    deepest, nodes = DEPTH, DEPTH + 1
    lengths: list[list[int]]

    def __init__(self, target, drafter, config):
        self.state = State(config.rows, config.room, config.seed, torch.device("cpu"))
        self.started = self.entered = self.rested = 0
        self.prompt = [0] * config.rows

    def open(self, prompts, limit, rows):
        self.entered += len(rows)
        for row, prompt in zip(rows, prompts, strict=True):
            self.prompt[row] = prompt[0]
            for buffer in (self.state.made, self.state.rounds):
                buffer[row] = 0
            self.state.lengths[row] = len(prompt)
            self.state.limits[row] = limit

    def round(self):
        self.started += 1
        state = self.state
        going = state.made < state.limits
        if self.entered < len(self.lengths):
            self.rested += int((~going).sum())
        for row, prompt in enumerate(self.prompt):
            made, number = int(state.made[row]), int(state.rounds[row])
            if made < int(state.limits[row]):
                count = self.lengths[prompt][number]
                at = int(state.lengths[row]) + made
                state.text[row, at : at + count] = torch.arange(made, made + count)
                state.log[row, number] = count
                state.made[row] += count
                state.rounds[row] += 1


class CountedGenerator(FastGenerator):
    looks = 0

    def _progress(self):
        self.looks += 1
        return super()._progress()


def lengths_of(shares, seed):
    """Committed tokens of every round, of a drafter right at every depth with a prompt's chance."""
    luck = np.random.default_rng(seed)
    return [
        [1 + int(np.cumprod(luck.random(DEPTH) < share).sum()) for _ in range(TOKENS)]
        for share in shares
    ]


def needed(lengths):
    return [int(np.searchsorted(np.cumsum(one), TOKENS)) + 1 for one in lengths]


def answered(rows, lengths):
    target = SimpleNamespace(device=torch.device("cpu"))
    kind = type("Rounds", (CountedRounds,), {"lengths": lengths})
    host = CountedGenerator(target, None, StaticConfig(rows, 256), rounds=kind)
    done = host.generate([[number] for number in range(len(lengths))], max_new_tokens=TOKENS)
    assert done.tokens == [list(range(TOKENS))] * len(lengths)
    assert done.statistics.passes == sum(needed(lengths))
    assert done.statistics.tokens == TOKENS * len(lengths)
    return host


def test_one_row_starts_hardly_more_rounds_than_it_needs():
    """Slow prompts between fast ones: the pace of one must not be asked of the next."""
    lengths = lengths_of([0.9, 0.3, 0.9, 0.85, 0.2, 0.9, 0.95, 0.8, 0.9, 0.7, 0.9, 0.85], seed=0)
    hosts = [answered(1, [one]) for one in lengths]
    together = answered(1, lengths)
    for started in (sum(host.rounds.started for host in hosts), together.rounds.started):
        assert sum(needed(lengths)) <= started <= 1.05 * sum(needed(lengths))
    assert together.looks <= 9 * len(lengths)


def test_rows_that_are_done_take_the_next_prompt(monkeypatch):
    monkeypatch.setattr(fast_generate, "LOOK", math.inf)
    lengths = lengths_of([0.9, 0.5, 0.8, 0.85] * 12, seed=1)
    host = answered(8, lengths)
    assert host.rounds.entered == len(lengths)
    assert sum(needed(lengths)) / 8 <= host.rounds.started <= 1.25 * sum(needed(lengths)) / 8
    assert host.looks <= 0.5 * host.rounds.started


def test_no_row_rests_while_rounds_are_long(monkeypatch):
    """Not as long as a prompt waits for a row."""
    lengths = lengths_of([0.9, 0.5, 0.8, 0.85] * 12, seed=1)
    monkeypatch.setattr(fast_generate, "LOOK", math.inf)
    short = answered(8, lengths)
    monkeypatch.setattr(fast_generate, "LOOK", 0.0)
    long = answered(8, lengths)
    assert long.rounds.rested == 0 < short.rounds.rested
    assert long.looks <= long.rounds.started


def test_a_rate_and_its_tau_are_of_the_same_time(monkeypatch):
    """Where no row rests and a look costs nothing, a rate over its τ is that of the rounds.

    Of all answers together τ is lower: more rounds are cut short at the end, where rows rest.
    """
    monkeypatch.setattr(fast_generate, "LOOK", 0.0)
    lengths, clock = lengths_of([0.9, 0.5, 0.8, 0.85] * 6, seed=1), [0]
    monkeypatch.setattr(statistics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Timed(CountedRounds):
        def round(self):
            super().round()
            clock[0] += 1

    Timed.lengths = lengths
    target = SimpleNamespace(device=torch.device("cpu"))
    host = FastGenerator(target, None, StaticConfig(8, 256), rounds=Timed)
    done = host.generate([[i] for i in range(24)], max_new_tokens=TOKENS).statistics
    assert done.busy_passes == 8 * done.busy_seconds
    assert done.busy_tokens / done.busy_passes > 1.005 * done.tau


def test_plain_decoding_is_one_look():
    kind = type("Plain", (CountedRounds,), {"lengths": [[1] * TOKENS] * 3, "deepest": 0})
    target = SimpleNamespace(device=torch.device("cpu"))
    host = CountedGenerator(target, None, StaticConfig(3, 256), rounds=kind)
    host.generate([[0], [1], [2]], max_new_tokens=TOKENS)
    assert host.rounds.started == TOKENS
    assert host.looks == 1
