"""`config.json` of a Hugging Face checkpoint as a `DecoderConfig`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from trapline.gold import checks
from trapline.gold.decoder.config_values import flag, positive, read_table, real, size
from trapline.gold.decoder.rope_config import RopeConfig, read_ropes
from trapline.gold.errors import RangeError

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt2",
]
_SLIDING = "sliding_attention"
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
#: Defaults of a family for keys that are missing from the file (not for keys that are null).
_UNSAID: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # The text part of a gemma3 names only what differs from these.
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


@dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward of several experts, of which a router chooses some for every token."""

    count: int
    per_token: int
    hidden: int
    #: Whether the weights of the chosen experts are divided by their sum.
    renormalized: bool
    #: Layers with one plain feed-forward.
    dense_layers: tuple[int, ...] = ()


class AttentionRules(NamedTuple):
    """How one layer attends."""

    window: int | None
    #: c turns a score s into c · tanh(s / c); 0 does not.
    softcap: float
    scale: float
    rope: RopeConfig | None


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
    #: Positions of the layers with a window, where they differ from `rope`.
    local_rope: RopeConfig | None = None
    qk_norm: bool = False
    #: Biases of the products for queries, keys and values, and of the one behind attention.
    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    #: Gemma: GELU in the gated feed-forward, norms behind attention and feed-forward too, norms
    #: that multiply by 1 + weight, and scaled embeddings.
    gelu: bool = False
    post_norms: bool = False
    unit_offset: bool = False
    embedding_scale: float = 1.0
    #: Caps of attention scores and logits, c · tanh(s / c); 0: none. The scale is D^-½ by default.
    softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_scale: float | None = None
    #: Special tokens that the file names; several may end a text.
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    #: The context that the file names, where `context` is a shorter limit.
    file_context: int | None = None

    def limited(self, context: int) -> "DecoderConfig":
        """The same model for sequences of at most `context` tokens."""
        checks.integer_between(1, self.context, context=context)
        rope = self.rope and self.rope.for_context(context)
        return replace(self, context=context, rope=rope, file_context=self.context)

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    @property
    def is_plain(self) -> bool:
        """Whether layers compute what Llama's do, up to sizes, biases, windows and head norms."""
        caps = self.softcap or self.logit_softcap
        extras = self.gelu or self.post_norms or self.unit_offset or caps
        scales = self.embedding_scale != 1.0 or self.attention_scale is not None
        return not (
            self.is_gpt2 or extras or scales or self.experts or self.local_rope or self.rope is None
        )

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window

    def rules_of(self, layer: int) -> AttentionRules:
        """How this layer attends."""
        window = self.window_of(layer)
        rope = self.rope if window is None else self.local_rope or self.rope
        return AttentionRules(
            window, self.softcap, self.attention_scale or self.head_dim**-0.5, rope
        )

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of this layer; None for one plain feed-forward."""
        dense = self.experts is None or layer in self.experts.dense_layers
        return None if dense else self.experts


def read_config(folder: str | Path) -> DecoderConfig:
    """`config.json` of a Hugging Face checkpoint."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a checkpoint: it has no config.json")
    return from_dict(read_table(path))


def from_dict(raw: dict[str, Any]) -> DecoderConfig:
    """The configuration from the parsed file; of a gemma3, that of its text part."""
    if raw.get("model_type") == "gemma3" and isinstance(raw.get("text_config"), dict):
        ends = {key: value for key, value in raw.items() if key.endswith("_token_id")}
        raw = {**raw["text_config"], **ends, "model_type": "gemma3_text"}
    family = raw.get("model_type", "")
    if not isinstance(family, str) or family not in get_args(Family):
        raise RangeError(f"model_type must be one of {', '.join(get_args(Family))}, got {family!r}")
    try:
        config = _gpt2(raw) if family == "gpt2" else _rotary({**_UNSAID[family], **raw})
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
        out_bias=True,
        mlp_bias=True,
    )


