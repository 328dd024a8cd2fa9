"""Continuous batching: requests enter when there is room and leave when they are done.

A request reserves pages for its prompt and its longest answer when it enters, so a running request
never runs out of memory. Requests wait in order of arrival.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from trapline.gold import checks
from trapline.gold.decoder.capture import HostCopy, host_copy
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.graphed_step import ROOM, GraphedStep, StepRow
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.penalties import History
from trapline.gold.decoder.pool import Pool, PooledSequence
from trapline.gold.decoder.sampling import NO_TOKEN, Logprobs, Sampling, TokenSampler
from trapline.gold.decoder.text import Decode, TextStream
from trapline.gold.errors import DTypeError, RangeError

FinishReason = Literal["stop", "length", "error"]


class RequestError(RangeError):
    """A running request failed; `request` is its number."""

    def __init__(self, request: int, reason: str) -> None:
        super().__init__(reason)
        self.request = request


class TokenLogprobs(NamedTuple):
    """The model's log-probability of a token, before bias, penalties and temperature."""

    token: int
    logprob: float
    #: The likeliest tokens and their log-probabilities, best first.
    top: list[tuple[int, float]]


class Token(NamedTuple):
    """One new token of one request."""

    request: int
    token: int
    last: bool
    #: Text that is final now, for requests with `decode`.
    text: str = ""
    #: Given with the last token: "stop" at a stop token or stop string, else "length".
    finish_reason: FinishReason | None = None
    #: For requests with `logprobs`.
    logprobs: TokenLogprobs | None = None


@dataclass
class _Request:
    number: int
    prompt: list[int]
    most: int
    stop_ids: frozenset[int]
    sampling: Sampling
    text: TextStream | None
    logprobs: int | None
    tokens: list[int] = field(default_factory=list)
    sequence: PooledSequence | None = None

    @property
    def positions(self) -> int:
        """Positions to reserve; the last token is returned but never fed."""
        return len(self.prompt) + self.most - 1

    def add_token(self, token: int, logprobs: TokenLogprobs | None) -> Token:
        """Takes a token in; raises where there is none, and where `decode` fails."""
        if token == NO_TOKEN:
            reason = f"the logits of request {self.number} are NaN or have no softmax"
            raise RequestError(self.number, reason)
        self.tokens.append(token)
        stopped = token in self.stop_ids
        last = stopped or len(self.tokens) >= self.most
        shown = ""
        if self.text is not None:
            try:
                shown = self.text.push(token)
                last = last or self.text.stopped
                shown += self.text.finish() if last else ""
            except Exception as error:  # `decode` is the caller's: it may raise anything
                reason = f"decoding the text of request {self.number}: {error!r}"
                raise RequestError(self.number, reason) from error
            stopped = stopped or self.text.stopped
        ending: FinishReason = "stop" if stopped else "length"
        if self.logprobs is None:
            logprobs = None
        elif logprobs is not None:
            logprobs = logprobs._replace(top=logprobs.top[: self.logprobs])
        return Token(self.number, token, last, shown, ending if last else None, logprobs)


class _Choice(NamedTuple):
    """The next token of a request."""

    request: _Request
    token: int
    logprobs: TokenLogprobs | None


class _Flight(NamedTuple):
    """Steps under way on the device, and their requests."""

    requests: list[_Request]
    steps: int
    tokens: HostCopy  # (steps, R)
    #: Of a flight of one step.
    logprobs: Logprobs | None

    def read(self) -> list[list[_Choice]]:
        """The tokens of each step; waits for the device."""
        return [_choices(self.requests, row, self.logprobs) for row in self.tokens.read()]


