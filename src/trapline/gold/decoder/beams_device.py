"""Beam search that stays on the device: logits, candidates, beams, finished pool and caches.

The host launches steps and checks now and then, without waiting, whether all searches are over.
All beams of a prompt read its keys and values from the same pages. Each beam writes to a slot of
its own at every step, and slots never move: a beam's past is a row of slot numbers, and forking
copies that row.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.beam_search.batched_search import BatchedSearch, Offered
from trapline.gold.beam_search.policy import Rules
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.capture import HostCopy, captured, host_copy
from trapline.gold.decoder.decode_step import DecodeStep
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.step_ops import DecodeBatch
from trapline.gold.decoder.tile_config import SHORT_TAIL
from trapline.gold.errors import RangeError
from trapline.gold.softmax_topk.api import TopK

PAGE = 16
#: Steps between two checks whether all searches are over.
LOOK = 16
#: Tokens of a prompt pass that is captured; longer ones keep the GPU busy anyway, and a graph
#: would hold their memory.
LONGEST = 4096


class PromptPass:
    """Logits (B, V) after prompts of fixed lengths, batch after batch, captured on a GPU.

    A short pass finishes sooner than the host can launch its kernels one by one. Keys and values go
    into the pages of these sequences, which must be empty; their lengths are not advanced.
    """

    def __init__(self, decoder: Network, places: Sequence[PooledSequence], lengths: list[int]):
        self._decoder = decoder
        self._packing = decoder.pack(lengths, places)
        self._ids = torch.zeros(sum(lengths), dtype=torch.long, device=decoder.device)
        self._last = torch.tensor(list(accumulate(lengths)), device=decoder.device) - 1
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._ids.copy_(self._decoder.tokens(prompts))
        # The first batch may be the only one, so it is not captured. Running it also makes the
        # host-side tables that a capture cannot make.
        if self._logits is None or not self._ids.is_cuda or len(self._ids) > LONGEST:
            self._remember()
        else:
            self._graph = self._graph or captured(self._remember, [], self._ids.device)
            self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _remember(self) -> None:
        hidden = self._decoder.through(self._ids, self._packing).last
        self._logits = self._decoder.logits(hidden[self._last])


class DeviceSearch:
    """Searches from prompts of these lengths, one batch after another, with the same rules.

    The step is captured with the first batch and the pass over prompts with the second.
    """

    def __init__(self, decoder: Network, lengths: Sequence[int], rules: Rules) -> None:
        self._rules, self._lengths = rules, list(lengths)
        vocabulary, device = decoder.config.vocab, decoder.device
        if rules.beam_width < 2:
            raise RangeError(
                f"a search on the device needs beam_width >= 2, got {rules.beam_width}"
            )
        if not all(lengths):
            raise RangeError("a prompt is empty")
        if not all(0 <= end < vocabulary for end in rules.eos_ids):
            raise RangeError(
                f"eos_id {list(rules.eos_ids)} is outside the vocabulary of {vocabulary}"
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
        #: (B · W, T): the slot that each beam writes to at each step.
        places = tails.slots(0, count * width * steps).int().to(device)
        self._own = places.view(count, steps, width).transpose(1, 2).flatten(0, 1).contiguous()
        pages = torch.zeros((count, max(shared)), dtype=torch.int32, device="cpu")
        for row, prompt in enumerate(prompts):
            pages[row, : len(prompt.table)] = torch.tensor(prompt.table, device="cpu")
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
        self._decode = DecodeStep(decoder, self._pool, rows)
        self._replays: dict[bool, Callable[[], Any]] = {}

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], n_best: int) -> list[list[Beam]]:
        """Up to `n_best` continuations of every prompt, best first."""
        self._begin(prompts)
        most, before = self._rules.max_new_tokens, None
        for made in range(1, most, LOOK):
            for number in range(made, min(made + LOOK, most)):
                self._step(number)
            # Reads the result of a check while later steps run, so the device never waits for the
            # host. Steps after the end of a search do not change it.
            asked = self._look()
            if before is not None and _is_over(before):
                break
            before = asked
        _is_over(self._look())
        return self._board.beams(n_best)

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Runs the prompts in one packed pass and selects their first beams."""
        lengths = [len(prompt) for prompt in prompts]
        if lengths != self._lengths:
            raise RangeError(f"prompts must have {self._lengths} tokens, got {lengths}")
        self._board.reset()
        self._broken.zero_()
        logits = self._prompts(prompts)
        width = self._rules.beam_width
        prefix = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        self._rows.prefix.copy_(prefix)
        self._rows.positions.copy_(prefix.repeat_interleave(width) - 1)
        logits = logits.repeat_interleave(width, dim=0).float()
        self._move(logits, ranked(logits, self._kept))

    def _step(self, number: int) -> None:
        """Step `number`; short and long tails have a graph each."""
        rows, is_short = self._rows, number <= SHORT_TAIL
        if is_short:
            rows = rows._replace(tails=rows.tails[:, :SHORT_TAIL])
        if not rows.ids.is_cuda:
            return self._go_on(rows)
        if is_short not in self._replays:
            graph = captured(lambda: self._go_on(rows), self._state(), rows.ids.device)
            self._replays[is_short] = graph.replay
        self._replays[is_short]()
        return None

    def _go_on(self, rows: DecodeBatch) -> None:
        """Feeds one token of every beam and selects the next beams."""
        self._move(*self._decode.ranked(rows, self._kept))

    def _move(self, logits: Tensor, top: TopK) -> None:
        """Advances the searches and reorders the rows by parent beam."""
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
        # The last token is not fed yet: from its slot on, slots are the beam's own.
        rows.tails.copy_(torch.where(self._column < board.length[:1] - 1, past, self._own))
        rows.ids.copy_(tokens.flatten())
        rows.positions.add_(1)
        return None

    def _look(self) -> HostCopy:
        """Starts a check whether logits were invalid, and whether a beam is alive."""
        return host_copy(torch.stack((self._broken[0] != 0, self._board.is_alive())))

    def _state(self) -> list[Tensor]:
        """Tensors that a step changes, except cache slots that it writes again."""
        board, rows = self._board, self._rows
        return [
            *(rows.ids, rows.positions, rows.tails, self._broken, board.length, board.sums),
            *(board.parents, board.tokens, board.scores, board.totals, board.nodes),
        ]


def _is_over(look: HostCopy) -> bool:
    """Whether all searches are over; waits for the device."""
    broken, alive = look.read()
    if broken:
        raise RangeError("log_probs gave NaN or +inf")
    return not alive
