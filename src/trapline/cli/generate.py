"""`trapline generate`: a checkpoint at work, greedy, sampled or with beams."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trapline.arena.errors import MissingError, UsageError


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    example = 'trapline generate --model ./checkpoint "Once upon a time" --temperature 0.8'
    app.command(epilog=f"Example: {example}")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text; or token ids with --ids.")],
    model: Annotated[Path, typer.Option(help="A Hugging Face checkpoint folder.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same draws again.")] = 0,
    beams: Annotated[int, typer.Option(min=1, help="More than 1: beam search.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of the beam search.")] = 1.0,
    eos_id: Annotated[int | None, typer.Option(help="The tokeniser's if not given.")] = None,
    ids: Annotated[bool, typer.Option(help="Prompt and answer are token ids.")] = False,
) -> None:
    """Continue a prompt and say how fast."""
    try:
        from trapline.gold.decoder.model import Decoder
    except ImportError:
        raise MissingError("generation needs torch: trapline[torch]") from None
    try:
        decoder = Decoder.from_pretrained(model)
        text = _Ids() if ids else _Text(model)
        tokens = text.encode(prompt)
        end = text.eos if eos_id is None else eos_id
        started = time.perf_counter()
        if beams > 1:
            count = _beams(decoder, tokens, text, max_new_tokens, beams, length_penalty, end)
        else:
            way = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
            count = _stream(decoder, tokens, text, max_new_tokens, way, end)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(str(error)) from None
    seconds = time.perf_counter() - started
    typer.echo(f"{count} tokens, {count / seconds:.1f} a second", err=True)


def _stream(
    decoder: Any, tokens: list[int], text: Any, most: int, way: dict[str, Any], end: int | None
) -> int:
    from trapline.gold.decoder.generate import stream
    from trapline.gold.decoder.sampling import Sampling

    stops = [] if end is None else [end]
    made: list[int] = []
    shown = ""
    for token in stream(
        decoder, [tokens], max_new_tokens=most, stop_ids=stops, sampling=Sampling(**way)
    ):
        made.append(token.token)
        whole = text.decode(made)
        typer.echo(whole[len(shown) :], nl=False)
        shown = whole
    typer.echo()
    return len(made)


def _beams(
    decoder: Any,
    tokens: list[int],
    text: Any,
    most: int,
    width: int,
    penalty: float,
    end: int | None,
) -> int:
    from trapline.gold.beam_search.api import beam_search
    from trapline.gold.decoder.generate import BeamModel

    if end is None:
        raise UsageError("beam search needs an end token: --eos-id")
    (found,) = beam_search(
        BeamModel(decoder),
        [tokens],
        beam_width=width,
        max_new_tokens=most,
        eos_id=end,
        length_penalty=penalty,
    )
    for hypothesis in found:
        typer.echo(f"{hypothesis.score:9.4f}  {text.decode(list(hypothesis.tokens))}")
    return sum(len(hypothesis.tokens) for hypothesis in found)


class _Ids:
    """Token ids as text."""

    eos: int | None = None

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UsageError("with --ids the prompt is a list of integers") from None

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class _Text:
    """The checkpoint's own tokeniser."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise UsageError(f"{folder} has no tokenizer.json; --ids takes token ids instead")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingError("text needs the tokenizers package; --ids works without") from None
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos = self._tokenizer.token_to_id("</s>")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))
