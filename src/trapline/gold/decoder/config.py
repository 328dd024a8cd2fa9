"""`config.json` of a Hugging Face checkpoint as a `DecoderConfig`."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trapline.gold.errors import RangeError

Family = Literal["llama", "mistral", "qwen3", "gpt2"]
_SLIDING = "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
#: Defaults of a family for keys that are missing from the file (not for keys that are null).
_UNSAID: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and how they are stretched.

    `dynamic` stretches only beyond the model's context, which sequences here never exceed.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    #: Of `llama3`: periods in the original context below which waves are long, above which short.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Of `yarn`: rotations in the original context between which stretching ramps up; cosine and
    #: sine are multiplied by `attention_factor`.
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
    #: Layers with full attention in spite of `window`.
    full_layers: tuple[int, ...] = ()
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    #: Special tokens that the file names; several may end a text.
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window


def read_config(folder: str | Path) -> DecoderConfig:
    """`config.json` of a Hugging Face checkpoint."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a checkpoint: it has no config.json")
    return from_dict(read_table(path))


def from_dict(raw: dict[str, Any]) -> DecoderConfig:
    """The configuration from the parsed file."""
    family = raw.get("model_type")
    if family not in ("llama", "mistral", "qwen3", "gpt2"):
        raise RangeError(f"model_type must be llama, mistral, qwen3 or gpt2, got {family!r}")
    try:
        config = _gpt2(raw) if family == "gpt2" else _llama_like({**_UNSAID[family], **raw})
        config = replace(config, **_special_tokens(raw))
    except KeyError as missing:
        raise RangeError(f"the configuration of a {family} has no {missing}") from None
    if config.heads % config.kv_heads:
        raise RangeError(
            f"heads must be a multiple of key/value heads, got {config.heads} and {config.kv_heads}"
        )
    if config.head_dim % 2:
        # Kernels process the two halves of a head together.
        raise RangeError(f"head_dim must be even, got {config.head_dim}")
    return config


def _special_tokens(raw: dict[str, Any]) -> dict[str, Any]:
    def ids(key: str) -> tuple[int, ...]:
        found = raw.get(key)
        several = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(one) is int for one in several):
            raise RangeError(f"{key} must be an integer or a list of integers, got {found!r}")
        return tuple(several)

    bos, pad = ids("bos_token_id"), ids("pad_token_id")
    return {
        "bos_id": bos[0] if bos else None,
        "eos_ids": ids("eos_token_id"),
        "pad_id": pad[0] if pad else None,
    }