class Engine:
    """`add` requests at any time; every `step` returns the next token of each running one.

    At most `rows` requests run at once, in a pool of `pages` pages. With `share_prefixes` a prompt
    reuses the pages of an earlier one with the same beginning; with `bits` (8, 4 or "fp8") pages
    are quantised. The decoder's weights must not change while an engine uses them.
    """

    def __init__(
        self,
        decoder: Network,
        *,
        rows: int = 32,
        pages: int = 1024,
        page_size: int = 16,
        share_prefixes: bool = False,
        bits: int | str | None = None,
    ) -> None:
        if not isinstance(decoder, Network):
            raise DTypeError(f"an engine needs a Decoder, got {type(decoder).__name__}")
        checks.integers(rows=rows, pages=pages, page_size=page_size)
        if rows < 1:
            raise RangeError(f"an engine needs at least one row, got {rows}")
        self.decoder, self.rows, self.share_prefixes = decoder, rows, share_prefixes
        dtype = decoder.norm.weight.dtype
        self.pool = Pool(decoder.config, pages, page_size, dtype, decoder.device, bits)
        most = self.pool.book.pages_for(decoder.config.context)
        self._step = GraphedStep(decoder, self.pool, rows, min(pages, most))
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._chooser: TokenSampler | None = None
        #: Tokens of later steps: a GPU runs several steps at once, and the next ones while these
        #: are handed out.
        self._ahead: deque[list[_Choice]] = deque()
        self._flight: _Flight | None = None
        self._most_ahead = 1 if decoder.device.type == "cpu" else ROOM
        #: Failed requests, raised one a step, then the tokens of the others.
        self._broken: dict[int, RequestError] = {}
        self._undelivered: list[Token] = []
        self._numbers = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running or self._broken or self._undelivered)

    @property
    def waiting(self) -> int:
        """Requests that have not entered yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling | None = None,
        decode: Decode | None = None,
        stop_texts: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> int:
        """Queues a request and returns its number; refuses one that can never run.

        With `logprobs`, its tokens carry their log-probability and those of so many likeliest
        tokens; steps then run one at a time.
        """
        if stop_texts and decode is None:
            raise RangeError("stop_texts need decode, a function from tokens to text")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise DTypeError(f"sampling must be a Sampling, got {sampling!r}")
        if logprobs is not None:
            checks.integer_between(0, self.decoder.config.vocab, logprobs=logprobs)
        (most,) = integers("max_new_tokens", [max_new_tokens])
        request = _Request(
            self._numbers,
            integers("a token of the prompt", prompt),
            most,
            frozenset(integers("a stop token", stop_ids)),
            sampling or Sampling(),
            TextStream(decode, stop_texts) if decode else None,
            logprobs,
        )
        self._check(request)
        self._numbers += 1
        self._waiting.append(request)
        return request.number

    def cancel(self, number: int) -> None:
        """Drops a request, waiting or running."""
        self._waiting = deque(one for one in self._waiting if one.number != number)
        self._leave({one.number for one in self._running if one.number == number})
        self._undelivered = [token for token in self._undelivered if token.request != number]
        self._broken.pop(number, None)

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Lets waiting requests enter, then returns one new token of every running request.

        A request whose logits are NaN, or whose `decode` raises, ends with a `RequestError` of its
        own; later steps return the tokens of the others. After any other error the entering
        requests wait again, and the next step makes the same tokens.
        """
        if self._broken:
            raise self._broken.pop(next(iter(self._broken)))
        if self._undelivered:
            events, self._undelivered = self._undelivered, []
            return events
        entered = [] if self._ahead or self._flight else self._enter()
        try:
            first = self._prefill(entered) if entered else []
            # Last, because it counts its tokens as delivered: nothing after it may fail.
            said = self._decode() if self._running else []
        except BaseException:
            self._put_back(entered)
            raise
        if entered:
            self._running += entered
            self._chooser = None
        return self._deliver(said + first)

    def _check(self, request: _Request) -> None:
        vocabulary = self.decoder.config.vocab
        for stop in sorted(request.stop_ids):
            if not 0 <= stop < vocabulary:
                raise RangeError(f"stop token {stop} is outside the vocabulary of {vocabulary}")
        check_bias(request.sampling, vocabulary)
        check_prompt(self.decoder.config, request.prompt, request.most)
        needed = self.pool.book.pages_for(request.positions)
        if needed > self.pool.book.num_pages:
            raise MemoryError(
                f"the request needs {needed} pages, the pool has {self.pool.book.num_pages}"
            )

    def _enter(self) -> list[_Request]:
        """Waiting requests in order of arrival, while there are rows and pages."""
        entered: list[_Request] = []
        while self._waiting and len(self._running) + len(entered) < self.rows:
            request = self._waiting[0]
            sequence = self.pool.open()
            if self.share_prefixes:
                sequence.adopt(request.prompt)
            try:
                sequence.reserve(request.positions)
            except MemoryError:
                sequence.free()
                break
            request.sequence = sequence
            entered.append(self._waiting.popleft())
        return entered

    def _prefill(self, entered: list[_Request]) -> list[_Choice]:
        """Runs the prompts in one packed pass; returns the first token after each."""
        sequences = [_opened(request) for request in entered]
        new = [
            request.prompt[sequence.length :]
            for request, sequence in zip(entered, sequences, strict=True)
        ]
        logits = self.decoder.step(new, sequences)
        chooser = self._sampler_for(entered)
        made = torch.zeros(len(entered), dtype=torch.int64, device=logits.device)
        said = _choices(entered, chooser(logits, made).tolist(), chooser.latest)
        if self.share_prefixes:
            for choice in said:
                # NaN also reaches earlier positions: 0 · NaN is NaN under a mask.
                if choice.token != NO_TOKEN:
                    _opened(choice.request).publish(choice.request.prompt)
        return said

    def _put_back(self, entered: list[_Request]) -> None:
        """Returns requests to the front of the queue and discards steps under way."""
        for request in entered:
            _opened(request).free()
            request.sequence = None
        self._waiting.extendleft(reversed(entered))
        self._chooser = self._flight = None

    def _decode(self) -> list[_Choice]:
        """One step of the rows that are running."""
        if not self._ahead:
            self._look_ahead()
        running = {one.number for one in self._running}
        said = [choice for choice in self._ahead.popleft() if choice.request.number in running]
        for choice in said:
            _opened(choice.request).advance(1)
        return said

    def _look_ahead(self) -> None:
        """Runs as many steps as no request can end within by its length; one on a CPU.

        A request that meets a stop token earlier has only written to its own pages; its further
        tokens are ignored.
        """
        flight = self._flight or self._start(self._left())
        left = self._left() - flight.steps
        self._flight = None
        follows = self._most_ahead > 1 and left > 0 and self._chooser is not None
        if follows and not self._waiting:
            self._flight = self._start(left)
        self._ahead.extend(flight.read())

    def _left(self) -> int:
        return min(one.most - len(one.tokens) for one in self._running)

    def _start(self, left: int) -> _Flight:
        """Launches the next steps, at most `left`."""
        if self._chooser is None:
            self._chooser = self._sampler_for(self._running)
            self._step.load(
                [StepRow(_opened(one), one.tokens[-1], len(one.tokens)) for one in self._running]
            )
        most = 1 if _most_logprobs(self._running) is not None else self._most_ahead
        tokens = self._step.choose_ahead(self._chooser, min(most, left))
        return _Flight(list(self._running), len(tokens), host_copy(tokens), self._chooser.latest)

    def _deliver(self, said: list[_Choice]) -> list[Token]:
        """Returns tokens and removes finished requests; a failing one does not affect others."""
        events: list[Token] = []
        for request, token, logprobs in said:
            try:
                events.append(request.add_token(token, logprobs))
            except RequestError as error:
                self._broken[request.number] = error
        self._leave({event.request for event in events if event.last} | set(self._broken))
        if self._broken:
            self._undelivered = events
            return self.step()
        return events

    def _leave(self, numbers: set[int]) -> None:
        for request in self._running:
            if request.number in numbers:
                _opened(request).free()
                self._chooser = None
        self._running = [one for one in self._running if one.number not in numbers]
        if not self._running:  # drop tokens made ahead for requests that are gone
            self._ahead.clear()
            self._flight = None

    def _sampler_for(self, requests: Sequence[_Request]) -> TokenSampler:
        return TokenSampler(
            [request.sampling for request in requests],
            self.decoder.config.vocab,
            self.decoder.device,
            histories=[History(request.prompt, request.tokens) for request in requests],
            logprobs=_most_logprobs(requests),
        )


