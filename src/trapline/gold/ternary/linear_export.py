"""One door to every file form of a ternary decoder."""

import shutil
from pathlib import Path

import torch

from trapline.gold.decoder.model import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.ternary import gguf
from trapline.gold.ternary.linear import GROUP, convert, dequantized
from trapline.gold.ternary.linear_gguf import to_gguf
from trapline.gold.ternary.linear_packed import PackedEmbedding, pack_model, save_packed

FORMS = ("packed", *gguf.FORMATS)


def export(
    decoder: Decoder,
    out: Path,
    form: str,
    *,
    group_size: int = GROUP,
    tokenizer: Path | None = None,
) -> None:
    """Writes `decoder`, packed or with dense weights that are ternary already, in one of FORMS."""
    if form not in FORMS:
        raise RangeError(f"the format must be one of {', '.join(FORMS)}, got {form!r}")
    if form != "packed":
        to_gguf(decoder, out, form, tokenizer=tokenizer, group_size=group_size)
        return
    save_packed(packed(decoder, group_size), out)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out / "tokenizer.json")


def packed(decoder: Decoder, group_size: int = GROUP) -> Decoder:
    """A dense decoder with ternary weights on packed ones; refused where that would round."""
    if isinstance(decoder.embedding, PackedEmbedding):
        return decoder
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    convert(decoder, group_size)
    for name, value in dequantized(decoder).named_parameters():
        if not torch.equal(value, before[name]):
            raise RangeError(f"{name} is not ternary in groups of {group_size}: train it first")
    pack_model(decoder)
    return decoder
