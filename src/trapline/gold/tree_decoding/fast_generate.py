"""Generation by fast rounds: a CUDA graph, replayed many times between two looks by the host.

The device waits while the host looks, so the host starts many rounds at once: as many as no row can
finish before, or a share of the number that a row's pace so far predicts. A row that finishes
earlier wastes the rest of its rounds; where rounds are long, that costs more than a look.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold.arithmetic import LOG2_E
from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling, signed_seed
from trapline.gold.decoder.speculator import Burst
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.fast_drafters import FusedDrafter
from trapline.gold.tree_decoding.fast_rounds import FusedRounds, RoundsConfig
from trapline.gold.tree_decoding.generate import Output, cut
from trapline.gold.tree_decoding.statistics import Statistics

#: Share of the predicted rounds that the host starts at once.
SHARE = 0.75
#: Seconds that the device waits for a look, about.
LOOK = 1e-4
#: Seconds between two looks at most, so that text streams and stop strings take effect.
PATIENCE = 0.05


class Progress(NamedTuple):
    """Tokens and rounds of one row so far, and the number of tokens it may generate."""

    made: int
    limit: int
    rounds: int

    @property
    def left(self) -> int:
        return self.limit - self.made


class _Answer:
    """A prompt in a row, and how much of its answer has been handed out."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.number, self.prompt, self.sampling = number, list(prompt), sampling
        self._tokens = self._rounds = 0

    def bursts(
        self, progress: Progress, text: Tensor, log: Tensor, stops: frozenset[int]
    ) -> Iterator[tuple[int, Burst]]:
        """Accepted nodes and burst of each new round; `text` and `log` are copies on the host."""
        begin = len(self.prompt)
        tokens = text[begin + self._tokens : begin + progress.made].tolist()
        counts = log[self._rounds : progress.rounds].tolist()
        self._rounds = progress.rounds
        for count in counts:
            said, tokens = tokens[:count], tokens[count:]
            yield count - 1, cut(self.number, said, count - 1, progress.limit - self._tokens, stops)
            self._tokens += len(said)


class FastGenerator:
    """Answers prompts, `config.rows` at a time. Without a drafter it is plain decoding."""

    def __init__(
        self,
        target: Network,
        drafter: FusedDrafter | None,
        config: RoundsConfig,
        *,
        rounds: type[FusedRounds] = FusedRounds,
    ) -> None:
        self.config = config
        self._pace = 0.0  # seconds per round
        self.rounds = rounds(target, drafter, config)
        self._replay: Callable[[], object] = self.rounds.round
        if target.device.type == "cuda":
            self._replay = captured(self.rounds.round, (), target.device).replay
            self._run(1)  # for the pace; all rows rest

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sequence[Sampling] | None = None,
        finished: Callable[[int], bool] = lambda prompt: False,
        statistics: Statistics | None = None,
    ) -> Iterator[Burst]:
        """Yield a burst for each prompt and round. Prompts beyond the number of rows wait for one.

        `finished(i)` is called after each burst of prompt i; True ends that prompt.
        """
        statistics = statistics or Statistics()
        ways = sampling or [Sampling()] * len(prompts)
        self._check(prompts, max_new_tokens)
        waiting = deque(map(_Answer, range(len(prompts)), prompts, ways))
        working: dict[int, _Answer] = {}
        free, stops = list(range(self.config.rows)), frozenset(stop_ids)
        progress = [Progress(0, max_new_tokens, 0)] * self.config.rows
        self.rounds.state.limits.zero_()  # rows without a prompt rest
        while waiting or working:
            entering = {row: waiting.popleft() for row in free[: len(waiting)]}
            if entering:
                with statistics.time("prefill"):
                    self._enter(entering, max_new_tokens)
                working |= entering
                for row in entering:
                    progress[row] = Progress(0, max_new_tokens, 0)
            with statistics.time_rounds(all_rows=len(working) == self.config.rows):
                asked = self._rounds_for([progress[row] for row in working], waiting=bool(waiting))
                progress, texts, logs = self._run(asked)
                free = []
                for row, answer in working.items():
                    at = progress[row], texts[row], logs[row]
                    for accepted, burst in answer.bursts(*at, stops):
                        statistics.count(accepted, len(burst.tokens), burst.drafted)
                        yield burst
                        if burst.last or finished(answer.number):
                            free.append(row)
                            break
                working = {row: one for row, one in working.items() if row not in free}
                if early := [row for row in free if progress[row].left > 0]:
                    self.rounds.state.limits[early] = 0

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Output:
        """All answers and the statistics; `options` are those of `stream`."""
        answers: list[list[int]] = [[] for _ in prompts]
        statistics = Statistics()
        for burst in self.stream(prompts, statistics=statistics, **options):
            if burst.error:
                raise RangeError(f"prompt {burst.prompt}: {burst.error}")
            answers[burst.prompt] += burst.tokens
        return Output(answers, statistics)

    def _enter(self, entering: Mapping[int, _Answer], limit: int) -> None:
        """Start these rows; a prompt's random numbers do not depend on its row."""
        rows, answers, state = list(entering), list(entering.values()), self.rounds.state
        self.rounds.open([answer.prompt for answer in answers], limit, rows)
        device = state.seeds.device
        seeds = [signed_seed(answer.sampling.seed) for answer in answers]
        warmth = [answer.sampling.temperature for answer in answers]
        state.seeds[rows] = torch.tensor(seeds, device=device)
        heat = [LOG2_E / t if t else 0.0 for t in warmth]
        state.heat[rows] = torch.tensor(heat, dtype=torch.float32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _run(self, rounds: int) -> tuple[list[Progress], Tensor, Tensor]:
        """Replay the round, then look: progress, text and log of every row."""
        started = time.perf_counter()
        for _ in range(rounds):
            self._replay()
        counts, text, log = self._look()
        self._pace = (time.perf_counter() - started) / rounds
        return [Progress(min(made, most), most, done) for made, most, done in counts], text, log

    def _look(self) -> tuple[list[tuple[int, int, int]], Tensor, Tensor]:
        """Wait for the device and copy its state."""
        return self.rounds.state.read()

    def _rounds_for(self, rows: list[Progress], *, waiting: bool) -> int:
        """Number of rounds until the next look.

        Several rows: until the first of them should finish. A single or last row: most of what it
        needs. The prediction is by a row's own pace, since that of another prompt says nothing; a
        row that has not begun generates at most L + 1 tokens per round. Where an idle row, one of
        several, costs twice as much per round as a look, only the certain minimum is started.
        """
        most = self.rounds.deepest + 1
        least = [one.left / most for one in rows]
        likely = [one.left * one.rounds / one.made if one.made else one.left / most for one in rows]
        if self.config.rows > 1 and (waiting or len(rows) == self.config.rows):
            long = self._pace > 2 * LOOK * self.config.rows
            wanted = math.ceil(min(least if long else likely))
        else:
            wanted = max(math.ceil(max(least)), int(SHARE * max(likely)))
        if self._pace:
            wanted = min(wanted, math.ceil(PATIENCE / self._pace))
        return max(1, wanted)

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            # The last round may exceed the limit and has a whole tree behind it.
            needed = len(prompt) + max_new_tokens + self.rounds.deepest + self.rounds.nodes
            if needed > self.config.room:
                raise RangeError(
                    f"prompt {number} needs room for {needed} positions, "
                    f"the rounds have room for {self.config.room}"
                )
