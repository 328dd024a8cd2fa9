"""Policies of beam search: which hypotheses finish, when it stops, and what length means.

With S the sum of log-probabilities, n a length and a the length penalty, every policy rates a
hypothesis by S / n^a and returns the best finished ones.

With beam width 1 and length penalty 0 `pooled` and the `hf` policies return the greedy sequence.
`canonical` and `vllm` need not: an end enters their pool even where another token is more likely
(`vllm`: among the 1 + E most likely tokens), and the highest sum of log-probabilities wins. They
return the most likely of all such ends along the greedy path, which may be shorter than the greedy
sequence.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from trapline.gold.errors import RangeError

Name = Literal["canonical", "hf", "vllm", "pooled"]
EarlyStopping = Literal["never"] | bool


@dataclass(frozen=True, slots=True)
class Policy:
    """The three rules of a search.

    finish: `every` end of a live beam enters the pool; or those `ranked` among the beam_width
        best continuations of their step; or those `near` the top of their own beam; or, `pooled`,
        finished and live beams share the beam_width places, in every step, by their scores.
    stop: at the exact `bound`, when no live beam can still enter the pool; by the
        `current-length` test, which scores live beams as if they ended now and may miss a longer,
        better one; as soon as the pool is `full`; or at `max-length` only.
    length: the `generated` tokens, the end included; or `with-prompt`, the end left out.
    """

    finish: Literal["every", "ranked", "near", "pooled"] = "every"
    stop: Literal["bound", "current-length", "full", "max-length"] = "bound"
    length: Literal["generated", "with-prompt"] = "generated"


#: The contract of the challenge, and the default: no hypothesis that could win is lost.
CANONICAL = Policy()
#: Hugging Face's `early_stopping`: "never", False and True.
NEVER_EARLY = Policy(finish="ranked", stop="bound")
HEURISTIC = Policy(finish="ranked", stop="current-length")
FIRST_FULL = Policy(finish="ranked", stop="full")
#: vLLM: runs to the maximum length, and its length penalty counts the prompt.
VLLM = Policy(finish="near", stop="max-length", length="with-prompt")

#: A finished beam keeps its place only while its score is among the best: a search may end without
#: one, and it stops when finished beams hold all places.
POOLED = Policy(finish="pooled", stop="max-length")


def named(name: Name | Policy, early_stopping: EarlyStopping | None = None) -> Policy:
    """The policy of this name. Only `hf` has an `early_stopping`; False is its default."""
    if name == "hf":
        return _hugging_face(early_stopping)
    if early_stopping is not None:
        raise RangeError("early_stopping needs the policy 'hf'")
    if isinstance(name, Policy):
        return name
    if name not in get_args(Name):
        raise RangeError(f"policy must be one of {', '.join(get_args(Name))}, got {name!r}")
    return {"canonical": CANONICAL, "vllm": VLLM, "pooled": POOLED}[name]


def _hugging_face(early_stopping: EarlyStopping | None) -> Policy:
    if early_stopping == "never":
        return NEVER_EARLY
    if early_stopping is True:
        return FIRST_FULL
    if early_stopping is None or early_stopping is False:
        return HEURISTIC
    raise RangeError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")


@dataclass(frozen=True, slots=True)
class Rules:
    """All settings of a search."""

    beam_width: int
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    length_penalty: float
    policy: Policy

    def score(self, total: float, generated: int, prompt: int, *, ended: bool) -> float:
        """The score of `generated` tokens whose log-probabilities sum to `total`."""
        length = generated
        if self.policy.length == "with-prompt":
            length += prompt - ended
        return float(total / length**self.length_penalty)

    def bound(self, total: float, generated: int) -> float:
        """The best score that the stop test assumes for descendants of a live beam.

        `total` is at most 0 and does not grow, so a descendant's score is monotone in its length:
        the maximum is at the least or the greatest length. See docs/components/beam_search.md.
        """
        if self.policy.stop == "current-length":
            return float(total / generated**self.length_penalty)
        return max(
            float(total / length**self.length_penalty)
            for length in (generated + 1, self.max_new_tokens)
        )
