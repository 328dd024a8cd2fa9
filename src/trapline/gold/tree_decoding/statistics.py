"""Statistics of a speculative run: tokens per pass, acceptance by depth, time by part."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch


@dataclass
class Statistics:
    """Counts over all rows. A row's share of a pass over a batch counts as one pass.

    Seconds are host time, unless `exact` waits for the GPU at the end of every part.
    """

    passes: int = 0
    tokens: int = 0
    #: Drafted tokens in the output.
    drafted: int = 0
    #: Number of passes by accepted nodes, before stop tokens and limits cut.
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exact: bool = False
    #: Tokens, passes and seconds while every row of the batch had a prompt.
    busy_tokens: int = 0
    busy_passes: int = 0
    busy_seconds: float = 0.0
    #: "fast rounds" or "readable loop", and why the fast rounds did not serve.
    served_by: str = "readable loop"
    reason: str | None = None

    @property
    def tau(self) -> float:
        """Committed tokens per target pass, bonus included; the prefill is not counted."""
        return self.tokens / self.passes if self.passes else 0.0

    def acceptance_by_depth(self) -> list[float]:
        """Of the passes that accepted depth d − 1 (the root at 0), the share that accepted d."""
        longest = max(self.accepted_lengths, default=0)
        reached = [
            sum(count for length, count in self.accepted_lengths.items() if length >= depth)
            for depth in range(longest + 1)
        ]
        return [later / earlier for earlier, later in pairwise(reached)]

    def count(self, accepted: int, tokens: int, drafted: int) -> None:
        """Add one row's result of one pass."""
        self.passes += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted_lengths[accepted] += 1

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time inside to a part."""
        started = time.perf_counter()
        yield
        if self.exact and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - started

    @contextmanager
    def time_rounds(self, *, all_rows: bool) -> Iterator[None]:
        """`time("rounds")`; also counted as busy if all rows have a prompt."""
        tokens, passes, seconds = self.tokens, self.passes, self.seconds["rounds"]
        with self.time("rounds"):
            yield
        if all_rows:
            self.busy_tokens += self.tokens - tokens
            self.busy_passes += self.passes - passes
            self.busy_seconds += self.seconds["rounds"] - seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tau": self.tau,
            "passes": self.passes,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "acceptance_by_depth": self.acceptance_by_depth(),
            "seconds": dict(self.seconds),
            "served_by": self.served_by,
            "reason": self.reason,
        }
