"""The HTTP application: routes, limits, the API key, streams and disconnects."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.serve.metrics import Metrics
from trapline.gold.serve.protocol import (
    MOST_ANSWERS,
    ApiError,
    ChatRequest,
    ChatWriter,
    Choice,
    CompletionRequest,
    CompletionWriter,
    parsed,
)
from trapline.gold.serve.worker import (
    Ask,
    BusyError,
    EngineWorker,
    Generation,
    GenerationError,
    RefusedError,
)

#: Seconds after which a refused client may try again.
RETRY_AFTER = 1
#: New tokens of `/v1/completions` without `max_tokens`, as OpenAI has it.
COMPLETION_TOKENS = 16
Endpoint = Callable[[Request], Awaitable[Response]]
Writer = CompletionWriter | ChatWriter


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    #: Tokens of a prompt; None leaves it to the model's context.
    prompt_tokens: int | None = None
    #: New tokens of an answer.
    max_tokens: int = 1024
    body_bytes: int = 1 << 20
    #: Seconds that a client may take to send its body.
    body_seconds: float = 30.0
    #: Answers that wait and run at once.
    answers: int = 512


class Service:
    """A decoder behind HTTP."""

    def __init__(
        self,
        decoder: Decoder,
        engine: Engine,
        *,
        name: str,
        limits: Limits | None = None,
        api_key: str | None = None,
    ) -> None:
        if not isinstance(decoder.tokenizer, Tokenizer):
            raise ValueError("serving needs a checkpoint with a tokenizer.json")
        self.limits, self.name, self.draining = limits or Limits(), name, False
        self.metrics = Metrics()
        self._tokenizer, self._context = decoder.tokenizer, decoder.config.context
        self._api_key = None if api_key is None else api_key.encode()
        self._began = int(time.time())
        self.worker = EngineWorker(
            engine,
            stop_ids=decoder.stop_ids,
            decode=self._tokenizer.decode,
            most=self.limits.answers,
        )

    def application(self) -> Starlette:
        """The ASGI application; its lifespan starts and stops the engine's thread."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await self.worker.stop()

        return Starlette(
            routes=[
                Route("/v1/completions", self._endpoint(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._endpoint(self._chat), methods=["POST"]),
                Route("/v1/models", self._endpoint(self._models)),
                Route("/v1/models/{name:path}", self._endpoint(self._model)),
                Route("/metrics", self._endpoint(self._metrics)),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _unexpected},
            lifespan=lifespan,
        )

    def _endpoint(self, handler: Endpoint) -> Endpoint:
        """Checks the key, turns errors into OpenAI's bodies and counts the answer."""

        async def answer(request: Request) -> Response:
            path = request.scope["route"].path
            try:
                self._authorise(request)
                response = await handler(request)
            except ApiError as error:
                response = JSONResponse(error.body, error.status, error.headers)
            except ClientDisconnect:
                self.metrics.disconnects += 1
                response = Response(status_code=499)  # is not sent: the client is gone
            self.metrics.requests[path, response.status_code] += 1
            return response

        return answer

    def _authorise(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers arrive as bytes and are shown as Latin-1.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._api_key)
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _health(self, _: Request) -> Response:
        if self.draining or not self.worker.is_alive:
            state = "shutting down" if self.draining else "the engine has stopped"
            return JSONResponse({"status": state}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        engine, book = self.worker.engine, self.worker.engine.pool.book
        gauges = {
            "running": ("Answers in the batch.", engine.running),
            "waiting": ("Answers that wait for a row or pages.", engine.waiting),
            "pages": ("Pages of the cache.", book.num_pages),
            "free_pages": ("Pages that no running answer holds.", book.free_pages),
        }
        text = self.metrics.text(gauges, self.worker.generated)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._began,
            "owned_by": "trapline",
            "max_model_len": self._context,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"there is no model {name!r}; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def _completions(self, request: Request) -> Response:
        body: CompletionRequest = await self._body(request, CompletionRequest)
        prompts = [
            one if isinstance(one, list) else await self._encoded(self._tokenizer.encode, one)
            for one in body.prompts()
        ]
        most = body.max_tokens or COMPLETION_TOKENS
        asks = self._asks(body, prompts, [most] * len(prompts))
        logprobs = body.logprob_count() is not None
        writer = CompletionWriter(self.name, self._token_text, logprobs=logprobs)
        return await self._answer(request, body, asks, writer)

    async def _chat(self, request: Request) -> Response:
        body: ChatRequest = await self._body(request, ChatRequest)
        prompt = await self._encoded(self._tokenizer.encode_chat, body.conversation())
        rest = max(min(self.limits.max_tokens, self._context - len(prompt)), 1)
        most = body.max_completion_tokens or body.max_tokens or rest
        asks = self._asks(body, [prompt], [most])
        logprobs = body.logprob_count() is not None
        writer = ChatWriter(self.name, self._token_text, logprobs=logprobs)
        return await self._answer(request, body, asks, writer)

    async def _body(self, request: Request, kind: Any) -> Any:
        """The checked request. Refuses before reading more than the limit."""
        if self.draining or not self.worker.is_alive:
            raise ApiError(
                503,
                "the server is shutting down" if self.draining else "the engine has stopped",
                kind="server_error",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        most, read = self.limits.body_bytes, bytearray()
        too_large = ApiError(413, f"the body has more than {most} bytes")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    read += part
                    if len(read) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body took more than {self.limits.body_seconds:g} s") from None
        found = parsed(kind, bytes(read))
        self._check_model(found.model)
        return found

    async def _encoded(self, encode: Callable[[Any], list[int]], given: Any) -> list[int]:
        """Token ids; in another thread, because a long text takes a while."""
        try:
            return await run_in_threadpool(encode, given)
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(400, str(error)) from None

    def _asks(
        self, body: CompletionRequest | ChatRequest, prompts: list[list[int]], lengths: list[int]
    ) -> list[Ask]:
        count = body.n or 1
        if len(prompts) * count > MOST_ANSWERS:
            raise ApiError(400, f"prompts times n must be at most {MOST_ANSWERS}", param="n")
        for prompt, most in zip(prompts, lengths, strict=True):
            self._check_length(len(prompt), most)
        stop, logprobs = body.stops(), body.logprob_count()
        try:
            return [
                Ask(prompt, most, body.sampling(place * count + number), stop, logprobs)
                for place, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))
                for number in range(count)
            ]
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error)) from None

    def _check_length(self, prompt: int, most: int) -> None:
        limit = self.limits.prompt_tokens
        if limit is not None and prompt > limit:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens, the server accepts {limit}",
                code="context_length_exceeded",
            )
        if most > self.limits.max_tokens:
            raise ApiError(
                400,
                f"max_tokens must be at most {self.limits.max_tokens}, got {most}",
                param="max_tokens",
            )
        if prompt + most > self._context:
            raise ApiError(
                400,
                f"a prompt of {prompt} and {most} new tokens exceed the model's context of "
                f"{self._context}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        asks: list[Ask],
        writer: Writer,
    ) -> Response:
        try:
            generation = await self.worker.submit(asks)
        except BusyError:
            raise ApiError(
                429,
                f"{self.worker.active} answers wait or run, the server accepts "
                f"{self.limits.answers}: try again later",
                kind="rate_limit_error",
                code="server_busy",
                headers={"Retry-After": str(RETRY_AFTER)},
            ) from None
        except RefusedError as error:
            raise ApiError(400, str(error)) from None
        except GenerationError as error:
            raise ApiError(500, str(error), kind="server_error") from None
        run = _Run(self, generation, writer, wants_usage=body.wants_usage)
        self.metrics.prompt_tokens += run.prompt_tokens
        if body.stream:
            return _EventStream(run)
        try:
            return JSONResponse(await _unless_disconnected(request, run.whole()))
        except GenerationError as error:
            raise ApiError(500, str(error), kind="server_error") from None
        finally:
            self.worker.release(generation)


