"""The host of fast rounds: how many rounds it starts, and how often it looks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding import fast_generate, statistics
from trapline.gold.tree_decoding.fast_drafters import RoundState
from trapline.gold.tree_decoding.fast_generate import FastGenerator
from trapline.gold.tree_decoding.fast_rounds import RoundsConfig

pytest.importorskip("triton")
DEPTH, TOKENS = 7, 128
CPU_TARGET = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch):
    """Looks are counted; a slow machine must not add any."""
    monkeypatch.setattr(fast_generate, "PATIENCE", 1e6)


class CountedRounds:
    """Rounds that commit given numbers of tokens; a prompt's first token selects the list.

    Tokens count up from 0, so an answer shows exactly what was committed.
    """

    deepest, nodes = DEPTH, DEPTH + 1
    lengths: list[list[int]]

    def __init__(self, target, drafter, config):
        self.state = RoundState(config.rows, config.room, torch.device("cpu"))
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

    def _look(self):
        self.looks += 1
        return super()._look()


def lengths_of(shares, seed):
    """Committed tokens per round of drafters with these acceptance rates at every depth."""
    luck = np.random.default_rng(seed)
    return [
        [1 + int(np.cumprod(luck.random(DEPTH) < share).sum()) for _ in range(TOKENS)]
        for share in shares
    ]


def needed(lengths):
    return [int(np.searchsorted(np.cumsum(one), TOKENS)) + 1 for one in lengths]


def answered(rows, lengths):
    kind = type("Rounds", (CountedRounds,), {"lengths": lengths})
    host = CountedGenerator(CPU_TARGET, None, RoundsConfig(rows, 256), rounds=kind)
    done = host.generate([[number] for number in range(len(lengths))], max_new_tokens=TOKENS)
    assert done.tokens == [list(range(TOKENS))] * len(lengths)
    assert done.statistics.passes == sum(needed(lengths))
    assert done.statistics.tokens == TOKENS * len(lengths)
    return host


def test_single_row_starts_few_unneeded_rounds():
    """The pace of a slow prompt must not be used for the next one."""
    lengths = lengths_of([0.9, 0.3, 0.9, 0.85, 0.2, 0.9, 0.95, 0.8, 0.9, 0.7, 0.9, 0.85], seed=0)
    hosts = [answered(1, [one]) for one in lengths]
    together = answered(1, lengths)
    for started in (sum(host.rounds.started for host in hosts), together.rounds.started):
        assert sum(needed(lengths)) <= started <= 1.05 * sum(needed(lengths))
    assert together.looks <= 9 * len(lengths)


def test_free_rows_take_the_next_prompt(monkeypatch):
    monkeypatch.setattr(fast_generate, "LOOK", math.inf)
    lengths = lengths_of([0.9, 0.5, 0.8, 0.85] * 12, seed=1)
    host = answered(8, lengths)
    assert host.rounds.entered == len(lengths)
    assert sum(needed(lengths)) / 8 <= host.rounds.started <= 1.25 * sum(needed(lengths)) / 8
    assert host.looks <= 0.5 * host.rounds.started


def test_no_row_idles_while_rounds_are_long(monkeypatch):
    """As long as a prompt waits for a row."""
    lengths = lengths_of([0.9, 0.5, 0.8, 0.85] * 12, seed=1)
    monkeypatch.setattr(fast_generate, "LOOK", math.inf)
    short = answered(8, lengths)
    monkeypatch.setattr(fast_generate, "LOOK", 0.0)
    long = answered(8, lengths)
    assert long.rounds.rested == 0 < short.rounds.rested
    assert long.looks <= long.rounds.started


def test_busy_rate_and_busy_tau_cover_the_same_time(monkeypatch):
    """If no row idles and a look is free, busy tokens per second over busy τ is rounds per second.

    τ of all answers is lower: at the end, limits cut more rounds short.
    """
    monkeypatch.setattr(fast_generate, "LOOK", 0.0)
    lengths, clock = lengths_of([0.9, 0.5, 0.8, 0.85] * 6, seed=1), [0]
    monkeypatch.setattr(statistics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Timed(CountedRounds):
        def round(self):
            super().round()
            clock[0] += 1

    Timed.lengths = lengths
    host = FastGenerator(CPU_TARGET, None, RoundsConfig(8, 256), rounds=Timed)
    done = host.generate([[i] for i in range(24)], max_new_tokens=TOKENS).statistics
    assert done.busy_passes == 8 * done.busy_seconds
    assert done.busy_tokens / done.busy_passes > 1.005 * done.tau


def test_plain_decoding_reads_the_device_once():
    kind = type("Plain", (CountedRounds,), {"lengths": [[1] * TOKENS] * 3, "deepest": 0})
    host = CountedGenerator(CPU_TARGET, None, RoundsConfig(3, 256), rounds=kind)
    host.generate([[0], [1], [2]], max_new_tokens=TOKENS)
    assert host.rounds.started == TOKENS
    assert host.looks == 1


def test_the_host_looks_at_least_every_patience_seconds(monkeypatch):
    """Once the pace is known, a long answer streams and its stop string takes effect in time."""
    kind = type("Plain", (CountedRounds,), {"lengths": [[1] * TOKENS] * 3, "deepest": 0})
    host = CountedGenerator(CPU_TARGET, None, RoundsConfig(3, 256), rounds=kind)
    host._pace = 1e-3
    monkeypatch.setattr(fast_generate, "PATIENCE", 10e-3)
    assert host._rounds_for([fast_generate.Progress(0, TOKENS, 0)] * 3, waiting=False) == 10


def test_fewer_prompts_than_rows_leave_rows_idle():
    host = answered(8, lengths_of([0.9, 0.5], seed=2))
    assert host.rounds.entered == 2


def test_bursts_are_one_per_round_with_drafted_counts():
    lengths = lengths_of([0.8], seed=3)
    kind = type("Rounds", (CountedRounds,), {"lengths": lengths})
    host = FastGenerator(CPU_TARGET, None, RoundsConfig(1, 256), rounds=kind)
    bursts = list(host.stream([[0]], max_new_tokens=TOKENS))
    assert [len(burst.tokens) for burst in bursts[:-1]] == lengths[0][: len(bursts) - 1]
    assert [burst.drafted for burst in bursts[:-1]] == [
        n - 1 for n in lengths[0][: len(bursts) - 1]
    ]
    assert [burst.last for burst in bursts] == [False] * (len(bursts) - 1) + [True]


def test_stop_tokens_and_finished_end_a_prompt_and_free_its_row():
    """Prompt 0 says 17 and stops, prompt 1 is finished by the caller, prompt 2 takes a free row."""
    kind = type("Rounds", (CountedRounds,), {"lengths": lengths_of([0.6] * 3, seed=4)})
    host = FastGenerator(CPU_TARGET, None, RoundsConfig(2, 256), rounds=kind)
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    options = {"stop_ids": [17], "finished": lambda prompt: prompt == 1 and len(said[1]) >= 5}
    for burst in host.stream([[0], [1], [2]], max_new_tokens=TOKENS, **options):
        said[burst.prompt] += burst.tokens
    assert said[0] == said[2] == list(range(18))
    assert said[1] == list(range(len(said[1])))
    assert 5 <= len(said[1]) <= 5 + DEPTH
    assert host.rounds.state.limits.tolist() == [0, 0]


def test_undefined_logits_end_their_prompt_with_an_error():
    class Broken(CountedRounds):
        lengths = lengths_of([0.6] * 2, seed=5)

        def round(self):
            super().round()
            self.state.text[0, 1 + 9] = -1

    host = FastGenerator(CPU_TARGET, None, RoundsConfig(2, 256), rounds=Broken)
    bursts = list(host.stream([[0], [1]], max_new_tokens=20))
    (failed,) = [burst for burst in bursts if burst.error]
    assert (failed.prompt, failed.last, "NaN" in failed.error) == (0, True, True)
    for prompt, count in ((0, 9), (1, 20)):
        said = [token for burst in bursts if burst.prompt == prompt for token in burst.tokens]
        assert said == list(range(count))
    with pytest.raises(RangeError, match="prompt 0: the model's logits"):
        host.generate([[0], [1]], max_new_tokens=20)
