"""The requests that the server accepts, the answers that it writes, and its errors.

All of them have the shapes of OpenAI's API. A parameter that the server does not have is an error,
never ignored.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trapline.gold.decoder.engine import Token, TokenLogprobs
from trapline.gold.decoder.sampling import Sampling

#: Answers of one request, prompts times n.
MOST_ANSWERS = 128
TokenText = Callable[[int], str]


class ApiError(Exception):
    """An error with its HTTP status and OpenAI's body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints accept; `top_k`, `min_p` and `repetition_penalty` are additions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    user: str | None = None

    def sampling(self, number: int) -> Sampling:
        """Settings of answer `number`; a request without a seed gets a random one."""
        given = {
            name: getattr(self, name)
            for name in (
                *("top_p", "top_k", "min_p"),
                *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            )
            if getattr(self, name) is not None
        }
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return Sampling(
            1.0 if self.temperature is None else self.temperature,
            seed=seed + number,
            logit_bias=self._bias(),
            **given,
        )

    def stops(self) -> tuple[str, ...]:
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(found) > 16:
            raise ApiError(400, f"stop has at most 16 texts, got {len(found)}", param="stop")
        return found

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _bias(self) -> dict[int, float] | None:
        try:
            return {int(token): value for token, value in (self.logit_bias or {}).items()} or None
        except ValueError:
            raise ApiError(
                400, "logit_bias must map token ids to numbers", param="logit_bias"
            ) from None


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: int | None = None

    def logprob_count(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "best_of must equal n: the server does not rank", param="best_of")
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise ApiError(400, "prompt is empty", param="prompt")
        found: list[str] | list[list[int]] = given
        return found


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def logprob_count(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        """Messages with plain text, which every chat template takes."""
        return [
            {**message, "content": _text_of(message.get("content"), number)}
            for number, message in enumerate(self.messages)
        ]


def _text_of(content: Any, number: int) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            break
        if isinstance(text := part.get("text"), str):
            texts.append(text)
    if len(texts) < len(parts):
        raise ApiError(
            400,
            f"content of message {number} must be a text or a list of text parts",
            param="messages",
        )
    return "".join(texts)


def parsed(kind: type[BaseModel], body: bytes) -> Any:
    """The body as a request of this kind; raises `ApiError` that names what is wrong."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(given).__name__}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "extra_forbidden":
            message = f"this server has no parameter {'.'.join(map(str, first['loc']))!r}"
        else:
            message = f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise ApiError(400, message, param=param) from None


@dataclass
class Choice:
    """One answer as it grows."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, token: Token) -> None:
        self.text += token.text
        self.tokens += 1
        self.finish_reason = token.finish_reason
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)


class CompletionWriter:
    """Answers of `/v1/completions`, whole and in chunks."""

    def __init__(self, model: str, token_text: TokenText, *, logprobs: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._token_text, self._logprobs = token_text, logprobs
        self._offsets: dict[int, int] = {}

    def first(self, _place: int) -> dict[str, Any] | None:
        """A chunk before the first token of an answer: there is none."""
        return None

    def chunk(self, place: int, token: Token) -> dict[str, Any]:
        """One token of one answer."""
        new = Choice()
        new.add(token)
        return {**self._head, "choices": [self._choice(place, new)]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        shown = [self._choice(place, choice) for place, choice in enumerate(choices)]
        return {**self._head, "choices": shown, "usage": usage}

    def _choice(self, place: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": place,
            "text": choice.text,
            "logprobs": self._table(place, choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _table(self, place: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        names = [self._token_text(one.token) for one in logprobs]
        offsets = []
        for name in names:
            offsets.append(self._offsets.get(place, 0))
            self._offsets[place] = offsets[-1] + len(name)
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._named(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _named(self, one: TokenLogprobs) -> dict[str, float]:
        """By text; tokens that share a text are named by their number."""
        named: dict[str, float] = {}
        for token, logprob in one.top:
            name = self._token_text(token)
            named[f"token_id:{token}" if name in named else name] = logprob
        return named


class ChatWriter:
    """Answers of `/v1/chat/completions`, whole and in chunks."""

    def __init__(self, model: str, token_text: TokenText, *, logprobs: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._token_text, self._logprobs = token_text, logprobs

    def first(self, place: int) -> dict[str, Any] | None:
        """The role of an answer comes before its first token."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk(self._choice(place, Choice(), delta=delta))

    def chunk(self, place: int, token: Token) -> dict[str, Any]:
        """One token of one answer."""
        new = Choice()
        new.add(token)
        return self._chunk(self._choice(place, new, delta={"content": token.text}))

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        shown = [
            self._choice(place, choice, message={"role": "assistant", "content": choice.text})
            for place, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": shown, "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, place: int, choice: Choice, **said: Any) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._entry(one) for one in choice.logprobs], "refusal": None}
        return {
            "index": place,
            **said,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _entry(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._named(*pair) for pair in one.top]
        return {**self._named(one.token, one.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
