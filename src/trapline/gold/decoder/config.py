"""What a checkpoint's `config.json` says, in our words."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trapline.gold.errors import RangeError

Family = Literal["llama", "mistral", "qwen3", "gpt2"]
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and how they are stretched.

    `dynamic` stretches only beyond the model's context, where no sequence of ours goes.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    #: Of `llama3`: waves this many times in the original context are long, or short.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Of `yarn`: turns in the original context between which stretching sets in; cosine and sine
    #: are multiplied by `attention_factor`.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


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
    #: Layers that see everything in spite of the window.
    full_layers: tuple[int, ...] = ()
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window


def read_config(folder: Path) -> DecoderConfig:
    """`config.json` of a Hugging Face checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise RangeError(f"{path} is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RangeError(f"{path} holds no configuration")
    return from_dict(raw)


def from_dict(raw: dict[str, Any]) -> DecoderConfig:
    """The same from the parsed file."""
    family = raw.get("model_type")
    if family not in ("llama", "mistral", "qwen3", "gpt2"):
        raise RangeError(f"model_type {family!r} is none of llama, mistral, qwen3, gpt2")
    try:
        config = _gpt2(raw) if family == "gpt2" else _llama_like(raw)
    except KeyError as missing:
        raise RangeError(f"the configuration of a {family} has no {missing}") from None
    if config.heads % config.kv_heads:
        raise RangeError(f"{config.heads} heads do not share {config.kv_heads} key/value heads")
    if config.head_dim % 2:
        # Kernels go through the two halves of a head at once, whether they turn it or not.
        raise RangeError(f"heads of {config.head_dim}: only even widths are served")
    return config


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A count: what is no positive integer would fail far from here, or not at all."""
    found = default if default is not None and not raw.get(key) else raw[key]
    if type(found) is not int or found < 1:
        raise RangeError(f"{key} must be a positive integer, got {found!r}")
    return found


def _real(raw: dict[str, Any], key: str, default: float) -> float:
    found = default if raw.get(key) is None else raw[key]
    if type(found) not in (int, float):
        raise RangeError(f"{key} must be a number, got {found!r}")
    return float(found)


def _gpt2(raw: dict[str, Any]) -> DecoderConfig:
    dim, heads = _size(raw, "n_embd"), _size(raw, "n_head")
    if dim % heads:
        raise RangeError(f"n_embd {dim} does not divide into {heads} heads")
    if raw.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise RangeError(f"activation {raw['activation_function']!r} is not gelu_new")
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise RangeError("a GPT-2 that scales its scores otherwise than by 1/√D")
    return DecoderConfig(
        family="gpt2",
        vocab=_size(raw, "vocab_size"),
        dim=dim,
        layers=_size(raw, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        hidden=_size(raw, "n_inner", 4 * dim),
        context=_size(raw, "n_positions"),
        norm_eps=_real(raw, "layer_norm_epsilon", 1e-5),
        tied=raw.get("tie_word_embeddings", True),
        rope=None,
        attention_bias=True,
        mlp_bias=True,
    )


def _llama_like(raw: dict[str, Any]) -> DecoderConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise RangeError(f"activation {raw['hidden_act']!r} is not silu")
    heads, dim = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    window, full_layers = _window(raw)
    return DecoderConfig(
        family=raw["model_type"],
        vocab=_size(raw, "vocab_size"),
        dim=dim,
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(raw, "num_key_value_heads", heads),
        head_dim=_size(raw, "head_dim", dim // heads),
        hidden=_size(raw, "intermediate_size"),
        context=_size(raw, "max_position_embeddings"),
        norm_eps=_real(raw, "rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        rope=_rope(raw),
        window=window,
        full_layers=full_layers,
        qk_norm=raw["model_type"] == "qwen3",
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )


def _window(raw: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers without it: Mistral slides everywhere, Qwen3 where it says so."""
    if not raw.get("sliding_window") or raw["model_type"] == "llama":
        return None, ()
    window, layers = _size(raw, "sliding_window"), _size(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if raw["model_type"] == "qwen3":
        if not raw.get("use_sliding_window"):
            return None, ()
        kinds = kinds or _after(raw.get("max_window_layers", 28), layers)
    kinds = kinds or ["sliding_attention"] * layers
    if len(kinds) != layers:
        raise RangeError(f"layer_types names {len(kinds)} layers, there are {layers}")
    full = tuple(i for i, kind in enumerate(kinds) if kind != "sliding_attention")
    return (None, ()) if len(full) == layers else (window, full)


def _after(first: int, layers: int) -> list[str]:
    """Qwen's older files: layers from the first one on slide."""
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Older files say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise RangeError(f"the scaling of rotary positions is no table: {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise RangeError(f"rope_type {kind!r} is none of {', '.join(ROPE_KINDS)}")
    original = scaling.get("original_max_position_embeddings")
    if original is None and kind == "yarn":
        original = raw["max_position_embeddings"]
    factor = _real(scaling, "factor", 1.0)
    return RopeConfig(
        theta=_real(scaling, "rope_theta", _real(raw, "rope_theta", 10_000.0)),
        kind=kind,
        factor=factor,
        original_context=original or 8192,
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=scaling.get("truncate", True),
    )


def _attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN sharpens attention with the stretch: 1 + 0.1 · mscale · ln(factor), or as it is told."""

    def growth(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    scale, for_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return growth(scale) / growth(for_all) if scale and for_all else growth(1.0)
