"""Compact rounds driven from the host: a graph, replayed many times between two looks at it.

While the host looks the device waits, so it asks for most of the rounds that will be needed: as
many as no row can be done before, or most of what the pace so far promises. A row that is done
earlier rests by itself.
"""

from collections.abc import Callable, Sequence

import torch

from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.model import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.drafter_compact import LOG, CompactDrafter
from trapline.gold.tree_decoding.generate import Output
from trapline.gold.tree_decoding.generate_rounds import CompactRounds
from trapline.gold.tree_decoding.generate_static import StaticConfig
from trapline.gold.tree_decoding.generate_statistics import Statistics

#: Of the rounds that the pace so far promises, so many are asked for at once.
MOST_OF_THEM = 0.75


class CompactGenerator:
    """Answers batches of `config.rows` prompts. Without a drafter it is plain decoding, graphed."""

    def __init__(
        self,
        target: Decoder,
        drafter: CompactDrafter | None,
        config: StaticConfig,
        *,
        rounds: type[CompactRounds] = CompactRounds,
    ) -> None:
        self._config, self._drafter = config, drafter
        self.rounds = rounds(target, drafter, config)
        self._pace = float(self.rounds.deepest + 1)  # tokens a round of the slowest row
        self._replay: Callable[[], object] = self.rounds.round
        if target.device.type == "cuda":
            self._replay = captured(self.rounds.round, ()).replay

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Output:
        """The answers to exactly as many prompts as there are rows."""
        self._check(prompts, max_new_tokens)
        statistics, state = Statistics(), self.rounds.state
        with statistics.time("prefill"):
            self.rounds.open([list(prompt) for prompt in prompts], max_new_tokens)
            _wait(state.made)
        with statistics.time("rounds"):
            left, asked = [max_new_tokens] * len(prompts), 0
            while max(left) > 0:
                for _ in range(self._rounds_for(max(left))):
                    self._replay()
                    asked += 1
                if stop_ids:
                    self._rest(prompts, stop_ids)
                made = torch.minimum(state.made, state.limits).tolist()
                limits = state.limits.tolist() if stop_ids else [max_new_tokens] * len(made)
                left = [most - done for most, done in zip(limits, made, strict=True)]
                slowest = left.index(max(left))
                self._pace = max(1.0, made[slowest] / asked)
        return Output(self._answers(prompts, made), self._counted(statistics, made))

    def _rounds_for(self, left: int) -> int:
        """How many to ask for where so many tokens are left: no row says more than L + 1 in one."""
        return max(-(-left // (self.rounds.deepest + 1)), int(MOST_OF_THEM * left / self._pace))

    def _rest(self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> None:
        """Rows that have said a stop token say no more."""
        state = self.rounds.state
        texts, made, limits = state.text.tolist(), state.made.tolist(), state.limits.tolist()
        for row, prompt in enumerate(prompts):
            said = texts[row][len(prompt) : len(prompt) + min(made[row], limits[row])]
            stop = next((i for i, token in enumerate(said) if token in stop_ids), None)
            if stop is not None:
                state.limits[row] = stop + 1

    def _answers(self, prompts: Sequence[Sequence[int]], made: list[int]) -> list[list[int]]:
        texts = self.rounds.state.text.tolist()
        return [
            text[len(prompt) : len(prompt) + count]
            for text, prompt, count in zip(texts, prompts, made, strict=True)
        ]

    def _counted(self, statistics: Statistics, made: list[int]) -> Statistics:
        """Every round of every row; what the last one said beyond the limit is not counted."""
        state = self.rounds.state
        log, rounds = state.log.tolist(), state.rounds.tolist()
        for row, most in enumerate(made):
            done = 0
            for number in range(rounds[row]):
                count = log[row][number]
                said = min(count, most - done)
                if said > 0:
                    statistics.count(count - 1, said, min(count - 1, said))
                done += count
        return statistics

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if len(prompts) != self._config.rows:
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


def _wait(tensor: torch.Tensor) -> None:
    """Until the device is done with everything so far."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
