"""Static rounds driven from the host: captured once on a GPU, replayed for every batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.drafter_static import StaticDrafter
from trapline.gold.tree_decoding.generate import Output
from trapline.gold.tree_decoding.generate_static import Committed, StaticConfig, StaticRounds
from trapline.gold.tree_decoding.statistics import Statistics


class StaticGenerator:
    """Answers batches of `config.rows` prompts. Without a drafter it is plain decoding, graphed.

    `graph` says whether rounds are captured; by default they are where the target is on a GPU.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: StaticDrafter | None,
        config: StaticConfig,
        *,
        graph: bool | None = None,
        rounds: type[StaticRounds] = StaticRounds,
    ) -> None:
        self._config, self._drafter = config, drafter
        self._rounds = rounds(target, drafter, config)
        wanted = target.device.type == "cuda" if graph is None else graph
        self.round: Callable[[], Committed] = (
            captured(self._rounds.round) if wanted else self._rounds.round
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Output:
        """The answers to exactly as many prompts as there are rows."""
        self._check(prompts, max_new_tokens)
        statistics = Statistics()
        with statistics.time("prefill"), torch.no_grad():
            self._rounds.open(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        going = [True] * len(prompts)
        with statistics.time("rounds"):
            while any(going):
                tokens, counts = (values.tolist() for values in self.round())
                was = list(going)
                for row, answer in enumerate(answers):
                    if was[row]:
                        said = _cut(
                            tokens[row][: counts[row]], max_new_tokens - len(answer), stop_ids
                        )
                        answer += said
                        statistics.count(
                            counts[row] - 1, len(said), min(counts[row] - 1, len(said))
                        )
                        over = len(answer) >= max_new_tokens or answer[-1] in stop_ids
                        going[row] = not over
                if going != was:
                    self._rounds.active.copy_(torch.tensor(going))
        return Output(answers, statistics)

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if len(prompts) != self._config.rows:
            raise RangeError(f"{len(prompts)} prompts for {self._config.rows} rows")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise RangeError(f"prompt {number} is empty")
            drafter = self._drafter
            if drafter is not None and drafter.mask_id in prompt:
                raise RangeError(f"prompt {number}: it contains the drafter's mask id")
            # The last round may commit more than is wanted.
            needed = len(prompt) + max_new_tokens + (drafter.depth if drafter else 0)
            if needed > self._config.room:
                raise RangeError(
                    f"prompt {number} needs room for {needed} positions, "
                    f"there is room for {self._config.room}"
                )


def captured(step: Callable[[], Committed]) -> Callable[[], Committed]:
    """The step as one CUDA graph; its answer lies in the same tensors every time."""
    cuda: Any = torch.cuda  # its constructors carry no types
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = step()

    def replay() -> Committed:
        graph.replay()
        return answer

    return replay


def _cut(tokens: list[int], most: int, stop_ids: Sequence[int]) -> list[int]:
    tokens = tokens[:most]
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    return tokens if stop is None else tokens[: stop + 1]
