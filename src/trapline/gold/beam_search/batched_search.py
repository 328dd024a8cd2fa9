"""The beam search of all prompts as torch tensors, where the logits are.

Equivalent to `search.Search` without a loop over prompts and without reading values on the host, so
a step can be captured in a CUDA graph. Sums and scores are float64, powers of lengths come from a
table made on the host, and ties are ordered as there (earlier, lower parent, lower token), so that
the results are equal. A prompt whose search is over has no live beam: all its sums are −inf.

Shape letters: B prompts, W beams, C candidates of a beam, E ends, T steps at most.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trapline.gold.beam_search.policy import Rules
from trapline.gold.beam_search.search import Beam
from trapline.gold.errors import RangeError


class Offered(NamedTuple):
    """Continuations of the B · W beams: the best of each row, best first, and all ends."""

    log_probs: Tensor  # (B · W, C) float32
    tokens: Tensor  # (B · W, C) int64
    ends: Tensor  # (B · W, E) float32


class BatchedSearch:
    """State of all searches in tensors of fixed addresses; `advance` is one step."""

    def __init__(self, rules: Rules, prompts: Sequence[int], device: torch.device) -> None:
        """`prompts` holds the length of each prompt."""
        if rules.policy.finish == "pooled":
            raise RangeError(
                "policy 'pooled' is not available for a search on the device; use beam_search with "
                "a model that gives log_probs"
            )
        self.rules = rules
        width, steps, count = rules.beam_width, rules.max_new_tokens, len(prompts)
        self.ends = torch.tensor(rules.eos_ids, device=device)
        counted = rules.policy.length == "with-prompt"
        self.offset = torch.tensor([n if counted else 0 for n in prompts], device=device)
        longest = steps + (max(prompts, default=0) if counted else 0)
        powers = [float(max(n, 1) ** rules.length_penalty) for n in range(longest + 2)]
        self.powers = torch.tensor(powers, dtype=torch.float64, device=device)
        floats, whole = torch.float64, torch.int64
        self.length = torch.zeros(count, dtype=whole, device=device)
        self.sums = torch.empty((count, width), dtype=floats, device=device)
        #: Parent and last token of each live beam, by step.
        self.parents = torch.zeros((steps, count, width), dtype=whole, device=device)
        self.tokens = torch.zeros((steps, count, width), dtype=whole, device=device)
        self.scores = torch.empty((count, width), dtype=floats, device=device)
        self.totals = torch.empty((count, width), dtype=floats, device=device)
        #: Of a finished hypothesis: its last step, its beam in that step, and its end or −1.
        self.nodes = torch.zeros((count, width, 3), dtype=whole, device=device)
        self.reset()

    def reset(self) -> None:
        """Start over: one live beam, nothing finished."""
        self.length.zero_()
        self.sums.fill_(-torch.inf)
        self.sums[:, 0] = 0.0
        self.scores.fill_(-torch.inf)

    def advance(self, offered: Offered) -> tuple[Tensor, Tensor]:
        """One step; returns parents and tokens (B, W) of the new live beams."""
        count, width = self.sums.shape
        self.length.add_(1)
        shape = (count, width, -1)
        tokens = offered.tokens.view(shape)
        # Ends are handled separately from other candidates.
        is_end = (tokens[..., None] == self.ends).any(dim=-1)
        totals = self.sums[..., None] + offered.log_probs.view(shape).double()
        totals = totals.masked_fill(is_end, -torch.inf)
        ends = self.sums[..., None] + offered.ends.view(shape).double()
        ends = ends.masked_fill(~self._may_finish(ends, totals, tokens), -torch.inf)
        best = torch.sort(totals.flatten(1), dim=1, descending=True, stable=True)
        sums, places = best.values[:, :width], best.indices[:, :width]
        parents = places // tokens.shape[2]
        chosen = tokens.flatten(1).gather(1, places)
        self._enter(ends, sums)
        over = self._is_settled(sums) | (self.length == self.rules.max_new_tokens)
        self.sums.copy_(sums.masked_fill(over[:, None], -torch.inf))
        here = self.length[:1] - 1
        self.parents.index_copy_(0, here, parents[None])
        self.tokens.index_copy_(0, here, chosen[None])
        return parents, chosen

    def is_alive(self) -> Tensor:
        """Whether any prompt has a live beam."""
        return (self.sums > -torch.inf).any()

    def beams(self, count: int) -> list[list[Beam]]:
        """The best `count` finished hypotheses of every prompt."""
        parents, tokens = self.parents.cpu().numpy(), self.tokens.cpu().numpy()
        scores, totals, nodes = (x.tolist() for x in (self.scores, self.totals, self.nodes))
        found = []
        for prompt, rows in enumerate(zip(scores, totals, nodes, strict=True)):
            alive = [row for row in zip(*rows, strict=True) if row[0] > -torch.inf][:count]
            found.append(
                [
                    Beam(
                        _path(parents[:, prompt], tokens[:, prompt], *node),
                        score,
                        total,
                        node[2] >= 0,
                    )
                    for score, total, node in alive
                ]
            )
        return found

    def _may_finish(self, ends: Tensor, totals: Tensor, tokens: Tensor) -> Tensor:
        """(B, W, E): which ends may enter the pool by the policy's finish rule."""
        alive: Tensor = ends > -torch.inf
        finish = self.rules.policy.finish
        if finish == "every":
            return alive
        count, width, number = ends.shape
        every = torch.cat((totals, ends), dim=2)
        names = torch.cat((tokens, self.ends.expand(count, width, number)), dim=2)
        kept = width if finish == "ranked" else (1 + number) * width
        if finish == "ranked":  # among all continuations of the step
            beam = torch.arange(width, device=ends.device)[:, None]
            every, places = every.flatten(1)[:, None], (names + (beam << 32)).flatten(1)[:, None]
            own = (self.ends + (beam << 32)).expand(count, -1, -1)
        else:  # among those of their own beam
            every, places = every.flatten(0, 1)[:, None], names.flatten(0, 1)[:, None]
            own = self.ends.expand(count, width, number)
        value = ends.reshape(len(every), -1, 1)
        mine = own.reshape(len(every), -1, 1)
        before = (every > value) | ((every == value) & (places < mine))
        few: Tensor = before.sum(dim=2) < kept
        return alive & few.view(ends.shape)

    def _enter(self, ends: Tensor, sums: Tensor) -> None:
        """Enter ends, and live beams at the maximum length; ties keep earlier entries in front."""
        width = self.sums.shape[1]
        counted = (self.length + self.offset)[:, None]
        without = 1 if self.rules.policy.length == "with-prompt" else 0
        ended = ends.flatten(1) / self.powers[counted - without]
        cut = sums / self.powers[counted]
        cut = cut.masked_fill((self.length < self.rules.max_new_tokens)[:, None], -torch.inf)
        scores = torch.cat((self.scores, ended, cut), dim=1)
        totals = torch.cat((self.totals, ends.flatten(1), sums), dim=1)
        best = torch.sort(scores, dim=1, descending=True, stable=True)
        order = best.indices[:, :width]
        nodes = torch.cat((self.nodes, *self._new_nodes()), dim=1)
        self.scores.copy_(best.values[:, :width])
        self.totals.copy_(totals.gather(1, order))
        self.nodes.copy_(nodes.gather(1, order[..., None].expand(-1, -1, 3)))

    def _new_nodes(self) -> tuple[Tensor, ...]:
        """Nodes of the ends after the previous live beams, and of the live beams."""
        count, width = self.sums.shape
        beam = torch.arange(width, device=self.sums.device)[:, None]
        now = (self.length[:1] - 1).expand(width, 1)
        ends = self.ends.expand(width, -1)
        ended = torch.stack(((now - 1).expand_as(ends), beam.expand_as(ends), ends), dim=-1)
        alive = torch.stack((now, beam, torch.full_like(beam, -1)), dim=-1)
        return tuple(one.flatten(0, 1).expand(count, -1, 3) for one in (ended, alive))

    def _is_settled(self, sums: Tensor) -> Tensor:
        """(B,): whether the stop rule ends a search; see `Search`."""
        stop, worst = self.rules.policy.stop, self.scores[:, -1]
        full: Tensor = worst > -torch.inf
        if stop == "max-length":
            return torch.zeros_like(full)
        if stop == "full":
            return full
        first = sums[:, 0]
        if stop == "current-length":
            bound = first / self.powers[self.length]
        else:
            after = first / self.powers[self.length + 1]
            bound = torch.maximum(after, first / self.powers[self.rules.max_new_tokens])
        return full & (bound <= worst)


def _path(
    parents: np.ndarray, tokens: np.ndarray, step: int, beam: int, end: int
) -> tuple[int, ...]:
    """The tokens of a beam, and the end after it."""
    found = [end] if end >= 0 else []
    for at in range(step, -1, -1):
        found.append(tokens.item(at, beam))
        beam = parents.item(at, beam)
    return tuple(found[::-1])
