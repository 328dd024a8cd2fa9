"""Compact rounds driven from the host: a graph, replayed many times between two looks at it.

While the host looks the device waits, so it asks for many rounds at once: as many as no row can
be done before, or a share of what the row's pace so far promises. A row that is done earlier rests
by itself, but its rounds take as long as any: where they are long, that costs more than a look.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.capture import captured
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.fast_drafters import LOG, FusedDrafter
from trapline.gold.tree_decoding.fast_rounds import FusedRounds
from trapline.gold.tree_decoding.generate import Output
from trapline.gold.tree_decoding.generate_static import StaticConfig
from trapline.gold.tree_decoding.statistics import Statistics

#: Of the rounds that a row's pace so far promises, so many are asked for at once.
SHARE = 0.75
#: Seconds for which the device waits at a look, about.
LOOK = 1e-4


class Progress(NamedTuple):
    """Of one row: tokens said of those it may say, and in how many rounds."""

    made: int
    limit: int
    rounds: int

    @property
    def left(self) -> int:
        return self.limit - self.made


class FastGenerator:
    """Answers prompts, `config.rows` at a time. Without a drafter it is plain decoding, graphed."""

    def __init__(
        self,
        target: Decoder,
        drafter: FusedDrafter | None,
        config: StaticConfig,
        *,
        rounds: type[FusedRounds] = FusedRounds,
    ) -> None:
        self._config, self._drafter = config, drafter
        self._pace = 0.0  # seconds a round
        self.rounds = rounds(target, drafter, config)
        self._replay: Callable[[], object] = self.rounds.round
        if target.device.type == "cuda":
            self._replay = captured(self.rounds.round, ()).replay

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Output:
        """The answers to at least as many prompts as there are rows: who finds none free waits."""
        self._check(prompts, max_new_tokens)
        statistics, answers = Statistics(), [[0] * 0 for _ in prompts]
        waiting, free = deque(range(len(prompts))), list(range(self._config.rows))
        working: dict[int, int] = {}  # the prompt of every row that has one
        progress = [Progress(0, max_new_tokens, 0)] * self._config.rows
        while waiting or working:
            for row in free[: len(waiting)]:
                working[row] = waiting.popleft()
                progress[row] = Progress(0, max_new_tokens, 0)
            entered = [row for row in free if row in working]
            if entered:
                with statistics.time("prefill"):
                    self._enter(entered, working, prompts, max_new_tokens)
            before, started = progress, statistics.seconds["rounds"]
            with statistics.time("rounds"):
                asked = self._rounds_for([progress[row] for row in working], waiting)
                for _ in range(asked):
                    self._replay()
                if stop_ids:
                    self._rest({row: prompts[one] for row, one in working.items()}, stop_ids)
                progress = self._progress()
            self._pace = (statistics.seconds["rounds"] - started) / asked
            if len(working) == len(progress):
                statistics.busy_tokens += _said(progress) - _said(before)
                statistics.busy_passes += _passes(progress) - _passes(before)
                statistics.busy_seconds += statistics.seconds["rounds"] - started
            free = [row for row in working if progress[row].left <= 0]
            for row in free:
                number = working.pop(row)
                answers[number] = self._answer(row, len(prompts[number]), progress[row])
                self._count(row, progress[row], statistics)
        return Output(answers, statistics)

    def _enter(
        self,
        rows: list[int],
        working: Mapping[int, int],
        prompts: Sequence[Sequence[int]],
        limit: int,
    ) -> None:
        """These rows begin with their prompts; a prompt has its own numbers wherever it is."""
        numbers = [working[row] for row in rows]
        self.rounds.open([list(prompts[one]) for one in numbers], limit, rows)
        state = self.rounds.state
        state.seeds[rows] = torch.tensor(numbers, device=state.seeds.device) + self._config.seed
        _wait(state.made)

    def _progress(self) -> list[Progress]:
        """A look at the device: it waits meanwhile."""
        counts = self.rounds.state.counts()
        return [Progress(min(made, limit), limit, rounds) for made, limit, rounds in counts]

    def _rounds_for(self, rows: list[Progress], waiting: Collection[int]) -> int:
        """Rounds until the first of several rows should be done; of the last, most of them.

        By a row's own pace: another prompt's says nothing. Of a row that has not begun only this is
        known: it says no more than L + 1 tokens in a round, so it needs so many at least. No more
        than these are asked for where a row that rests for a round, one of several, costs twice as
        much as a look.
        """
        most = self.rounds.deepest + 1
        least = [one.left / most for one in rows]
        likely = [one.left * one.rounds / one.made if one.made else one.left / most for one in rows]
        if self._config.rows > 1 and (waiting or len(rows) == self._config.rows):
            long = self._pace > 2 * LOOK * self._config.rows
            return max(1, math.ceil(min(least if long else likely)))
        return max(math.ceil(max(least)), int(SHARE * max(likely)))

    def _rest(self, prompts: Mapping[int, Sequence[int]], stop_ids: Sequence[int]) -> None:
        """Rows that have said a stop token say no more."""
        state = self.rounds.state
        texts, made, limits = state.text.tolist(), state.made.tolist(), state.limits.tolist()
        for row, prompt in prompts.items():
            said = texts[row][len(prompt) : len(prompt) + min(made[row], limits[row])]
            stop = next((i for i, token in enumerate(said) if token in stop_ids), None)
            if stop is not None:
                state.limits[row] = stop + 1

    def _answer(self, row: int, begin: int, progress: Progress) -> list[int]:
        said: list[int] = self.rounds.state.text[row, begin : begin + progress.made].tolist()
        if min(said, default=0) < 0:
            raise RangeError(f"the logits of row {row} are NaN or have no softmax")
        return said

    def _count(self, row: int, progress: Progress, statistics: Statistics) -> None:
        """Every round of a row; what the last one said beyond the limit is not counted."""
        done = 0
        for count in self.rounds.state.log[row, : progress.rounds].tolist():
            said = min(count, progress.made - done)
            if said > 0:
                statistics.count(count - 1, said, min(count - 1, said))
            done += count

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if len(prompts) < self._config.rows:
            raise RangeError(f"{len(prompts)} prompts for {self._config.rows} rows")
        if not 1 <= max_new_tokens <= LOG:
            raise RangeError(f"max_new_tokens must lie between 1 and {LOG}, got {max_new_tokens}")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise RangeError(f"prompt {number} is empty")
            if self._drafter is not None and self._drafter.mask_id in prompt:
                raise RangeError(f"prompt {number}: it contains the drafter's mask id")
            # The last round may commit more than is wanted, and has a whole tree behind it.
            needed = len(prompt) + max_new_tokens + self.rounds.deepest + self.rounds.nodes
            if needed > self._config.room:
                raise RangeError(
                    f"prompt {number} needs room for {needed} positions, "
                    f"there is room for {self._config.room}"
                )


def _said(progress: Sequence[Progress]) -> int:
    return sum(one.made for one in progress)


def _passes(progress: Sequence[Progress]) -> int:
    return sum(one.rounds for one in progress)


def _wait(tensor: torch.Tensor) -> None:
    """Until the device is done with everything so far."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
