"""Reads GGUF files as dense decoders, with the `gguf` package.

Every type that the package can dequantise is read: F32, F16, BF16, Q8_0, Q4_0, TQ2_0 and others.
Architectures: llama (also Mistral's), qwen2, qwen3.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trapline.gold.decoder.config import DecoderConfig, from_dict
from trapline.gold.decoder.gguf_format import FORK_Q2_0, interleaved, package
from trapline.gold.decoder.rope import frequencies
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.errors import RangeError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REST = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: Factors of the rotary frequencies, which Llama 3.1 and later have.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufModel(NamedTuple):
    """The contents of a file, with the tensor names of a Hugging Face checkpoint."""

    config: DecoderConfig
    tensors: dict[str, Tensor]


def read_gguf(path: Path, dtype: torch.dtype | None = None) -> GgufModel:
    """Configuration and dequantised tensors, in float32 by default."""
    reader = _open(path)
    stored = {one.name: one for one in reader.tensors}
    config = _config(_Fields(reader), stored)
    tensors: dict[str, Tensor] = {}
    for name, one in stored.items():
        if name != _ROPE_FACTORS:
            values = _with_halves(name, _values(path, one), config)
            tensors[_their_name(path, name)] = torch.from_numpy(values).to(dtype or torch.float32)
    return GgufModel(config, tensors)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise RangeError(f"{path} is not a file")
    try:
        return package().GGUFReader(path)
    except ValueError as error:
        said = str(error)
        if f"{FORK_Q2_0}" in said and "GGMLQuantizationType" in said:
            said = "it holds q2_0, whose name has two meanings; write it as f16, q8_0 or tq2_0"
        raise RangeError(f"{path} cannot be read: {said}") from None


def _values(path: Path, stored: Any) -> np.ndarray:
    try:
        values = package().quants.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise RangeError(
            f"{path} holds {stored.name} as {kind}, which the gguf package cannot read; "
            "convert the file to Q8_0 or F16"
        ) from None
    return np.array(values, dtype=np.float32)


def _their_name(path: Path, name: str) -> str:
    if name in _REST:
        return _REST[name]
    first, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    inner, _, end = part.rpartition(".")
    if first != "blk" or inner not in _LAYER:
        raise RangeError(f"{path} has a tensor {name}, which no supported architecture has")
    return f"model.layers.{number}.{_LAYER[inner]}.{end}"


def _with_halves(name: str, values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Rows in our order: llama.cpp rotates neighbouring elements of a Llama's head, we halves."""
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(name.split(".")[-2])
    if heads is None or config.family not in ("llama", "mistral"):
        return values
    back = np.empty_like(values)
    back[interleaved(heads, config.head_dim)] = values
    return back


class _Fields:
    """The metadata of a file by name."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """A number or a text; a list whose entries are equal counts as one number."""
        field = self._fields.get(key)
        if field is None:
            return default
        parts = [field.parts[place] for place in field.data]
        if field.types[-1].name == "STRING":
            return bytes(parts[0]).decode()
        values = {part[0].item() for part in parts}
        if len(values) != 1:
            raise RangeError(f"{key} must be the same for all layers, got {sorted(values)}")
        return values.pop()


def _config(fields: _Fields, tensors: dict[str, Any]) -> DecoderConfig:
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise RangeError(f"architecture {family!r} is none of {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in tensors:
        raise RangeError("the file has no tensor token_embd.weight")
    if fields.get(f"{family}.expert_count"):
        raise RangeError("GGUF files with experts are not supported; use the original checkpoint")

    def of(key: str, default: Any = None) -> Any:
        return fields.get(f"{family}.{key}", default)

    heads, window = of("attention.head_count"), of("attention.sliding_window")
    raw = {
        "model_type": "mistral" if family == "llama" and window else family,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("attention.key_length"),
        "intermediate_size": of("feed_forward_length"),
        "max_position_embeddings": of("context_length"),
        # Stored as float32: rounded back to the original decimal.
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "rope_scaling": _rope(of, tensors),
    }
    return from_dict(raw)


def _rope(of: Callable[..., Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions as in `config.json`."""
    theta = of("rope.freq_base", RopeConfig.theta)
    if _ROPE_FACTORS in tensors:
        return _llama3(theta, np.array(tensors[_ROPE_FACTORS].data, dtype=np.float32))
    kind = of("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_theta": theta}
    found = {"rope_theta": theta, "rope_type": kind, "factor": of("rope.scaling.factor")}
    original = of("rope.scaling.original_context_length")
    return found if original is None else found | {"original_max_position_embeddings": original}


def _llama3(theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's positions; the file holds only the factors, so the usual settings are tried."""
    rope = RopeConfig(theta, "llama3", float(factors.max()), 8192)
    width = 2 * len(factors)
    plain = frequencies(RopeConfig(theta), width)
    made = (plain / frequencies(rope, width)).numpy()
    if not np.allclose(made, factors, rtol=1e-4):
        raise RangeError("rope_freqs.weight holds factors that are not those of Llama 3.1 or later")
    return {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
    }
