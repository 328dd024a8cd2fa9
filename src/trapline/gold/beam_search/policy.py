"""What beam searches disagree about: who finishes, and when it is over.

With S the sum of log-probabilities, n the generated tokens (the end included) and a the length
penalty, all policies rate a hypothesis by S / n^a and keep the best `beam_width` finished ones.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Policy:
    """Two rules.

    finish: `every` end of a live beam enters the pool, or only those `ranked` among the
        beam_width best continuations of their step.
    stop: at the exact `bound`, when no live beam can still enter the pool; by the
        `current-length` test, which rates live beams as if they ended now and may miss a longer,
        better one; or as soon as the pool is `full`.
    """

    finish: Literal["every", "ranked"] = "every"
    stop: Literal["bound", "current-length", "full"] = "bound"


#: The contract of the challenge, and the default: nothing that could win is lost.
CANONICAL = Policy()
#: The three settings of a widely used library's `early_stopping`: "never", False and True.
NEVER_EARLY = Policy(finish="ranked", stop="bound")
HEURISTIC = Policy(finish="ranked", stop="current-length")
FIRST_FULL = Policy(finish="ranked", stop="full")


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that one search goes by."""

    beam_width: int
    max_new_tokens: int
    eos_id: int
    length_penalty: float
    policy: Policy

    def score(self, total: float, length: int) -> float:
        """The rating of `length` generated tokens whose log-probabilities sum to `total`."""
        return float(total / length**self.length_penalty)

    def bound(self, total: float, length: int) -> float:
        """What the stop test grants a live beam of this sum and length.

        `total` is at most 0 and falls, so a descendant's score is monotone in its length: the best
        is at one of the two lengths that are farthest apart. See docs/components/beam_search.md.
        """
        if self.policy.stop == "current-length":
            return self.score(total, length)
        return max(self.score(total, length + 1), self.score(total, self.max_new_tokens))
