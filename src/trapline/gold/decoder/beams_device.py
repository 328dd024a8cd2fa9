"""Beam search that stays on the device: logits, candidates, beams, pools and caches.

What the host does a step is to start it, and now and then to ask whether all searches are over,
without waiting for the answer.
A prompt's keys and values lie on pages that all its beams read. What a beam writes lies in a place
of its own for every step, and never moves: a beam's past is a row of places, and to fork is to
copy that row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.beam_search.batched_search import BatchedSearch, Offered
from trapline.gold.beam_search.policy import Rules
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.decode_batch import DecodeBatch
from trapline.gold.decoder.decode_step import DecodeStep
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool
from trapline.gold.decoder.prompt_pass import PromptPass
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.tile_config import SHORT_TAIL
from trapline.gold.errors import RangeError
from trapline.gold.softmax_topk.api import TopK

PAGE = 16
#: Steps between two looks at whether all is over.
LOOK = 16


class _Look(NamedTuple):
    """What the host asked for: whether logits were broken, and whether a beam is alive."""

    answers: Tensor
    done: torch.cuda.Event | None

    def is_over(self) -> bool:
        """Whether all searches are; this waits until the device has come so far."""
        if self.done is not None:
            self.done.synchronize()
        broken, alive = self.answers.tolist()
        if broken:
            raise RangeError("log_probs gave NaN or +inf")
        return not alive


class DeviceSearch:
    """Searches from prompts of these lengths, one batch after the other, by the same rules.

    What is captured for the first batch, and of the pass over prompts for the second, serves all.
    """

    def __init__(self, decoder: Network, lengths: Sequence[int], rules: Rules) -> None:
        self._rules, self._lengths = rules, list(lengths)
        vocabulary, device = decoder.config.vocab, decoder.device
        if rules.beam_width < 2:
            raise RangeError("a search that stays on the device has at least two beams a prompt")
        if not all(lengths):
            raise RangeError("a prompt is empty")
        if not all(0 <= end < vocabulary for end in rules.eos_ids):
            raise RangeError(
                f"an end of {list(rules.eos_ids)} is outside a vocabulary of {vocabulary}"
            )
        width, steps, count = rules.beam_width, rules.max_new_tokens, len(lengths)
        self._kept = min((1 + len(rules.eos_ids)) * width, vocabulary)
        shared = [cdiv(length, PAGE) for length in lengths]
        own = cdiv(count * width * steps, PAGE)
        dtype = decoder.norm.weight.dtype
        self._pool = Pool(decoder.config, sum(shared) + own, PAGE, dtype, device)
        prompts = [self._pool.open() for _ in lengths]
        self._prompts = PromptPass(decoder, prompts, self._lengths)
        tails = self._pool.open()
        tails.reserve(count * width * steps)
        #: (B · W, T): the place that each beam writes to at each step.
        places = tails.slots(0, count * width * steps).int().to(device)
        self._own = places.view(count, steps, width).transpose(1, 2).flatten(0, 1).contiguous()
        pages = torch.zeros((count, max(shared)), dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            pages[row, : len(prompt.table)] = torch.tensor(prompt.table)
        rows = count * width
        self._rows = DecodeBatch(
            ids=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            active=torch.ones(rows, dtype=torch.bool, device=device),
            tails=self._own.clone(),
            tail_size=1,
            pages=pages.to(device),
            page_size=PAGE,
            prefix=torch.zeros(count, dtype=torch.int32, device=device),
            beams=width,
        )
        self._first_row = torch.arange(count, device=device)[:, None] * width
        self._column = torch.arange(steps, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)
        self._board = BatchedSearch(rules, lengths, device)
        self._forward = DecodeStep(decoder, self._pool, rows)
        self._replays: dict[bool, Callable[[], Any]] = {}

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], n_best: int) -> list[list[Beam]]:
        """Up to `n_best` continuations of every prompt, best first."""
        self._begin(prompts)
        most, before = self._rules.max_new_tokens, None
        for made in range(1, most, LOOK):
            for number in range(made, min(made + LOOK, most)):
                self._step(number)
            # The answer of a look is read when the steps after it are under way: the device never
            # waits for the host, and a search that is over stays as it is.
            asked = self._look()
            if before is not None and before.is_over():
                break
            before = asked
        self._look().is_over()
        return self._board.beams(n_best)

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """The prompts in one packed pass, and their first continuations."""
        lengths = [len(prompt) for prompt in prompts]
        if lengths != self._lengths:
            raise RangeError(f"the search is for prompts of {self._lengths} tokens, not {lengths}")
        self._board.reset()
        self._broken.zero_()
        logits = self._prompts(prompts)
        width = self._rules.beam_width
        prefix = torch.tensor(lengths, dtype=torch.int32)
        self._rows.prefix.copy_(prefix)
        self._rows.positions.copy_(prefix.repeat_interleave(width) - 1)
        logits = logits.repeat_interleave(width, dim=0).float()
        self._move(logits, ranked(logits, self._kept))

    def _step(self, number: int) -> None:
        """The step whose tokens are the `number`-th of their tails: short tails have their own."""
        rows, is_short = self._rows, number <= SHORT_TAIL
        if is_short:
            rows = rows._replace(tails=rows.tails[:, :SHORT_TAIL])
        if not rows.ids.is_cuda:
            return self._go_on(rows)
        if is_short not in self._replays:
            graph = captured(lambda: self._go_on(rows), self._state())
            self._replays[is_short] = graph.replay
        self._replays[is_short]()
        return None

    def _go_on(self, rows: DecodeBatch) -> None:
        """One token of every beam, and the choice of those that follow."""
        self._move(*self._forward.ranked(rows, self._kept))

    def _move(self, logits: Tensor, top: TopK) -> None:
        """The searches one step on, and the rows to where their beams come from."""
        board, rows = self._board, self._rows
        if logits.is_cuda:
            from trapline.gold.beam_search.triton import advance

            if advance.fits(board, self._kept):
                state = self._broken, rows.ids, rows.positions, rows.tails, self._own
                return advance.advance(board, logits, top.lse, top.values, top.indices, *state)
        alive = (board.sums > -torch.inf).flatten()
        self._broken.logical_or_((alive & ~torch.isfinite(top.lse)).any())
        ends = logits.index_select(1, board.ends) - top.lse[:, None]
        parents, tokens = board.advance(Offered(top.values, top.indices, ends))
        past = rows.tails.index_select(0, (self._first_row + parents).flatten())
        # The last token is still to be fed: its place is the beam's own, as are all after it.
        rows.tails.copy_(torch.where(self._column < board.length[:1] - 1, past, self._own))
        rows.ids.copy_(tokens.flatten())
        rows.positions.add_(1)
        return None

    def _look(self) -> _Look:
        """Asks how the searches stand after the steps so far, and waits for nothing."""
        answers = torch.stack((self._broken[0] != 0, self._board.is_alive()))
        if not answers.is_cuda:
            return _Look(answers, None)
        landed = torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True)
        landed.copy_(answers, non_blocking=True)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Look(landed, done)

    def _state(self) -> list[Tensor]:
        """What a step changes, apart from places in the cache that it writes again."""
        board, rows = self._board, self._rows
        return [
            *(rows.ids, rows.positions, rows.tails, self._broken, board.length, board.sums),
            *(board.parents, board.tokens, board.scores, board.totals, board.nodes),
        ]
