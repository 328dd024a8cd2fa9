"""The thread that owns the engine, and the answers that it hands to the event loop.

Only this thread touches the engine. HTTP handlers send it commands through a queue; it sends back
tokens, all of one step in one call. Methods without a leading underscore belong to the event loop.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trapline.gold.decoder.engine import Engine, RequestError, Token
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.decoder.text import Decode

log = logging.getLogger("trapline.serve")
FAILED = "the engine failed; see the server's log"


@dataclass(frozen=True)
class Ask:
    """One answer that a request wants."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


class GenerationError(Exception):
    """An answer failed on the way; the message says why."""


class RefusedError(Exception):
    """The engine refuses a request; the message says why."""


class BusyError(Exception):
    """More requests are waiting than the server accepts."""


class Generation:
    """The answers to one HTTP request, token by token."""

    def __init__(self, asks: Sequence[Ask], loop: asyncio.AbstractEventLoop) -> None:
        self.asks = list(asks)
        self.accepted: asyncio.Future[None] = loop.create_future()
        self._events: asyncio.Queue[tuple[int, Token | str]] = asyncio.Queue()
        #: Of the worker's thread: engine number → place among `asks`.
        self.numbers: dict[int, int] = {}
        self._left = len(self.asks)

    @property
    def is_unfinished(self) -> bool:
        return self._left > 0

    async def tokens(self) -> AsyncIterator[tuple[int, Token]]:
        """(place of the answer, token) until all answers end; raises `GenerationError`."""
        while self._left:
            place, event = await self._events.get()
            if isinstance(event, str):
                self._left = 0
                raise GenerationError(event)
            self._left -= event.last
            yield place, event

    def receive(self, place: int, event: Token | str) -> None:
        self._events.put_nowait((place, event))


class EngineWorker:
    """Runs an engine in a thread of its own; at most `most` answers wait and run at once."""

    def __init__(
        self, engine: Engine, *, stop_ids: Sequence[int], decode: Decode, most: int
    ) -> None:
        self.engine, self.most = engine, most
        self.generated = 0
        self._stop_ids, self._decode = list(stop_ids), decode
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._active: set[Generation] = set()
        #: Of the thread: engine number → generation.
        self._owners: dict[int, Generation] = {}

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Answers that wait or run."""
        return sum(len(generation.asks) for generation in self._active)

    def start(self) -> None:
        """Starts the thread; call it inside the event loop that serves requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, asks: Sequence[Ask]) -> Generation:
        """Queues answers; raises `BusyError` or `RefusedError`. Release the result in the end."""
        if self.active + len(asks) > self.most:
            raise BusyError
        assert self._loop is not None
        generation = Generation(asks, self._loop)
        self._active.add(generation)
        self._inbox.put(partial(self._add, generation))
        try:
            await generation.accepted
        except BaseException:
            self.release(generation)
            raise
        return generation

    def release(self, generation: Generation) -> None:
        """Frees what a request still holds: its rows and pages if it has not ended."""
        if generation in self._active:
            self._active.remove(generation)
            self._inbox.put(partial(self._drop, generation))

    def _run(self) -> None:
        while True:
            for command in self._commands(wait=not self.engine.is_busy):
                if command is None:
                    return
                command()
            if self.engine.is_busy:
                self._step()

    def _commands(self, *, wait: bool) -> list[Callable[[], None] | None]:
        """All commands so far; waits for one if the engine has nothing to do."""
        found = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _add(self, generation: Generation) -> None:
        try:
            for place, ask in enumerate(generation.asks):
                number = self.engine.add(
                    ask.prompt,
                    max_new_tokens=ask.max_new_tokens,
                    stop_ids=self._stop_ids,
                    sampling=ask.sampling,
                    decode=self._decode,
                    stop_texts=ask.stop,
                    logprobs=ask.logprobs,
                )
                generation.numbers[number] = place
                self._owners[number] = generation
        except (ValueError, TypeError, MemoryError) as error:
            self._drop(generation)
            self._call(_settle, generation.accepted, RefusedError(str(error)))
        except Exception:
            log.exception("the engine failed to take a request")
            self._drop(generation)
            self._call(_settle, generation.accepted, GenerationError(FAILED))
        else:
            self._call(_settle, generation.accepted, None)

    def _drop(self, generation: Generation) -> None:
        for number in generation.numbers:
            if self._owners.pop(number, None) is not None:
                self.engine.cancel(number)

    def _step(self) -> None:
        events: list[tuple[int, Token | str]]
        try:
            events = [(token.request, token) for token in self.engine.step()]
            self.generated += len(events)
        except RequestError as error:
            events = [(error.request, str(error))]
        except Exception:  # of the device or the engine itself: nothing that runs can go on
            log.exception("the engine failed")
            events = [
                (number, "the engine failed; see the server's log") for number in self._owners
            ]
            for number in self._owners:
                self.engine.cancel(number)
        self._hand_out(events)

    def _hand_out(self, events: list[tuple[int, Token | str]]) -> None:
        found: list[tuple[Generation, int, Token | str]] = []
        for number, event in events:
            generation = self._owners.get(number)
            if generation is None:
                continue
            found.append((generation, generation.numbers[number], event))
            if isinstance(event, str) or event.last:
                del self._owners[number]
        if found:
            self._call(_receive_all, found)

    def _call(self, function: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client is left
            self._loop.call_soon_threadsafe(function, *values)


def _settle(accepted: "asyncio.Future[None]", error: Exception | None) -> None:
    if accepted.done():  # cancelled: the client is gone
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _receive_all(found: list[tuple[Generation, int, Token | str]]) -> None:
    for generation, place, event in found:
        generation.receive(place, event)
