"""Writes a ternary decoder in any of its file formats."""

import shutil
from pathlib import Path

import torch

from trapline.gold.atomic_write import write_folder
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.text import end_ids, save_ends
from trapline.gold.decoder.weights import INDEX, quantisation
from trapline.gold.errors import RangeError
from trapline.gold.ternary import gguf
from trapline.gold.ternary.gguf_decoder import to_gguf
from trapline.gold.ternary.layers import convert, dequantized
from trapline.gold.ternary.packed_model import METHOD, PackedEmbedding, pack_model, save_packed
from trapline.gold.ternary.quantize import GROUP

FORMS = ("packed", *gguf.FORMATS)
#: The files of a packed model.
_FILES = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}


def export(
    decoder: Decoder,
    out: str | Path,
    form: str,
    *,
    group_size: int = GROUP,
    source: str | Path | None = None,
) -> None:
    """Writes `decoder`, packed or with dense weights that are ternary already, in one of FORMS.

    The tokeniser and end tokens of `source`, its checkpoint, are written too.
    """
    out, source = Path(out), None if source is None else Path(source)
    if form not in FORMS:
        raise RangeError(f"the format must be one of {', '.join(FORMS)}, got {form!r}")
    if form != "packed":
        to_gguf(decoder, out, form, tokenizer=_tokenizer(source), group_size=group_size)
        return
    _check_replaceable(out, source)
    small = packed(decoder, group_size)

    def save(folder: Path) -> None:
        save_packed(small, folder)
        if source is not None:
            if (tokenizer := _tokenizer(source)) is not None:
                shutil.copyfile(tokenizer, folder / "tokenizer.json")
            save_ends(folder, end_ids(source))

    write_folder(out, save)


def _check_replaceable(out: Path, source: Path | None) -> None:
    """Raises unless `out` is new or a packed model: the folder is replaced as a whole."""
    if source is not None and out.resolve() == source.resolve():
        raise RangeError(f"{out} is the checkpoint itself: choose another folder")
    if out.resolve() == Path.cwd():
        raise RangeError(f"{out} is the folder that you work in: choose another folder")
    if out.is_file():
        raise RangeError(f"{out} is a file; a packed model is a folder")
    if (out / INDEX).exists():
        raise RangeError(f"{out} holds a checkpoint of several files: choose another folder")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    strange = [name for name in found if name not in _FILES]
    if strange:
        raise RangeError(f"{out} holds {strange[0]}, no packed model alone: choose another folder")
    # A dense model has the same file names.
    if found and quantisation(out) != METHOD:
        raise RangeError(f"{out} holds no packed model: choose another folder")


def _tokenizer(source: Path | None) -> Path | None:
    place = None if source is None else source / "tokenizer.json"
    return place if place is not None and place.is_file() else None


def packed(decoder: Decoder, group_size: int = GROUP) -> Decoder:
    """Packs a dense decoder; raises RangeError where its weights are not exactly ternary."""
    if isinstance(decoder.embedding, PackedEmbedding):
        return decoder
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    convert(decoder, group_size)
    for name, value in dequantized(decoder).named_parameters():
        if not torch.equal(value, before[name]):
            raise RangeError(f"{name} is not ternary in groups of {group_size}: train it first")
    pack_model(decoder)
    return decoder
