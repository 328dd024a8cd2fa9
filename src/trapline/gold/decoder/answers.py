"""The work behind `Decoder.generate`: prompts to token ids, tokens to answers and pieces of text.

Three ways produce tokens: an `Engine`, a `Speculator`, or a beam search. The first two yield
`Piece`s as they come; a list of answers is what remains of them at the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trapline.gold.beam_search.policy import EarlyStopping, Name, Policy
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.beams import Searcher
from trapline.gold.decoder.engine import FinishReason, RequestError, check_prompt
from trapline.gold.decoder.generate import filled_engine
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling, sampling_per_prompt
from trapline.gold.decoder.speculator import Speculator
from trapline.gold.decoder.text import Codec, TextStream
from trapline.gold.errors import DTypeError, RangeError

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Hypothesis(NamedTuple):
    """One result of a beam search."""

    tokens: list[int]
    #: None without a tokenizer.
    text: str | None
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Answer:
    """What a model answers to one prompt."""

    #: New tokens, including a stop token.
    tokens: list[int]
    #: Their text, which ends before a stop string; None without a tokenizer.
    text: str | None
    #: "stop" at a stop token or stop string, "length" at max_new_tokens, "error" with `error`.
    finish_reason: FinishReason
    error: str | None = None
    #: Results of a beam search, best first; the first one is this answer.
    beams: tuple[Hypothesis, ...] = ()


class Piece(NamedTuple):
    """One new token of one prompt."""

    prompt: int
    #: None on a last piece that only brings an error or held-back text.
    token: int | None
    #: Text that is final now; "" while a character or a stop string may still be incomplete.
    text: str
    #: Given on the last piece of a prompt.
    finish_reason: FinishReason | None = None
    #: Whether a drafter proposed the token.
    drafted: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Beams:
    """A beam search: options as in `trapline.gold.beam_search`."""

    width: int
    length_penalty: float = 1.0
    policy: Name | Policy = "canonical"
    early_stopping: EarlyStopping | None = None
    #: Results a prompt; `width` by default.
    n_best: int | None = None


@dataclass(frozen=True)
class Job:
    """Checked arguments of one `Decoder.generate` call."""

    decoder: Network
    prompts: list[list[int]]
    codec: Codec | None
    max_new_tokens: int
    sampling: Sampling | Sequence[Sampling] | None
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    batch: int

    def pieces(self, speculate: Speculator | None, *, with_text: bool) -> Iterator[Piece]:
        """Tokens as they come; text costs host time, so only on request or for stop strings."""
        codec = self.codec if with_text or self.stop else None
        if speculate is None:
            return self._plain(codec)
        return self._speculative(codec, speculate)

    def answers(self, speculate: Speculator | None) -> list[Answer]:
        """Runs everything; a prompt that fails does not affect the others."""
        tokens: list[list[int]] = [[] for _ in self.prompts]
        texts = ["" for _ in self.prompts]
        ends: dict[int, Piece] = {}
        for piece in self.pieces(speculate, with_text=False):
            if piece.token is not None:
                tokens[piece.prompt].append(piece.token)
            texts[piece.prompt] += piece.text
            if piece.finish_reason is not None:
                ends[piece.prompt] = piece
        return [
            self._answer(own, text if self.stop else None, ends[number])
            for number, (own, text) in enumerate(zip(tokens, texts, strict=True))
        ]

    def search(self, beams: Beams) -> list[Answer]:
        """A beam search over each `batch` of prompts."""
        if not self.stop_ids:
            raise RangeError("a beam search needs stop_ids; the checkpoint names no end token")
        searcher = Searcher(
            self.decoder,
            beam_width=beams.width,
            max_new_tokens=self.max_new_tokens,
            eos_id=self.stop_ids,
            length_penalty=beams.length_penalty,
            policy=beams.policy,
            early_stopping=beams.early_stopping,
            n_best=beams.n_best,
        )
        for number, prompt in enumerate(self.prompts):
            try:
                check_prompt(self.decoder.config, prompt, self.max_new_tokens)
            except RangeError as error:
                raise RangeError(f"prompt {number}: {error}") from None
        found: list[Answer] = []
        for first in range(0, len(self.prompts), self.batch):
            found += self._searched(searcher, self.prompts[first : first + self.batch])
        return found

    def _searched(self, searcher: Searcher, prompts: list[list[int]]) -> list[Answer]:
        try:
            return [self._from_beams(found) for found in searcher(prompts)]
        except RangeError as error:  # logits of NaN: search alone to find whose they are
            if len(prompts) == 1:
                return [Answer([], None, "error", str(error))]
            return [self._searched(searcher, [prompt])[0] for prompt in prompts]

    def _from_beams(self, found: Sequence[Beam]) -> Answer:
        results = tuple(
            Hypothesis(
                list(beam.tokens),
                None if self.codec is None else self.codec.decode(list(beam.tokens)),
                beam.score,
                "stop" if beam.ended else "length",
            )
            for beam in found
        )
        best = results[0]
        return Answer(best.tokens, best.text, best.finish_reason, beams=results)

    def _plain(self, codec: Codec | None) -> Iterator[Piece]:
        engine = filled_engine(
            self.decoder,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            sampling=self.sampling,
            batch=self.batch,
            decode=None if codec is None else codec.decode,
            stop_texts=self.stop,
        )
        while engine.is_busy:
            try:
                for token in engine.step():
                    yield Piece(token.request, token.token, token.text, token.finish_reason)
            except RequestError as error:
                yield Piece(error.request, None, "", "error", error=str(error))

    def _speculative(self, codec: Codec | None, speculate: Speculator) -> Iterator[Piece]:
        texts = [
            None if codec is None else TextStream(codec.decode, self.stop) for _ in self.prompts
        ]
        over: set[int] = set()
        for burst in speculate.stream(
            self.decoder,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            sampling=sampling_per_prompt(self.sampling, len(self.prompts)),
            batch=self.batch,
            finished=over.__contains__,
        ):
            text = texts[burst.prompt]
            for place, token in enumerate(burst.tokens):
                if burst.prompt in over:
                    break
                shown = "" if text is None else text.push(token)
                reason: FinishReason | None = None
                if text is not None and text.stopped:
                    reason = "stop"
                elif burst.last and place + 1 == len(burst.tokens):
                    reason = "stop" if token in self.stop_ids else "length"
                if reason is not None:
                    over.add(burst.prompt)
                    shown += "" if text is None else text.finish()
                yield Piece(burst.prompt, token, shown, reason, drafted=place < burst.drafted)
            if burst.last and burst.prompt not in over:
                over.add(burst.prompt)
                rest = "" if text is None else text.finish()
                reason = "length" if burst.error is None else "error"
                yield Piece(burst.prompt, None, rest, reason, error=burst.error)

    def _answer(self, tokens: list[int], text: str | None, end: Piece) -> Answer:
        assert end.finish_reason is not None
        if self.codec is not None and text is None:
            try:
                text = self.codec.decode(tokens)
            except Exception as error:  # a tokenizer may raise anything
                return Answer(tokens, None, "error", f"decoding the text: {error!r}")
        return Answer(tokens, text, end.finish_reason, end.error)


def refuse_combination(
    beams: object, *, sampling: object, speculate: object, stop: Sequence[str], stream: bool
) -> None:
    """A beam search does not compose with sampling, speculation, stop strings or streaming."""
    if beams is None:
        return
    if sampling is not None:
        raise RangeError("a beam search does not sample: leave out sampling or beams")
    if speculate is not None:
        raise RangeError("a beam search cannot speculate: leave out speculate or beams")
    if stop:
        raise RangeError("a beam search ends at stop_ids, not at stop strings: leave out stop")
    if stream:
        raise RangeError("a beam search ranks its results at the end: leave out stream")


def prompt_ids(prompts: Prompts, codec: Codec | None) -> list[list[int]]:
    """Token ids of one prompt or several: text, or ids."""
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise DTypeError(f"prompts must be text or token ids, got {type(prompts).__name__}")
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if given and not any(isinstance(one, str) or hasattr(one, "__len__") for one in given):
        given = [given]
    return [_ids_of(one, codec) for one in given]


def _ids_of(prompt: Any, codec: Codec | None) -> list[int]:
    if not isinstance(prompt, str):
        if not hasattr(prompt, "__len__") or isinstance(prompt, bytes):
            raise DTypeError(f"a prompt must be text or a list of token ids, got {prompt!r}")
        return prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if codec is None:
        raise RangeError("text needs a tokenizer: this decoder has none; give token ids instead")
    return codec.encode(prompt)
