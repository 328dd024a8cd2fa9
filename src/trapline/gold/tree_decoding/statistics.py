"""What a speculative run has to show: tokens a pass, acceptance by depth, where the time went."""

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
    """Counts over all rows. A row's share in a pass over a batch counts as one pass.

    Seconds are those of the host unless `exact`, which waits for the GPU at the end of every part.
    """

    passes: int = 0
    tokens: int = 0
    #: Drafted tokens among the output.
    drafted: int = 0
    #: How many passes accepted exactly so many nodes, before stop tokens and limits cut.
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exact: bool = False
    #: Tokens said, in how many passes, and how long it took, while every row of a batch had
    #: something to say.
    busy_tokens: int = 0
    busy_passes: int = 0
    busy_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Committed tokens a target pass, the bonus included; the prefill is no such pass."""
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
        """One row's result of one pass."""
        self.passes += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted_lengths[accepted] += 1

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Adds the time inside to a part."""
        started = time.perf_counter()
        yield
        if self.exact and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - started

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tau": self.tau,
            "passes": self.passes,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "acceptance_by_depth": self.acceptance_by_depth(),
            "seconds": dict(self.seconds),
        }
