"""A model behind any OpenAI-compatible endpoint: streamed replies, retries, token counts."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from trapline.arena.errors import ArenaError, MissingError

KEY_VARIABLE = "OPENAI_API_KEY"
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
_SHORTEST_KEY = 8
_RETRIED = (408, 409, 429)
#: Names of ours that differ from the API's.
_PARAMETERS = {"effort": "reasoning_effort"}

Message = dict[str, str]


class ProviderError(ArenaError):
    """The provider gave no answer. This says nothing about the model, so there is no grade."""


@dataclass(frozen=True)
class Reply:
    text: str
    input_tokens: int
    output_tokens: int
    #: Why it ended: "stop", "length" (cut off), "refusal" or "content_filter".
    finish: str
    seconds: float
    retries: int
    #: The model's version, as the provider named it.
    version: str = ""


@dataclass
class RateLimit:
    per_minute: float | None = None
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> None:
        if self.per_minute is None:
            return
        with self._lock:
            now = time.monotonic()
            delay = max(0.0, self._next - now)
            self._next = max(now, self._next) + 60.0 / self.per_minute
        sleep(delay)


@dataclass(frozen=True)
class Endpoint:
    """One model. The key is read from the environment and written nowhere."""

    url: str
    model: str
    timeout: float = 600.0
    attempts: int = 5
    rate: RateLimit = field(default_factory=RateLimit)
    #: temperature, top_p, max_tokens, effort, seed; what is missing is the provider's choice.
    sampling: Mapping[str, float | int | str] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep

    @property
    def provider(self) -> str:
        """The host that answers."""
        return urlsplit(self.url).hostname or self.url

    def for_attempt(self, number: int) -> "Endpoint":
        """The endpoint with the seed of one attempt; later ones get the following seeds."""
        if "seed" not in self.sampling:
            return self
        seed = int(self.sampling["seed"]) + number - 1
        return replace(self, sampling={**self.sampling, "seed": seed})

    def ask(self, messages: list[Message]) -> Reply:
        """One reply; retries with growing waits while the provider is busy or broken."""
        started = time.monotonic()
        failures: list[str] = []
        for attempt in range(self.attempts):
            self.rate.wait(self.sleep)
            try:
                text, finish, usage, version = self._stream(messages)
            except _Again as again:
                failures.append(str(again))
                if attempt + 1 < self.attempts:
                    self.sleep(again.wait or backoff(attempt))
                continue
            seconds = time.monotonic() - started
            return Reply(
                _hidden(text), usage[0], usage[1], finish, seconds, len(failures), _hidden(version)
            )
        raise ProviderError(f"no answer after {self.attempts} attempts: {failures[-1]}")

    def _stream(self, messages: list[Message]) -> tuple[str, str, tuple[int, int], str]:
        openai = sdk()
        try:
            client = openai.OpenAI(
                base_url=self.url,
                api_key=os.environ.get(KEY_VARIABLE, "none"),
                timeout=self.timeout,
                max_retries=0,
            )
            stream = client.chat.completions.create(
                model=self.model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                **{_PARAMETERS.get(name, name): value for name, value in self.sampling.items()},
            )
            return _gather(stream)
        except openai.APIStatusError as error:
            raise _judge(error) from None
        except (openai.APIError, ValueError, OSError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from None


def _hidden(text: str) -> str:
    """Removes the key, which a provider may repeat in its messages."""
    key = os.environ.get(KEY_VARIABLE, "")
    return text.replace(key, "<key>") if len(key) >= _SHORTEST_KEY else text


def _gather(stream: Iterator[Any]) -> tuple[str, str, tuple[int, int], str]:
    """The whole stream; without a finish reason it was cut off."""
    parts: list[str] = []
    finish, usage, version, refused = "", (0, 0), "", False
    for chunk in stream:
        version = str(chunk.model or version)
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            parts.append(choice.delta.content or choice.delta.refusal or "")
            finish = choice.finish_reason or finish
            refused = refused or bool(choice.delta.refusal)
    if not finish:
        raise _Again("the stream was cut off")
    return "".join(parts), "refusal" if refused else finish, usage, version


class _Again(Exception):
    """A failure that is retried, after the wait that the provider asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def _judge(error: Any) -> Exception:
    """Retries a busy or broken provider, not a refusal (a bad key, an unknown model)."""
    reason = f"HTTP {error.status_code}"
    if error.status_code in _RETRIED or error.status_code >= 500:
        return _Again(reason, _retry_after(error.response.headers.get("retry-after")))
    return ProviderError(f"the provider refused: {reason}")


def _retry_after(value: str | None) -> float | None:
    try:
        return min(LONGEST_WAIT, max(0.0, float(value))) if value is not None else None
    except ValueError:
        return None


def backoff(attempt: int) -> float:
    """Doubles, with a random half, so that clients do not retry in step."""
    wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0**attempt)
    return wait * random.uniform(0.5, 1.0)


def sdk() -> Any:
    try:
        import openai
    except ImportError:
        raise MissingError("endpoints need openai: pip install 'trapline[models]'") from None
    return openai
