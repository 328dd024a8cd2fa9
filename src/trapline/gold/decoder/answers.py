"""The work behind `Decoder.generate`: prompts to token ids, tokens to answers and pieces of text.

Three ways produce tokens: an `Engine`, a `Speculator`, or a beam search. The first two yield
`Piece`s as they come; a list of answers is what remains of them at the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trapline.gold.beam_search.policy import EarlyStopping, Name, Policy
from trapline.gold.beam_search.search import Beam
from trapline.gold.decoder.beams import Searcher
from trapline.gold.decoder.engine import (
    FinishReason,
    RequestError,
    TokenLogprobs,
    check_bias,
    check_prompt,
)
from trapline.gold.decoder.generate import filled_engine
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling, sampling_per_prompt
from trapline.gold.decoder.speculator import Speculator
from trapline.gold.decoder.text import Codec, TextStream, Tokenizer
from trapline.gold.errors import DTypeError, RangeError

#: A chat message: "role" and "content".
Message = Mapping[str, Any]
Prompts = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
)


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
    #: One entry a token, if `logprobs` was given.
    logprobs: tuple[TokenLogprobs, ...] | None = None


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
    #: Which of the `n` answers to the prompt.
    sample: int = 0
    logprobs: TokenLogprobs | None = None


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
    """Checked arguments of one `Decoder.generate` call; `prompts` has each prompt `n` times."""

    decoder: Network
    prompts: list[list[int]]
    codec: Codec | None
    max_new_tokens: int
    sampling: list[Sampling]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    batch: int
    n: int = 1
    logprobs: int | None = None

    def pieces(self, speculate: Speculator | None) -> Iterator[Piece]:
        """Tokens with text as they come."""
        for piece in self._numbered(speculate, with_text=True):
            prompt, sample = divmod(piece.prompt, self.n)
            yield piece._replace(prompt=prompt, sample=sample)

    def answers(self, speculate: Speculator | None) -> list[Answer]:
        """Runs everything; a prompt that fails does not affect the others."""
        found: list[list[Piece]] = [[] for _ in self.prompts]
        for piece in self._numbered(speculate, with_text=False):
            found[piece.prompt].append(piece)
        return [self._answer(own) for own in found]

    def _numbered(self, speculate: Speculator | None, *, with_text: bool) -> Iterator[Piece]:
        """Pieces by answer; text costs host time, so only on request or for stop strings."""
        codec = self.codec if with_text or self.stop else None
        if speculate is None:
            return self._plain(codec)
        return self._speculative(codec, speculate)

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
            found += self._searched(searcher, range(len(self.prompts))[first : first + self.batch])
        return found

    def _searched(self, searcher: Searcher, numbers: Sequence[int]) -> list[Answer]:
        prompts, ways = [self.prompts[i] for i in numbers], [self.sampling[i] for i in numbers]
        try:
            return [self._from_beams(found) for found in searcher(prompts, ways)]
        except RangeError as error:  # logits of NaN: search alone to find whose they are
            if len(numbers) == 1:
                return [Answer([], None, "error", str(error))]
            return [self._searched(searcher, [number])[0] for number in numbers]

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
            logprobs=self.logprobs,
        )
        while engine.is_busy:
            try:
                for number, token, _, text, reason, logprobs in engine.step():
                    yield Piece(number, token, text, reason, logprobs=logprobs)
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
            sampling=self.sampling,
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

    def _answer(self, pieces: list[Piece]) -> Answer:
        end = pieces[-1]
        assert end.finish_reason is not None
        tokens = [piece.token for piece in pieces if piece.token is not None]
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs is not None)
        text = "".join(piece.text for piece in pieces) if self.stop else None
        if self.codec is not None and text is None:
            try:
                text = self.codec.decode(tokens)
            except Exception as error:  # a tokenizer may raise anything
                return Answer(tokens, None, "error", f"decoding the text: {error!r}")
        return Answer(tokens, text, end.finish_reason, end.error, logprobs=logprobs)


def sampling_per_answer(
    sampling: Sampling | Sequence[Sampling] | None, prompts: int, n: int, vocabulary: int
) -> list[Sampling]:
    """One setting an answer: answer j of prompt i draws with a seed of its own."""
    if n == 1 or sampling is None or isinstance(sampling, Sampling):
        ways = sampling_per_prompt(sampling, prompts * n)
    else:
        ways = [
            replace(way, seed=way.seed + number)
            for way in sampling_per_prompt(sampling, prompts)
            for number in range(n)
        ]
    for way in ways:
        check_bias(way, vocabulary)
        if n > 1 and way.is_greedy:
            raise RangeError(f"n={n} answers need sampling: greedy answers would all be equal")
    return ways


def refuse_combination(
    beams: object,
    speculate: object,
    *,
    sampling: Sampling | Sequence[Sampling] | None,
    stop: Sequence[str],
    stream: bool,
    n: int,
    logprobs: int | None,
) -> None:
    """Names the first argument that does not compose with a beam search or speculation."""
    if beams is None:
        if speculate is not None and logprobs is not None:
            raise RangeError("speculation has no logprobs: leave out speculate or logprobs")
        return
    ways = [sampling] if isinstance(sampling, Sampling) else sampling or []
    draws = any(isinstance(w, Sampling) and w.without_penalties != Sampling() for w in ways)
    refused = {
        "a beam search does not sample: leave out sampling or beams, or give a Sampling with "
        "nothing but bias and penalties": draws,
        "a beam search cannot speculate: leave out speculate or beams": speculate is not None,
        "a beam search ends at stop_ids, not at stop strings: leave out stop": bool(stop),
        "a beam search ranks its results at the end: leave out stream": stream,
        "a beam search returns its n best by Beams(width, n_best=n): leave out n": n != 1,
        "a beam search has scores, not logprobs: leave out logprobs": logprobs is not None,
    }
    for sentence, is_given in refused.items():
        if is_given:
            raise RangeError(sentence)


def prompt_ids(prompts: Prompts, codec: Codec | None) -> list[list[int]]:
    """Token ids of one prompt or several: texts, conversations, or ids."""
    prompts = _without_arrays(prompts)
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise DTypeError(
            f"prompts must be text, chat messages or token ids, got {type(prompts).__name__}"
        )
    given = [prompts] if isinstance(prompts, str) else [_without_arrays(one) for one in prompts]
    is_conversation = given and all(isinstance(one, Mapping) for one in given)
    if is_conversation or (
        given and not any(isinstance(one, str) or hasattr(one, "__len__") for one in given)
    ):
        given = [given]
    return [_ids_of(one, codec) for one in given]


def _without_arrays(given: Any) -> Any:
    """Lists and numbers for NumPy arrays and tensors; everything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def _ids_of(prompt: Any, codec: Codec | None) -> list[int]:
    if isinstance(prompt, str):
        if codec is None:
            raise RangeError(
                "text needs a tokenizer: this decoder has none; give token ids instead"
            )
        return codec.encode(prompt)
    if not hasattr(prompt, "__len__") or isinstance(prompt, bytes | Mapping):
        raise DTypeError(f"a prompt must be text or a list of token ids, got {prompt!r}")
    if isinstance(next(iter(prompt), None), Mapping):
        if not isinstance(codec, Tokenizer):
            raise RangeError("chat messages need the checkpoint's own tokenizer; give text instead")
        return codec.encode_chat(prompt)
    return list(prompt)