def _rotary(raw: dict[str, Any]) -> DecoderConfig:
    """Every family with rotary positions; `_TRAITS` says how each differs from Llama."""
    heads, dim = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    window, full_layers = _window(raw)
    rope, local_rope = read_ropes(raw)
    biased = flag(raw, "attention_bias", default=False)
    plain = DecoderConfig(
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
        rope=rope,
        window=window,
        full_layers=full_layers,
        local_rope=local_rope,
        attention_bias=biased,
        out_bias=biased,
        mlp_bias=flag(raw, "mlp_bias", default=False),
    )
    for name in ("short_factor", "long_factor"):
        if rope.kind == "longrope" and len(getattr(rope, name)) != plain.head_dim // 2:
            raise RangeError(
                f"{name} must have {plain.head_dim // 2} entries, half of head_dim, "
                f"got {len(getattr(rope, name))}"
            )
    traits = _TRAITS.get(plain.family)
    if not plain.family.startswith("gemma"):
        _require_activation(raw, "hidden_act", "silu", "swish")
    return plain if traits is None else replace(plain, **traits(raw))


def _phi3(raw: dict[str, Any]) -> dict[str, Any]:
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ("default", "longrope", "su"):
        raise RangeError(f"rope_type of a phi3 must be default or longrope, got {kind!r}")
    return {}


def _mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    count, each = size(raw, "num_local_experts"), size(raw, "num_experts_per_tok")
    _check_experts(count, each)
    return {"experts": ExpertsConfig(count, each, size(raw, "intermediate_size"), True)}


def _qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    # Files written by newer releases call the experts local ones.
    key = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    count, each = size(raw, key), size(raw, "num_experts_per_tok")
    _check_experts(count, each)
    step, named = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise RangeError(f"mlp_only_layers must be a list of integers, got {named!r}")
    layers = range(size(raw, "num_hidden_layers"))
    dense = tuple(i for i in layers if i in named or (i + 1) % step)
    renormalized = flag(raw, "norm_topk_prob", default=False)
    hidden = size(raw, "moe_intermediate_size")
    return {"qk_norm": True, "experts": ExpertsConfig(count, each, hidden, renormalized, dense)}


def _check_experts(count: int, each: int) -> None:
    if each > count:
        raise RangeError(f"num_experts_per_tok must be at most {count}, got {each}")


def _gemma(raw: dict[str, Any]) -> dict[str, Any]:
    _require_activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    if raw.get("use_bidirectional_attention"):
        raise RangeError("use_bidirectional_attention must be false: a decoder is causal")
    third = raw["model_type"] == "gemma3_text"
    if third and raw.get("attn_logit_softcapping"):
        raise RangeError("attn_logit_softcapping of a gemma3_text must be null: it has head norms")
    return {
        "qk_norm": third,
        "gelu": True,
        "post_norms": True,
        "unit_offset": True,
        "embedding_scale": size(raw, "hidden_size") ** 0.5,
        "softcap": _cap(raw, "attn_logit_softcapping"),
        "logit_softcap": _cap(raw, "final_logit_softcapping"),
        "attention_scale": size(raw, "query_pre_attn_scalar") ** -0.5,
    }


def _cap(raw: dict[str, Any], key: str) -> float:
    return 0.0 if raw.get(key) is None else positive(raw, key)


def _require_activation(raw: dict[str, Any], key: str, *accepted: str) -> None:
    if raw.get(key, accepted[0]) not in accepted:
        raise RangeError(f"activation {raw[key]!r} is not {accepted[0]}")


#: What a family has beyond Llama.
_TRAITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen2": lambda _: {"attention_bias": True, "out_bias": False},
    "qwen3": lambda _: {"qk_norm": True},
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


def _window(raw: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers without it."""
    family = raw["model_type"]
    if not raw.get("sliding_window") or family == "llama":
        return None, ()
    if family.startswith("qwen") and not flag(raw, "use_sliding_window", default=False):
        return None, ()
    window, layers = size(raw, "sliding_window"), size(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or _layer_kinds(raw, layers)
    if len(kinds) != layers:
        raise RangeError(f"layer_types names {len(kinds)} layers, there are {layers}")
    full = tuple(i for i, kind in enumerate(kinds) if kind != _SLIDING)
    return (None, ()) if len(full) == layers else (window, full)


def _layer_kinds(raw: dict[str, Any], layers: int) -> list[str]:
    """Which layers slide in a file without `layer_types`, as in transformers."""
    family = raw["model_type"]
    if family in ("qwen2", "qwen3"):  # layers from this one on
        first = raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise RangeError(f"max_window_layers must be an integer, got {first!r}")
        slides = [number >= first for number in range(layers)]
    elif family.startswith("gemma"):  # all but every second or sixth
        every = 2 if family == "gemma2" else size(raw, "sliding_window_pattern", 6)
        slides = [bool((number + 1) % every) for number in range(layers)]
    else:
        slides = [True] * layers
    return [_SLIDING if one else "full_attention" for one in slides]