def _gpt2(raw: dict[str, Any]) -> DecoderConfig:
    dim, heads = size(raw, "n_embd"), size(raw, "n_head")
    if dim % heads:
        raise RangeError(f"n_embd {dim} does not divide into {heads} heads")
    if raw.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise RangeError(f"activation {raw['activation_function']!r} is not gelu_new")
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise RangeError("GPT-2 is supported only with scores scaled by 1/√D")
    return DecoderConfig(
        family="gpt2",
        vocab=size(raw, "vocab_size"),
        dim=dim,
        layers=size(raw, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        hidden=size(raw, "n_inner", 4 * dim),
        context=size(raw, "n_positions"),
        norm_eps=real(raw, "layer_norm_epsilon", 1e-5),
        tied=flag(raw, "tie_word_embeddings", default=True),
        rope=None,
        attention_bias=True,
        mlp_bias=True,
    )


def _llama_like(raw: dict[str, Any]) -> DecoderConfig:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise RangeError(f"activation {raw['hidden_act']!r} is not silu")
    heads, dim = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    window, full_layers = _window(raw)
    return DecoderConfig(
        family=raw["model_type"],
        vocab=size(raw, "vocab_size"),
        dim=dim,
        layers=size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=size(raw, "num_key_value_heads", heads),
        head_dim=size(raw, "head_dim", dim // heads),
        hidden=size(raw, "intermediate_size"),
        context=size(raw, "max_position_embeddings"),
        norm_eps=real(raw, "rms_norm_eps", 1e-6),
        tied=flag(raw, "tie_word_embeddings", default=False),
        rope=_rope(raw),
        window=window,
        full_layers=full_layers,
        qk_norm=raw["model_type"] == "qwen3",
        attention_bias=flag(raw, "attention_bias", default=False),
        mlp_bias=flag(raw, "mlp_bias", default=False),
    )


def _window(raw: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers without it: all layers of Mistral slide, of Qwen3 those named."""
    if not raw.get("sliding_window") or raw["model_type"] == "llama":
        return None, ()
    window, layers = size(raw, "sliding_window"), size(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if raw["model_type"] == "qwen3":
        if not flag(raw, "use_sliding_window", default=False):
            return None, ()
        first = raw.get("max_window_layers", 28)  # older files: layers from this one on slide
        if not kinds and type(first) is not int:
            raise RangeError(f"max_window_layers must be an integer, got {first!r}")
        kinds = kinds or ["full_attention" if i < first else _SLIDING for i in range(layers)]
    kinds = kinds or [_SLIDING] * layers
    if len(kinds) != layers:
        raise RangeError(f"layer_types names {len(kinds)} layers, there are {layers}")
    full = tuple(i for i, kind in enumerate(kinds) if kind != _SLIDING)
    return (None, ()) if len(full) == layers else (window, full)


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`.

    If both are present, `rope_scaling` wins, as in transformers.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise RangeError(f"rope_scaling must be a JSON object, got {scaling!r}")
    _refuse_unknown_rope(raw, scaling)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise RangeError(f"rope_type must be one of {', '.join(ROPE_KINDS)}, got {kind!r}")
    theta = _theta(raw, scaling)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            positive(scaling, "factor"),
            _original_context(raw, scaling),
            low_freq_factor=positive(scaling, "low_freq_factor"),
            high_freq_factor=positive(scaling, "high_freq_factor"),
        )
    if kind == "yarn":
        return _yarn(raw, scaling, theta)
    return RopeConfig(theta, kind, positive(scaling, "factor"))


def _refuse_unknown_rope(raw: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Settings that, if ignored, would silently give another model."""
    if any(isinstance(value, dict) for value in scaling.values()):
        raise RangeError("rope settings that differ by layer type are not supported")
    for table in (raw, scaling):
        if table.get("partial_rotary_factor") not in (None, 1):
            share = table["partial_rotary_factor"]
            raise RangeError(f"partial_rotary_factor must be 1, got {share!r}")


def _theta(raw: dict[str, Any], scaling: dict[str, Any]) -> float:
    usual = RopeConfig.theta
    for table in (scaling, raw):
        if table.get("rope_theta") is not None:
            return positive(table, "rope_theta")
    other = raw.get("rope_parameters")
    lost = other.get("rope_theta") if isinstance(other, dict) else None
    if lost not in (None, usual):
        # transformers takes the default here, which is not what the weights were trained with.
        raise RangeError(
            f"rope_theta {lost!r} of rope_parameters is ignored: move it to rope_scaling"
        )
    return usual


def _original_context(raw: dict[str, Any], scaling: dict[str, Any]) -> int:
    """The context before stretching; a top-level value takes precedence."""
    key = "original_max_position_embeddings"
    for table in (raw, scaling):
        if table.get(key) is not None:
            return size(table, key)
    return size(raw, "max_position_embeddings")


def _yarn(raw: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeConfig:
    if theta == 1.0:
        raise RangeError("rope_theta of yarn must not be 1: all frequencies would be equal")
    original = _original_context(raw, scaling)
    # A null factor means the ratio of the lengths; a missing factor is an error.
    ratio = size(raw, "max_position_embeddings") / original if "factor" in scaling else None
    factor = positive(scaling, "factor", ratio)
    # For the others 0 means the default.
    given = {key: value for key, value in scaling.items() if value != 0}
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=positive(given, "beta_fast", 32.0),
        beta_slow=positive(given, "beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor),
        truncate=flag(scaling, "truncate", default=True),
    )


def _attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN scales attention by 1 + 0.1 · mscale · ln(factor) unless the file gives a factor."""

    def growth(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    scale, for_all = real(scaling, "mscale", 0.0), real(scaling, "mscale_all_dim", 0.0)
    if min(scale, for_all) < 0:
        raise RangeError(f"mscale and mscale_all_dim cannot be negative, got {scale}, {for_all}")
    usual = growth(scale) / growth(for_all) if scale and for_all else growth(1.0)
    return real(scaling, "attention_factor", usual)


def read_table(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise RangeError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RangeError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; null or 0 means the default."""
    found = default if default is not None and not raw.get(key) else raw[key]
    if type(found) is not int or found < 1:
        raise RangeError(f"{key} must be a positive integer, got {found!r}")
    return found


def real(raw: dict[str, Any], key: str, default: float) -> float:
    found = default if raw.get(key) is None else raw[key]
    if type(found) not in (int, float) or not math.isfinite(found):
        raise RangeError(f"{key} must be a number, got {found!r}")
    return float(found)


def positive(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; required without a default."""
    if default is None and raw.get(key) is None:
        raise KeyError(key)
    found = real(raw, key, default or 0.0)
    if found <= 0:
        raise RangeError(f"{key} must be positive, got {found}")
    return found


def flag(raw: dict[str, Any], key: str, *, default: bool) -> bool:
    """A JSON boolean; other values, such as "no", are refused."""
    found = default if raw.get(key) is None else raw[key]
    if type(found) is not bool:
        raise RangeError(f"{key} must be true or false, got {found!r}")
    return found
