"""`trapline generate`: continues a prompt through `Decoder.generate`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trapline.arena.errors import MissingError, UsageError
from trapline.cli.asked import is_written
from trapline.cli.speculate import BONUS, DRAFTED, How, show_statistics, speculation
from trapline.gold.errors import UnsupportedError
from trapline.gold.hub import local_model

EXAMPLE = 'trapline generate "The kernel" --temperature 0.7 --top-p 0.9'
#: Options that only sampling reads, and those that only a beam search reads.
_DRAWING = ("top_k", "top_p", "min_p", "seed")
_RANKING = ("policy", "length_penalty")
#: Errors of the request. A full disk and a closed pipe are not among them.
_MISUSE = (
    *(ValueError, TypeError, MemoryError, UnsupportedError),
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
)


class _Clock:
    """Measures the speed of an answer. The first token includes the prompt and compilation."""

    def __init__(self) -> None:
        self._began, self._first = time.perf_counter(), 0.0

    def note_first(self) -> None:
        self._first = time.perf_counter() - self._began

    def says(self, count: int) -> str:
        seconds = time.perf_counter() - self._began
        if not self._first or count < 2:
            return f"{count} tokens, {count / seconds:.1f} a second"
        rate = (count - 1) / (seconds - self._first)
        return f"{count} tokens, the first after {self._first:.1f} s, then {rate:.1f} a second"


def generate(
    called: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text, or token ids with --ids.")],
    model: Annotated[
        Path | None,
        typer.Option(help="A folder, a GGUF file or a Hub id; by default the demo model."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that make up this share.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens of at least this share of the best.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens in prompt and answer.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Lowers the logits of tokens in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Lowers them once for each time that they occur.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="TOKEN=VALUE, added to a logit; may be repeated.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="The prompt is a user's message: apply the chat template.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Width of a beam search, if above 1.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Length penalty of the beam search.")] = 1.0,
    policy: Annotated[
        Literal["canonical", "hf", "vllm"], typer.Option(help="Rules of the beam search.")
    ] = "canonical",
    eos_id: Annotated[
        list[int] | None,
        typer.Option(help="End token; by default the checkpoint's. May be repeated."),
    ] = None,
    ids: Annotated[bool, typer.Option(help="Prompt and answer are token ids.")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="By default the checkpoint's."),
    ] = None,
    speculate: Annotated[
        How | None, typer.Option(help="Draft tokens ahead; same answer, faster.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter of dflash and ddtree; by default MODEL/drafter.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Drafted tokens per pass.")] = 32,
) -> None:
    """Continue a prompt and print the speed."""
    try:
        from trapline.gold.decoder.answers import Beams
        from trapline.gold.decoder.api import Decoder
        from trapline.gold.decoder.sampling import Sampling
        from trapline.gold.ternary.demo import demo_model
    except ImportError:
        raise MissingError("generation needs torch: trapline[torch]") from None
    try:
        penalties = repetition_penalty, presence_penalty, frequency_penalty, _bias(logit_bias)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, *penalties)
        for sentence in _misunderstandings(called):
            raise UsageError(sentence)
        if chat and ids:
            raise UsageError("--chat takes text: leave --ids out")
        model = local_model(model or demo_model())
        codec = _Ids() if ids else _tokenizer(model)
        try:
            decoder = Decoder.from_pretrained(model, dtype=dtype, device=device)
        except UnsupportedError as error:
            raise MissingError(f"{error}; --device cpu works everywhere") from None
        decoder.tokenizer = codec
        drafting = None
        if speculate is not None:
            place = drafter or _folder(model) / "drafter"
            drafting = speculation(speculate, place, budget, decoder)
        clock = _Clock()
        asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": eos_id or None}
        if beams > 1:
            options["sampling"] = sampling if sampling.changes_logits else None
            count = _search(decoder, asked, Beams(beams, length_penalty, policy), options)
        else:
            options |= {"sampling": sampling, "stop": stop or (), "speculate": drafting}
            count = _stream(decoder.generate(asked, stream=True, **options), clock, drafting)
    except _MISUSE as error:
        raise UsageError(str(error)) from None
    typer.echo(clock.says(count), err=True)


def _misunderstandings(called: typer.Context) -> Iterator[str]:
    """Options that would have no effect."""
    asked, written = called.params, [name for name in called.params if is_written(called, name)]
    drawing = [name for name in _DRAWING if name in written]
    if asked["beams"] > 1:
        if asked["temperature"] > 0:
            drawing.append("temperature")
        if drawing:
            yield f"a beam search does not sample: leave {_options(drawing)} out"
        if asked["stop"]:
            yield "a beam search ends at --eos-id, not at --stop: leave --stop out"
        if asked["speculate"] is not None:
            yield "a beam search cannot speculate: give --speculate or --beams"
    else:
        if ranking := [name for name in _RANKING if name in written]:
            yield f"{_options(ranking)} need a beam search: add --beams"
        if drawing and asked["temperature"] == 0:
            yield f"{_options(drawing)} need sampling: add --temperature"
    if asked["speculate"] is None and "budget" in written:
        yield "--budget needs speculation: add --speculate"
    if asked["drafter"] is not None and asked["speculate"] not in ("dflash", "ddtree"):
        yield "--drafter needs --speculate dflash or ddtree"


def _bias(written: list[str] | None) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for one in written or []:
        token, _, value = one.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UsageError(
                f"--logit-bias must be TOKEN=VALUE, such as 42=-5, got {one}"
            ) from None
    return bias or None


def _options(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _stream(pieces: Iterator[Any], clock: _Clock, drafting: Any) -> int:
    """Prints text as soon as it is final; drafted tokens in one colour, the others in another."""
    count = 0
    for piece in pieces:
        if piece.error is not None:
            raise UsageError(piece.error)
        if not count:
            clock.note_first()
        count += piece.token is not None
        if drafting is None:
            typer.echo(piece.text, nl=False)
        else:
            typer.secho(piece.text, fg=DRAFTED if piece.drafted else BONUS, nl=False)
    typer.echo()
    if drafting is not None:
        show_statistics(drafting.statistics)
    return count


def _search(decoder: Any, prompt: Any, beams: Any, options: dict[str, Any]) -> int:
    """Prints all hypotheses with their scores, best first."""
    if not (options["stop_ids"] or decoder.stop_ids):
        raise UsageError("a beam search needs an end token: --eos-id")
    (answer,) = decoder.generate(prompt, beams=beams, **options)
    if answer.error is not None:
        raise UsageError(answer.error)
    for beam in answer.beams:
        typer.echo(f"{beam.score:9.4f}  {beam.text}")
    return sum(len(beam.tokens) for beam in answer.beams)


class _Ids:
    """Token ids as text."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UsageError(
                f"with --ids the prompt holds token ids, such as '5 6 7'; got {text!r}"
            ) from None

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)


def _folder(model: Path) -> Path:
    """Where the other files of a model lie: its folder, or that of a GGUF file."""
    return model.parent if model.suffix == ".gguf" else model


def _tokenizer(model: Path) -> Any:
    from trapline.gold.decoder.text import Tokenizer

    if not model.exists():
        raise UsageError(f"no such folder or file: {model}")
    folder = _folder(model)
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} has no tokenizer.json; --ids takes token ids instead")
    try:
        return Tokenizer(folder)
    except ImportError:
        raise MissingError("text needs the tokenizers package; --ids works without it") from None
