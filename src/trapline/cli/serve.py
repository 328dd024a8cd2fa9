"""`trapline serve`: an OpenAI-compatible server over one model."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trapline.arena.errors import MissingError, UsageError
from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import UnsupportedError
from trapline.gold.hub import is_hub_id

EXAMPLE = "trapline serve --model ./checkpoint --port 8000"
#: The variable that holds the API key, so that it is in no list of processes.
KEY = "TRAPLINE_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MISUSE = (
    *(ValueError, TypeError, MemoryError),
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
)


def serve(
    model: Annotated[
        Path | None,
        typer.Option(help="A folder, a GGUF file or a Hub id; by default the demo model."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; by default its folder's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port.")] = 8000,
    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file; by default the checkpoint's template.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers that run at once.")] = 32,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=16, help="Tokens of all caches; by default ROWS whole contexts, ≤ 65,536."
        ),
    ] = None,
    max_answers: Annotated[
        int, typer.Option(min=1, help="Answers that wait or run; more are refused with 429.")
    ] = 512,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; by default the model's context.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request in bytes.")] = 1 << 20,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that running answers get after a signal.")
    ] = 30,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="By default the checkpoint's."),
    ] = None,
) -> None:
    """Serve completions and chats with OpenAI's API until interrupted.

    If TRAPLINE_API_KEY is set, clients must send it as their API key.
    """
    try:
        from trapline.gold.decoder.api import Decoder
        from trapline.gold.decoder.engine import Engine
        from trapline.gold.decoder.generate import PAGE
        from trapline.gold.serve.app import Limits, Service
        from trapline.gold.serve.server import Server, bound
        from trapline.gold.ternary.demo import demo_model
    except ImportError as error:
        raise MissingError(f"serving needs {error.name}: trapline[torch,serve]") from None
    key = _key(host)
    try:
        decoder = Decoder.from_pretrained(model or demo_model(), dtype=dtype, device=device)
        _set_template(decoder, chat_template)
        context = decoder.config.context
        pages = cdiv(cache_tokens or min(rows * context, max(65_536, context)), PAGE)
        engine = Engine(decoder, rows=rows, pages=pages, page_size=PAGE, share_prefixes=True)
        limits = Limits(max_prompt, max_tokens, max_body, answers=max_answers)
        called = name or _name(model)
        service = Service(decoder, engine, name=called, limits=limits, api_key=key)
    except UnsupportedError as error:
        raise MissingError(f"{error}; --device cpu works everywhere") from None
    except _MISUSE as error:
        raise UsageError(str(error)) from None
    try:
        listening = bound(host, port)
    except OSError as error:
        raise UsageError(f"{host}:{port} cannot be used: {error.strerror or error}") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"{called} at http://{shown}:{listening.getsockname()[1]}/v1", flush=True)
    with listening:
        Server(service, grace=grace).run(sockets=[listening])


def _name(model: Path | None) -> str:
    """A Hub id as it is; of a path, the last part."""
    if model is None:
        return "trapline-demo"
    return str(model) if is_hub_id(model) else model.resolve().name


def _key(host: str) -> str | None:
    key = os.environ.get(KEY)
    if key is not None and not key.strip():
        raise UsageError(f"{KEY} is empty: unset it, or give a key")
    if key is None and host not in _LOOPBACK:
        typer.echo(f"warning: {KEY} is not set: everyone who reaches {host} may ask", err=True)
    return None if key is None else key.strip()


def _set_template(decoder: Any, path: Path | None) -> None:
    if path is None:
        return
    from trapline.gold.decoder.chat import ChatTemplate

    if decoder.tokenizer is None:
        raise ValueError("a chat template needs a checkpoint with a tokenizer.json")
    decoder.tokenizer.chat_template = ChatTemplate(path.read_text(encoding="utf-8"))
