"""What `Decoder.generate(speculate=…)` expects of an object that drafts tokens ahead."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling


class Burst(NamedTuple):
    """The tokens that one pass adds to one prompt: `drafted` accepted ones, then the target's own.

    `last` marks the prompt's final burst. `error` says why a prompt ends without an answer.
    """

    prompt: int
    tokens: list[int]
    drafted: int
    last: bool
    error: str | None = None


class Speculator(Protocol):
    """Generates with drafted tokens; the answers are those of plain decoding."""

    def stream(
        self,
        decoder: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        sampling: Sequence[Sampling],
        batch: int,
        finished: Callable[[int], bool],
    ) -> Iterator[Burst]:
        """Yields bursts as they come, at most `batch` prompts at a time.

        `sampling` has one entry a prompt. After each burst of prompt i, `finished(i)` is called:
        True ends that prompt early, for instance because a stop string is complete.
        """
