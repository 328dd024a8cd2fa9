"""`Speculation`: drafted tokens for `Decoder.generate(speculate=…)` and `trapline generate`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling, sampling_per_prompt
from trapline.gold.decoder.speculator import Burst
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding import checkpoint
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.drafter import DFlash, DFlashDrafter
from trapline.gold.tree_decoding.generate import Mode, Rules, check, stream
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup
from trapline.gold.tree_decoding.statistics import Statistics

#: Captured rounds that an object keeps; the oldest ones go first.
MOST_KEPT = 4
#: Room of a row is a multiple of this, so that calls of similar length share captured rounds.
ROOM_STEP = 64


class Speculation:
    """Drafts tokens with a DFlash model or by prompt lookup, and verifies them with the target.

    The answers are those of plain decoding; only their speed differs. Greedy answers are equal
    token by token. Sampled answers have the same distribution; on CUDA the fast rounds draw other
    tokens from a seed than plain decoding does.

    On CUDA the fast rounds serve, captured as CUDA graphs that the object keeps for later calls,
    if `supports` returns None. Otherwise, and on a CPU, the readable loop serves. `statistics` of
    the latest call say which one served and why.

    `mode` "tree" verifies the `budget` heaviest prefixes of a draft, "chain" its `budget` most
    likely tokens.
    """

    def __init__(
        self, drafter: DFlash | Literal["lookup"], *, mode: Mode = "tree", budget: int = 32
    ) -> None:
        if drafter != "lookup" and not isinstance(drafter, DFlash):
            raise RangeError(
                f"drafter must be a DFlash model or 'lookup', got {type(drafter).__name__}; "
                "Speculation.from_pretrained reads a drafter from a folder"
            )
        if mode not in get_args(Mode):
            raise RangeError(f"mode must be 'chain' or 'tree', got {mode!r}")
        checks.integer_between(1, 1023, budget=budget)
        self.mode, self.budget, self.statistics = mode, budget, Statistics()
        self._model = drafter if isinstance(drafter, DFlash) else None
        #: Captured rounds (`FastGenerator`) that later calls use again.
        self.captured: dict[Any, Any] = {}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, decoder: Network, *, mode: Mode = "tree", budget: int = 32
    ) -> Self:
        """Read `drafter.json` and `drafter.safetensors`, with the decoder's dtype and device."""
        model = checkpoint.load(
            Path(folder), dtype=decoder.norm.weight.dtype, device=decoder.device
        )
        model.check_fits(decoder)
        return cls(model.requires_grad_(False), mode=mode, budget=budget)

    def stream(
        self,
        decoder: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sequence[Sampling] | None = None,
        batch: int = 32,
        finished: Callable[[int], bool] = lambda prompt: False,
    ) -> Iterator[Burst]:
        """Yield the tokens of all prompts as they come; see `decoder.speculator.Speculator`."""
        ways = sampling_per_prompt(sampling, len(prompts))
        drafter = self._readable_drafter(decoder)
        target = DecoderTarget(decoder, drafter.target_layers)
        rules = Rules(max_new_tokens, frozenset(stop_ids), self.mode, self.budget)
        check(target, drafter, prompts, rules, batch)
        rows = min(batch, len(prompts))
        if rows == 0:
            return iter(())
        reason = self.supports(decoder, prompts, max_new_tokens=max_new_tokens, sampling=ways)
        self.statistics = Statistics(
            served_by="readable loop" if reason else "fast rounds", reason=reason
        )
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": stop_ids,
            "sampling": ways,
            "finished": finished,
            "statistics": self.statistics,
        }
        if reason is None:
            return self._fast(decoder, prompts, rows, options)
        return stream(
            target, drafter, prompts, mode=self.mode, budget=self.budget, batch=rows, **options
        )

    def supports(
        self,
        decoder: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sequence[Sampling],
    ) -> str | None:
        """Why the fast rounds cannot serve a call, or None."""
        if decoder.device.type != "cuda":
            return f"the fast rounds need a CUDA device, the decoder is on {decoder.device.type}"
        if any(way.top_k or way.top_p < 1.0 or way.min_p > 0.0 for way in sampling):
            return "the fast rounds sample by temperature only, not by top_k, top_p or min_p"
        if any(way.changes_logits for way in sampling):
            return "the fast rounds have no logit bias and no penalties"
        if self._model is not None and self._model.norm.weight.dtype != decoder.norm.weight.dtype:
            return "the fast rounds need drafter and decoder in one dtype"
        from trapline.gold.tree_decoding.fast_rounds import supports

        return supports(decoder, self._room(prompts, max_new_tokens), self._nodes)

    def _fast(
        self, decoder: Network, prompts: Sequence[Sequence[int]], rows: int, options: dict[str, Any]
    ) -> Iterator[Burst]:
        """Stream by captured rounds; they are absent from the cache while they are in use."""
        sampled = not all(way.is_greedy for way in options["sampling"])
        room = self._room(prompts, options["max_new_tokens"])
        # Weights that move or change their type invalidate a graph.
        weight = decoder.norm.weight
        key = decoder, weight.data_ptr(), weight.dtype, rows, sampled
        generator = self.captured.pop(key, None)
        if generator is None or generator.config.room < room:
            generator = self._capture(decoder, rows, room, sampled=sampled)
        try:
            yield from generator.stream(prompts, **options)
        finally:
            self.captured[key] = generator
            while len(self.captured) > MOST_KEPT:
                self.captured.pop(next(iter(self.captured)))

    def _capture(self, decoder: Network, rows: int, room: int, *, sampled: bool) -> Any:
        from trapline.gold.tree_decoding.fast_drafters import FusedDFlash, FusedLookup
        from trapline.gold.tree_decoding.fast_generate import FastGenerator
        from trapline.gold.tree_decoding.fast_rounds import RoundsConfig

        room = min(cdiv(room, ROOM_STEP) * ROOM_STEP, decoder.config.context)
        drafter: FusedDFlash | FusedLookup = FusedLookup(block=self.budget)
        if self._model is not None:
            chain = self.mode == "chain"
            drafter = FusedDFlash(self._model, decoder, rows, room, budget=self.budget, chain=chain)
        with torch.no_grad():
            return FastGenerator(decoder, drafter, RoundsConfig(rows, room, sampled))

    def _readable_drafter(self, decoder: Network) -> DFlashDrafter | PromptLookup:
        if self._model is None:
            return PromptLookup(decoder.config.vocab, block=self.budget, device=decoder.device)
        return DFlashDrafter(self._model, decoder)

    @property
    def _depth(self) -> int:
        return (
            self.budget if self._model is None else min(self._model.config.block - 1, self.budget)
        )

    @property
    def _nodes(self) -> int:
        """Nodes of a tree with its root."""
        chain = self._model is not None and self.mode == "chain"
        return 1 + (self._depth if chain else self.budget)

    def _room(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        """Positions of a row: the last round may exceed the limit and has a tree behind it."""
        longest = max((len(prompt) for prompt in prompts), default=1)
        return longest + max_new_tokens + self._depth + self._nodes
