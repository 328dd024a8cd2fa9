"""Writes torch decoders to GGUF files; `Decoder.from_pretrained` reads them."""

from pathlib import Path
from typing import Any

import numpy as np

from trapline.gold.decoder.api import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.ternary import gguf, quantize
from trapline.gold.ternary import pack as storage
from trapline.gold.ternary.layers import TernaryEmbedding, TernaryLinear
from trapline.gold.ternary.packed_model import PackedEmbedding, PackedLinear
from trapline.gold.ternary.quantize import GROUP


def to_gguf(
    decoder: Decoder,
    path: str | Path,
    kind: str,
    *,
    tokenizer: str | Path | None = None,
    group_size: int = GROUP,
) -> None:
    """Writes a packed, latent or dense decoder whose weights are ternary.

    `group_size` applies to dense weights only. Weights that are not ternary raise RangeError:
    rounding them would break the model.
    """
    found = {
        name: _tensor(name, decoder.get_submodule(name), group_size)
        for name in gguf.tensor_names(decoder.config)
    }
    text = None if tokenizer is None else Path(tokenizer)
    gguf.write(Path(path), decoder.config, found, kind, text)


def _tensor(name: str, module: Any, group_size: int) -> gguf.Tensor:
    if isinstance(module, PackedLinear | PackedEmbedding):
        plane = module.codes.cpu().numpy()
        codes = storage.unpack(plane, (plane.shape[0], module.columns))
        return gguf.Tensor(None, codes, module.scales.cpu().numpy(), module.group_size)
    if isinstance(module, TernaryLinear | TernaryEmbedding):
        codes, scales = (part.cpu().numpy() for part in module.ternary())
        return gguf.Tensor(None, codes, scales, module.group_size)
    weight = module.weight.detach().float().cpu().numpy()
    if weight.ndim < 2:
        return gguf.Tensor(weight)
    return _dense(name, weight, group_size)


def _dense(name: str, weight: np.ndarray, group_size: int) -> gguf.Tensor:
    codes, scales = quantize.ternarize(weight, group_size, "absmean")
    if not np.array_equal(quantize.dequantize(codes, scales, group_size), weight):
        raise RangeError(
            f"{name} is not ternary in groups of {group_size}: train the model first, rounding it"
            " would break it"
        )
    return gguf.Tensor(None, codes, scales, group_size)
