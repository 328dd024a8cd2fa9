"""What a checkpoint's `config.json` says, in our words."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trapline.gold.errors import RangeError

Family = Literal["llama", "mistral", "qwen3", "gpt2"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and how they are stretched."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of one model."""

    family: Family
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    context: int
    norm_eps: float
    tied: bool
    rope: RopeConfig | None
    window: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"


def read_config(folder: Path) -> DecoderConfig:
    """`config.json` of a Hugging Face checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    return from_dict(json.loads(path.read_text()))


def from_dict(raw: dict[str, Any]) -> DecoderConfig:
    """The same from the parsed file."""
    family = raw.get("model_type")
    if family == "gpt2":
        return _gpt2(raw)
    if family in ("llama", "mistral", "qwen3"):
        return _llama_like(raw)
    raise RangeError(f"model_type {family!r} is none of llama, mistral, qwen3, gpt2")


def _gpt2(raw: dict[str, Any]) -> DecoderConfig:
    dim, heads = raw["n_embd"], raw["n_head"]
    if raw.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise RangeError(f"activation {raw['activation_function']!r} is not gelu_new")
    return DecoderConfig(
        family="gpt2",
        vocab=raw["vocab_size"],
        dim=dim,
        layers=raw["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        hidden=raw.get("n_inner") or 4 * dim,
        context=raw["n_positions"],
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        tied=raw.get("tie_word_embeddings", True),
        rope=None,
        attention_bias=True,
        mlp_bias=True,
    )


def _llama_like(raw: dict[str, Any]) -> DecoderConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise RangeError(f"activation {raw['hidden_act']!r} is not silu")
    heads = raw["num_attention_heads"]
    return DecoderConfig(
        family=raw["model_type"],
        vocab=raw["vocab_size"],
        dim=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        hidden=raw["intermediate_size"],
        context=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        rope=_rope(raw),
        window=_window(raw),
        qk_norm=raw["model_type"] == "qwen3",
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )


def _window(raw: dict[str, Any]) -> int | None:
    """Mistral slides in every layer when it has a window; Qwen3 only where it says so."""
    window = raw.get("sliding_window")
    if raw["model_type"] == "mistral":
        return window
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if raw["model_type"] == "qwen3" and raw.get("use_sliding_window") and window:
        if kinds != {"sliding_attention"}:
            raise RangeError("layers with and without a sliding window in one model")
        return int(window)
    return None


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Older files say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise RangeError(f"rope_type {kind!r} is none of default, linear, llama3")
    return RopeConfig(
        theta=scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        kind=kind,
        factor=scaling.get("factor", 1.0),
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        original_context=scaling.get("original_max_position_embeddings", 8192),
    )
