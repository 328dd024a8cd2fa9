"""The target's pick at every node of a tree: each node is judged with its own history.

Row i of a tree's logits says what follows node i, after the text from the prompt down to that node.
So penalties count the tokens of exactly that text. The random number of a pick belongs to the
position of the token that is picked, not to the node or the round: with the same seed a text comes
out the same, however much of it was drafted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.fast_verify import inverted


@dataclass(frozen=True)
class Penalties:
    """What makes a token less likely because it was said before.

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


class Uniforms:
    """One number in [0, 1) for every position of one answer."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)
        self._numbers = torch.zeros(0, dtype=torch.float64)

    def at(self, positions: Tensor) -> Tensor:
        """The numbers of these positions, the same whenever they are asked for."""
        missing = int(positions.max()) + 1 - len(self._numbers)
        if missing > 0:
            more = torch.rand(missing, generator=self._stream, dtype=torch.float64)
            self._numbers = torch.cat((self._numbers, more))
        return self._numbers.to(positions.device)[positions]


class Picker:
    """One answer's picks."""

    def __init__(self, prompt: list[int], sampling: Sampling, penalties: Penalties) -> None:
        self.sampling, self.penalties = sampling, penalties
        self._prompt_length = len(prompt)
        self._uniforms = Uniforms(sampling.seed)

    @property
    def is_plain(self) -> bool:
        """Nothing but the largest logit decides."""
        return self.sampling.temperature == 0.0 and self.penalties.are_none

    def picks(self, logits: Tensor, history: list[int], drafted: Tensor, seen: Tensor) -> Tensor:
        """(N+1,) tokens for logits (N+1, V): `history` ends with the root, `drafted` are the nodes'
        tokens (N,) and `seen` (N+1, N+1) says which of root and nodes each of them continues."""
        logits = logits.float()
        if not self.penalties.are_none:
            logits = self._penalised(logits, history, drafted, seen)
        if self.sampling.temperature == 0.0:
            return logits.argmax(dim=-1)
        depth = seen.sum(dim=-1) - 1
        numbers = self._uniforms.at(depth + len(history) - self._prompt_length)
        return inverted(law(logits, self.sampling), numbers)

    def _penalised(
        self, logits: Tensor, history: list[int], drafted: Tensor, seen: Tensor
    ) -> Tensor:
        width = logits.shape[-1]
        nodes = functional.one_hot(drafted.clamp(min=0), width).to(logits.dtype)
        branch = seen[:, 1:].to(logits.dtype) @ (nodes * (drafted >= 0)[:, None])
        said = torch.tensor(history, device=logits.device)
        answer = torch.bincount(said[self._prompt_length :], minlength=width) + branch
        anywhere = torch.bincount(said, minlength=width) + branch
        rule = self.penalties
        scaled = torch.where(logits > 0, logits / rule.repetition, logits * rule.repetition)
        logits = torch.where(anywhere > 0, scaled, logits)
        return logits - rule.presence * (answer > 0) - rule.frequency * answer


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities (…, V) from which a sampled token is drawn, float64.

    As `decoder.sampling.Sampler`: the k likeliest, of these the likeliest that together reach
    `top_p`, of these the ones of at least `min_p` times the best.
    """
    scaled = logits.double() / sampling.temperature
    ranked, order = torch.sort(torch.softmax(scaled, dim=-1), dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        beyond = torch.arange(ranked.shape[-1], device=ranked.device) >= sampling.top_k
        ranked = ranked.masked_fill(beyond, 0.0)
        ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    before = ranked.cumsum(dim=-1) - ranked
    kept = (before < sampling.top_p) & (ranked >= sampling.min_p * ranked[..., :1])
    ranked = ranked * kept
    ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    return torch.zeros_like(ranked).scatter(-1, order, ranked)