def _most_logprobs(requests: Sequence[_Request]) -> int | None:
    asked = [request.logprobs for request in requests if request.logprobs is not None]
    return max(asked, default=None)


def _choices(
    requests: Sequence[_Request], tokens: list[int], logprobs: Logprobs | None
) -> list[_Choice]:
    """The tokens of the first rows, one a request; rows beyond them are padding."""
    if logprobs is None:
        return [_Choice(*pair, None) for pair in zip(requests, tokens, strict=False)]
    chosen, values, names = (column.tolist() for column in logprobs)
    return [
        _Choice(
            request,
            tokens[row],
            TokenLogprobs(
                tokens[row], chosen[row], list(zip(names[row], values[row], strict=True))
            ),
        )
        for row, request in enumerate(requests)
    ]


def check_bias(sampling: Sampling, vocabulary: int) -> None:
    """Refuses a bias for tokens that the model does not have."""
    for token in sampling.logit_bias or {}:
        if not 0 <= token < vocabulary:
            raise RangeError(f"logit_bias token {token} is outside the vocabulary of {vocabulary}")


def check_prompt(config: DecoderConfig, prompt: Sequence[int], most: int) -> None:
    """Refuses a prompt that cannot be continued by `most` tokens."""
    if most < 1:
        raise RangeError(f"max_new_tokens must be at least 1, got {most}")
    if not prompt:
        raise RangeError("the prompt is empty")
    if not all(0 <= token < config.vocab for token in prompt):
        raise RangeError(f"the prompt has a token outside the vocabulary of {config.vocab}")
    total = len(prompt) + most
    if total > config.context:
        raise RangeError(
            f"a prompt of {len(prompt)} and {most} new tokens need {total} positions, "
            f"the model has {config.context}"
        )


def integers(name: str, given: Iterable[Any]) -> list[int]:
    """Integers of any library; refuses 1.7, which `int` would truncate."""
    try:
        numbers = list(given)
    except TypeError:
        raise DTypeError(f"{name}: expected a list of integers, got {given!r}") from None
    for number in numbers:
        if type(number) is not int:  # a prompt may have a hundred thousand that are
            checks.integers(**{name: number})
    return [int(number) for number in numbers]


def _opened(request: _Request) -> PooledSequence:
    assert request.sequence is not None
    return request.sequence
