"""A `DecoderConfig` as the `config.json` of a Hugging Face checkpoint."""

from typing import Any

import torch

from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.rope_config import RopeConfig

_ROPE_EXTRAS: dict[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}
_ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}


def as_dict(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers and `config.from_dict` read."""
    shape = _gpt2_dict(config) if config.is_gpt2 else _rotary_dict(config)
    ends = list(config.eos_ids)
    special = {
        "bos_token_id": config.bos_id,
        "pad_token_id": config.pad_id,
        "eos_token_id": (ends if len(ends) > 1 else ends[0]) if ends else None,
    }
    return {
        "model_type": config.family,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: value for name, value in special.items() if value is not None},
        **shape,
    }


def _gpt2_dict(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.file_context or config.context,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _rotary_dict(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or RopeConfig()
    written: dict[str, Any] = {
        "architectures": [f"{_ARCHITECTURES[config.family]}ForCausalLM"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.file_context or config.context,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_parameters": _rope_dict(rope),
    }
    if rope.kind == "longrope":  # transformers reads it here first
        written["original_max_position_embeddings"] = rope.original_context
    if config.window is not None or config.post_norms:
        written["layer_types"] = [
            "full_attention" if config.window_of(layer) is None else "sliding_attention"
            for layer in range(config.layers)
        ]
    return written | _experts_dict(config) | (_gemma_dict(config) if config.gelu else {})


def _experts_dict(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    if config.family == "mixtral":
        return {"num_local_experts": experts.count, "num_experts_per_tok": experts.per_token}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.renormalized,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def _gemma_dict(config: DecoderConfig) -> dict[str, Any]:
    assert config.attention_scale is not None
    written: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        # An integer in every file of this family.
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "attn_logit_softcapping": config.softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }
    if config.local_rope is not None:
        far, near = _rope_dict(config.rope or RopeConfig()), _rope_dict(config.local_rope)
        written["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
        written["rope_local_base_freq"] = config.local_rope.theta
    return written


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind in _ROPE_EXTRAS:
        written["original_max_position_embeddings"] = rope.original_context
    return {**written, **{name: getattr(rope, name) for name in _ROPE_EXTRAS.get(rope.kind, ())}}
