"""`trapline generate`: a checkpoint at work, greedy, sampled or with beams."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

from trapline.arena.errors import MissingError, UsageError
from trapline.cli.asked import is_written
from trapline.cli.speculate import How, Speculation
from trapline.cli.speculate import speculate as show_speculation
from trapline.gold.errors import UnsupportedError

#: What --temperature draws by, and what --beams are ranked by.
_DRAWING = ("top_k", "top_p", "min_p", "seed")
_RANKING = ("policy", "length_penalty")
#: What is wrong with what was asked. A full disk, or a reader that has enough, misuses nothing.
_MISUSE = (
    *(ValueError, TypeError, MemoryError, UnsupportedError),
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    example = 'trapline generate "The kernel" --temperature 0.7 --top-p 0.9'
    app.command(epilog=f"Example: {example}")(generate)


class Words(Protocol):
    """Between what the user reads and what the model reads."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True)
class _Task:
    """What every way of generating needs."""

    decoder: Any
    words: Words
    prompt: list[int]
    most: int
    ends: list[int]


class _Clock:
    """How fast an answer came. The first token has the prompt in it, and code that is compiled."""

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
    prompt: Annotated[str, typer.Argument(help="Text; or token ids with --ids.")],
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint folder; the demo model if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Of at least this share of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same draws again.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeat it.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="More than 1: beam search.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of the beam search.")] = 1.0,
    policy: Annotated[
        Literal["canonical", "hf", "vllm"], typer.Option(help="Whose beam search.")
    ] = "canonical",
    eos_id: Annotated[
        list[int] | None, typer.Option(help="An end; the checkpoint's own if not given. Repeat it.")
    ] = None,
    ids: Annotated[bool, typer.Option(help="Prompt and answer are token ids.")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The checkpoint's own if not given."),
    ] = None,
    speculate: Annotated[
        How | None, typer.Option(help="Draft ahead; the answer stays the same, only faster.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Of dflash and ddtree; MODEL/drafter if not given.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Drafted tokens a pass.")] = 32,
) -> None:
    """Continue a prompt and say how fast."""
    try:
        from trapline.gold.decoder.sampling import Sampling
        from trapline.gold.ternary.demo import demo_model
    except ImportError:
        raise MissingError("generation needs torch: trapline[torch]") from None
    try:
        way = Sampling(temperature, top_k, top_p, min_p, seed)
        for sentence in _misunderstandings(called):
            raise UsageError(sentence)
        model = model or demo_model()
        words: Words = _Ids() if ids else _text(model)
        task = _Task(
            _load(model, device, dtype),
            words,
            words.encode(prompt),
            max_new_tokens,
            _ends(model, eos_id),
        )
        clock = _Clock()
        if beams > 1:
            count = _beams(task, beams, length_penalty, policy)
        elif speculate is not None:
            count = show_speculation(
                Speculation(speculate, drafter, budget),
                task.decoder,
                model,
                task.prompt,
                decode=words.decode,
                max_new_tokens=max_new_tokens,
                stop_ids=task.ends,
                stop_texts=stop or [],
                sampling=way,
            )
        else:
            count = _stream(task, way, stop or [], clock)
    except _MISUSE as error:
        raise UsageError(str(error)) from None
    typer.echo(clock.says(count), err=True)


def _misunderstandings(called: typer.Context) -> Iterator[str]:
    """Options that would change nothing: nobody can have wished for that."""
    asked, written = called.params, [name for name in called.params if is_written(called, name)]
    drawing = [name for name in _DRAWING if name in written]
    if asked["beams"] > 1:
        if asked["temperature"] > 0:
            drawing.append("temperature")
        if drawing:
            yield f"beams are not drawn: leave {_options(drawing)} out"
        if asked["stop"]:
            yield "a beam search ends at --eos-id, not at --stop"
        if asked["speculate"] is not None:
            yield "beams are not drafted: --speculate or --beams"
    else:
        if ranking := [name for name in _RANKING if name in written]:
            yield f"beams are ranked by {_options(ranking)}: add --beams"
        if drawing and asked["temperature"] == 0:
            yield f"tokens are drawn by {_options(drawing)}: add --temperature"
    if asked["speculate"] is None and "budget" in written:
        yield "--budget is for drafted tokens: add --speculate"
    if asked["drafter"] is not None and asked["speculate"] not in ("dflash", "ddtree"):
        yield "--drafter is for --speculate dflash and ddtree"


def _options(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _load(folder: Path, device: str, dtype: str | None) -> Any:
    from trapline.gold.decoder.api import Decoder

    try:
        return Decoder.from_pretrained(folder, dtype=dtype, device=device)
    except UnsupportedError as error:
        raise MissingError(f"{error}; --device cpu works everywhere") from None


def _ends(folder: Path, given: list[int] | None) -> list[int]:
    from trapline.gold.decoder.text import end_ids

    return given or end_ids(folder)


def _stream(task: _Task, way: Any, stops: list[str], clock: _Clock) -> int:
    """Text as soon as it is certain."""
    from trapline.gold.decoder.generate import stream

    count = 0
    for token in stream(
        task.decoder,
        [task.prompt],
        max_new_tokens=task.most,
        stop_ids=task.ends,
        sampling=way,
        decode=task.words.decode,
        stop_texts=stops,
    ):
        if not count:
            clock.note_first()
        typer.echo(token.text, nl=False)
        count += 1
    typer.echo()
    return count


def _beams(task: _Task, width: int, penalty: float, policy: Any) -> int:
    """All finished hypotheses, best first, with their scores."""
    from trapline.gold.decoder import beams

    if not task.ends:
        raise UsageError("beam search needs an end token: --eos-id")
    (found,) = beams.search(
        task.decoder,
        [task.prompt],
        beam_width=width,
        max_new_tokens=task.most,
        eos_id=task.ends,
        length_penalty=penalty,
        policy=policy,
    )
    for beam in found:
        typer.echo(f"{beam.score:9.4f}  {task.words.decode(list(beam.tokens))}")
    return sum(len(beam.tokens) for beam in found)


class _Ids:
    """Token ids as text."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UsageError("with --ids the prompt is a list of integers") from None

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)


def _text(folder: Path) -> Words:
    """The checkpoint's own tokeniser."""
    from trapline.gold.decoder.text import Tokenizer

    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} has no tokenizer.json; --ids takes token ids instead")
    try:
        return Tokenizer(folder)
    except ImportError:
        raise MissingError("text needs the tokenizers package; --ids works without") from None