class _Run:
    """One generating request: its tokens as a whole answer or as events."""

    def __init__(
        self, service: Service, generation: Generation, writer: Writer, *, wants_usage: bool
    ) -> None:
        self.service, self.generation = service, generation
        self._writer, self._wants_usage = writer, wants_usage
        self._choices = [Choice() for _ in generation.asks]
        self._began = time.perf_counter()
        # Each prompt counts once, however many answers it has.
        self.prompt_tokens = sum(
            len(prompt)
            for prompt in {id(ask.prompt): ask.prompt for ask in generation.asks}.values()
        )

    async def whole(self) -> dict[str, Any]:
        async for _ in self._tokens():
            pass
        return self._writer.whole(self._choices, self._usage())

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events; an error after the first one is an event too."""
        for place in range(len(self._choices)):
            if (chunk := self._writer.first(place)) is not None:
                yield _event(chunk)
        try:
            async for place, token in self._tokens():
                if token.text or token.last or token.logprobs is not None:
                    yield _event(self._writer.chunk(place, token))
            if self._wants_usage:
                yield _event(self._writer.usage_chunk(self._usage()))
        except GenerationError as error:
            yield _event(ApiError(500, str(error), kind="server_error").body)
        yield "data: [DONE]\n\n"

    async def _tokens(self) -> AsyncIterator[tuple[int, Any]]:
        metrics, is_first = self.service.metrics, True
        async for place, token in self.generation.tokens():
            if is_first:
                metrics.first_token.observe(time.perf_counter() - self._began)
                is_first = False
            self._choices[place].add(token)
            yield place, token
        metrics.duration.observe(time.perf_counter() - self._began)

    def _usage(self) -> dict[str, int]:
        new = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }


class _EventStream(StreamingResponse):
    """Sends events; however it ends, also before its first event, the answer is released."""

    def __init__(self, run: _Run) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(run.events(), media_type="text/event-stream", headers=headers)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, generation = self._run.service, self._run.generation
        try:
            await super().__call__(scope, receive, send)
        finally:
            service.worker.release(generation)
            if generation.is_unfinished:
                service.metrics.disconnects += 1


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The result; raises `ClientDisconnect` as soon as the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    sentence = {404: f"there is no {where}", 405: f"{where} is not allowed"}
    message = sentence.get(error.status_code, str(error.detail))
    found = ApiError(error.status_code, message)
    return JSONResponse(found.body, error.status_code, error.headers)


async def _unexpected(_request: Request, _error: Exception) -> Response:
    found = ApiError(500, "an error of the server; see its log", kind="server_error")
    return JSONResponse(found.body, 500)
