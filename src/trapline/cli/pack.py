"""`trapline pack`: a trained ternary model as a small file that this and other tools read."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from trapline.arena import output_paths
from trapline.arena.errors import ArenaError, MissingError, UsageError

EXAMPLE = "trapline pack runs/book/model book.gguf --format q8_0"


def pack(
    model: Annotated[Path, typer.Argument(help="A checkpoint with ternary weights.")],
    out: Annotated[Path, typer.Argument(help="A folder, or a .gguf file for GGUF.")],
    form: Annotated[
        str,
        typer.Option("--format", help="packed, or GGUF: f16, q8_0, tq2_0, q2_0 (of a fork)."),
    ] = "packed",
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Weights per scale, for a dense checkpoint: 128."),
    ] = None,
) -> None:
    """Write a ternary checkpoint with 2 bits per weight, or as GGUF. Weights are stored exactly."""
    if form == "packed":
        output_paths.folder(out, "what is packed")
    else:
        _check_regular(output_paths.file(out, "GGUF"))
    try:
        from trapline.gold.decoder.api import Decoder
        from trapline.gold.decoder.weights import quantisation
        from trapline.gold.ternary import export
        from trapline.gold.ternary.packed_model import METHOD
        from trapline.gold.ternary.quantize import GROUP
    except ImportError:
        raise MissingError("packing needs torch: trapline[torch]") from None
    if group_size is not None and quantisation(model) == METHOD:
        raise UsageError(f"--group-size is for dense checkpoints: {model} knows its own groups")
    try:
        loaded = Decoder.from_pretrained(model)
        _written(export, loaded, out, form, group_size or GROUP, model)
    except ImportError as error:
        raise MissingError(str(error)) from None
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise ArenaError(f"{out} could not be written: {error}") from None
    size = sum(file.stat().st_size for file in [out, *out.rglob("*")] if file.is_file())
    typer.echo(f"{out}: {size:,} bytes")


def _check_regular(out: Path) -> None:
    """Refuses to replace a pipe or a device."""
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is not a regular file, which a GGUF file must be")


def _written(
    export: Any, decoder: Any, out: Path, form: str, group_size: int, source: Path
) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        export.export(decoder, out, form, group_size=group_size, source=source)
    for one in found:
        if issubclass(one.category, UserWarning):
            typer.echo(f"warning: {one.message}", err=True)
