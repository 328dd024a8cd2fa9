"""Whether the file that a ternary run leaves is the model that was judged."""

from pathlib import Path
from typing import Any

import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.ternary.packed_linear import unpacked
from trapline.gold.ternary.packed_model import pack_model, packed_bytes, save_packed
from trapline.gold.ternary.training.model import DecoderLM
from trapline.gold.ternary.training.tokenizer import save_tokenizer
from trapline.gold.ternary.training.trainer import Trainer

#: Held-out windows on which the exported file is compared with the model in memory.
COMPARED = 32


def exported(trainer: Trainer, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Writes the packed file and judges what is read back from it, by the same code."""
    model: Any = trainer.model
    trainer.valid = trainer.valid[:COMPARED]
    memory = _plain_loss(trainer, DecoderLM(model.decoder))
    packed = pack_model(model.decoder.cpu())
    save_packed(packed, folder)
    save_tokenizer(tokenizer, folder)
    gap = _plain_loss(trainer, DecoderLM(_read_back(folder))) - memory
    return {"gap of the exported file": gap, "packed bytes": packed_bytes(packed)}


def _plain_loss(trainer: Trainer, model: DecoderLM) -> float:
    """The held-out loss by code that is not compiled, so that equal weights give equal sums."""
    trainer.model = model.to(trainer.device)
    return trainer.valid_loss()


def _read_back(folder: Path) -> Decoder:
    """A decoder with plain float32 matrices, made from the packed file alone."""
    decoder = Decoder.from_pretrained(folder)
    plain = Decoder(decoder.config)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            part: Any = decoder.get_submodule(name)
            weight = unpacked(part.codes, part.scales, part.columns, part.group_size)
            module.weight.data.copy_(weight)
    own = dict(decoder.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in own:
            parameter.data.copy_(own[name])
    return plain
