"""Writes torch decoders to GGUF files and reads them back."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.rope_config import RopeConfig
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


def from_gguf(path: str | Path) -> Decoder:
    """Reads a file as a dense decoder, with the `gguf` package."""
    reader = _open(Path(path))
    tensors = {one.name: one for one in reader.tensors}
    decoder = Decoder(_config(reader, tensors))
    dequantize = gguf.package().quants.dequantize
    with torch.no_grad():
        for ours, theirs in gguf.tensor_names(decoder.config).items():
            if theirs not in tensors:
                raise RangeError(f"{path} has no tensor {theirs}")
            stored = tensors[theirs]
            values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
            weight = decoder.get_submodule(ours).weight
            assert isinstance(weight, nn.Parameter)
            weight.copy_(torch.from_numpy(_turned_back(ours, values, decoder.config)))
    return decoder.eval()


def _open(path: Path) -> Any:
    if not path.is_file():
        raise RangeError(f"{path} is not a file")
    try:
        return gguf.package().GGUFReader(path)
    except ValueError as error:
        said = str(error)
        if f"{gguf.FORK_Q2_0}" in said and "GGMLQuantizationType" in said:
            said = "it holds q2_0, whose name has two meanings; write it as f16, q8_0 or tq2_0"
        raise RangeError(f"{path} cannot be read: {said}") from None


def _config(reader: Any, tensors: dict[str, Any]) -> DecoderConfig:
    family = _text(reader, "general.architecture")
    if family not in ("llama", "qwen3"):
        raise RangeError(f"architecture {family!r} is none of llama, qwen3")

    def number(key: str) -> Any:
        field = reader.fields[f"{family}.{key}"]
        return field.parts[field.data[0]][0].item()

    return DecoderConfig(
        family=family,  # type: ignore[arg-type]
        vocab=int(tensors["token_embd.weight"].shape[1]),
        dim=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        head_dim=number("attention.key_length"),
        hidden=number("feed_forward_length"),
        context=number("context_length"),
        # Stored as float32: rounded back to the original decimal.
        norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        tied="output.weight" not in tensors,
        rope=RopeConfig(theta=number("rope.freq_base")),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _text(reader: Any, key: str) -> str:
    field = reader.fields[key]
    return bytes(field.parts[field.data[0]]).decode()


def _turned_back(name: str, values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    heads = {"attention.q": config.heads, "attention.k": config.kv_heads}
    part = next((heads[end] for end in heads if name.endswith(end)), None)
    if config.family == "qwen3" or part is None:
        return values
    order = gguf.interleaved(part, config.head_dim)
    back = np.empty_like(values)
    back[order] = values
    return back
