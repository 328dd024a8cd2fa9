"""The target's choice at every node of a tree, each with its own history.

Row i of a tree's logits says what follows node i, after the text from the prompt down to that node.
So penalties count the tokens of exactly that text. And the random number of a pick belongs to the
position of the token that is picked, not to the node or the round: with the same seed the same text
comes out, drafted or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.decoder.sampling import Sampling, TokenSampler
from trapline.gold.errors import RangeError


@dataclass(frozen=True)
class Penalties:
    """Penalties for tokens that occurred before.

    `repetition` divides positive logits and multiplies negative ones of all tokens of prompt and
    answer; `presence` is taken from the logit of every token of the answer, `frequency` once for
    each time that it is there.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.repetition < float("inf"):
            raise RangeError(f"repetition must be positive, got {self.repetition}")

    @property
    def are_none(self) -> bool:
        return (self.repetition, self.presence, self.frequency) == (1.0, 0.0, 0.0)


def picks(logits: Tensor, ways: Sequence[Sampling], made: Tensor) -> Tensor:
    """(R, N+1) tokens for logits (R, N+1, V); `made` (R, N+1) tokens of the answer come before.

    Negative where the softmax is undefined.
    """
    rows, nodes, vocabulary = logits.shape
    choose = TokenSampler([way for way in ways for _ in range(nodes)], vocabulary, logits.device)
    return choose(logits.reshape(rows * nodes, vocabulary), made.flatten()).view(rows, nodes)


def penalised(
    logits: Tensor,
    rule: Penalties,
    prompt: Sequence[int],
    answer: Sequence[int],
    drafted: Tensor,
    seen: Tensor,
) -> Tensor:
    """Logits (N+1, V) of one tree. `answer` ends with the root, if that is not the prompt's last;
    `drafted` (N,) are the nodes' tokens, `seen` (N+1, N+1) whom each of root and nodes continues.
    """
    logits = logits.float()
    width = logits.shape[-1]
    nodes = functional.one_hot(drafted.clamp(min=0), width).to(logits.dtype)
    branch = seen[:, 1:].to(logits.dtype) @ (nodes * (drafted >= 0)[:, None])
    said = _counts(answer, width, logits.device) + branch
    anywhere = _counts(prompt, width, logits.device) + said
    scaled = torch.where(logits > 0, logits / rule.repetition, logits * rule.repetition)
    logits = torch.where(anywhere > 0, scaled, logits)
    return logits - rule.presence * (said > 0) - rule.frequency * said


def _counts(tokens: Sequence[int], width: int, device: torch.device) -> Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.long, device=device), minlength=width)
