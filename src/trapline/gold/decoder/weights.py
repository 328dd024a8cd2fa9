"""Hugging Face checkpoints: which of their tensors is which of ours."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trapline.gold.decoder.config import DecoderConfig, RopeConfig, read_config
from trapline.gold.decoder.model import Decoder
from trapline.gold.errors import ShapeError

_LLAMA_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "feedforward_norm",
    "mlp.gate_proj": "feedforward.gate",
    "mlp.up_proj": "feedforward.up",
    "mlp.down_proj": "feedforward.down",
}
_GPT2_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_proj": "attention.out",
    "ln_2": "feedforward_norm",
    "mlp.c_fc": "feedforward.up",
    "mlp.c_proj": "feedforward.down",
}
_LLAMA_REST = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_GPT2_REST = {
    "transformer.wte.weight": "embedding.weight",
    "transformer.wpe.weight": "position.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
}


def load(folder: Path) -> Decoder:
    """A decoder with the checkpoint's weights; a missing or misshapen tensor is named."""
    config = read_config(folder)
    decoder = Decoder(config)
    ours = dict(decoder.named_parameters())
    theirs = read_tensors(folder)
    for name, source in _pairs(config):
        if name not in ours:
            continue
        tensor = source(theirs)
        if tensor.shape != ours[name].shape:
            expected = tuple(ours[name].shape)
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        ours[name].data = tensor.contiguous()
        del ours[name]
    if ours:
        raise ShapeError(f"the checkpoint has no {', '.join(sorted(ours))}")
    return decoder.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, or of the shards its index lists."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {shard}")
        tensors |= load_file(path)
    return tensors


class _Source:
    """Finds one tensor of ours among theirs."""

    def __init__(self, name: str, *, turned: bool = False, third: int | None = None) -> None:
        self.name, self.turned, self.third = name, turned, third

    def __call__(self, theirs: dict[str, Tensor]) -> Tensor:
        found = theirs.get(self.name)
        if found is None:
            found = theirs.get(self.name.removeprefix("transformer."))
        if found is None:
            raise ShapeError(f"the checkpoint has no tensor {self.name}")
        if self.third is not None:
            found = found.chunk(3, dim=-1)[self.third]
        return found.T if self.turned and found.ndim == 2 else found


def _pairs(config: DecoderConfig) -> Iterator[tuple[str, _Source]]:
    """Our name of every parameter, and where it comes from."""
    rest = _GPT2_REST if config.is_gpt2 else _LLAMA_REST
    for theirs, ours in rest.items():
        if not (config.tied and ours == "head.weight"):
            yield ours, _Source(theirs)
    for number in range(config.layers):
        yield from _gpt2_layer(number) if config.is_gpt2 else _llama_layer(config, number)


def _llama_layer(config: DecoderConfig, number: int) -> Iterator[tuple[str, _Source]]:
    parameters = {name for name, _ in Decoder(_tiny(config)).layers[0].named_parameters()}
    for theirs, ours in _LLAMA_LAYER.items():
        for part in ("weight", "bias"):
            if f"{ours}.{part}" in parameters:
                source = _Source(f"model.layers.{number}.{theirs}.{part}")
                yield f"layers.{number}.{ours}.{part}", source


def _gpt2_layer(number: int) -> Iterator[tuple[str, _Source]]:
    """GPT-2 keeps its matrices turned, and q, k and v in one of them."""
    for theirs, ours in _GPT2_LAYER.items():
        for part in ("weight", "bias"):
            name = f"transformer.h.{number}.{theirs}.{part}"
            yield f"layers.{number}.{ours}.{part}", _Source(name, turned=part == "weight")
    for third, letter in enumerate("qkv"):
        for part in ("weight", "bias"):
            name = f"transformer.h.{number}.attn.c_attn.{part}"
            source = _Source(name, turned=part == "weight", third=third)
            yield f"layers.{number}.attention.{letter}.{part}", source


def _tiny(config: DecoderConfig) -> DecoderConfig:
    """The same structure at the smallest size: asked only for its parameters' names."""
    return replace(config, vocab=1, dim=2, layers=1, heads=1, kv_heads=1, head_dim=2, hidden=1)


def save(decoder: Decoder, folder: Path) -> None:
    """`config.json` and one safetensors file that transformers reads too."""
    from safetensors.torch import save_file

    config = decoder.config
    if config.is_gpt2:
        raise ShapeError("only Llama-shaped models are saved; GPT-2's packed form is read only")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_as_dict(config), indent=1) + "\n")
    ours = dict(decoder.named_parameters())
    tensors = {
        source.name: ours[name].detach().contiguous()
        for name, source in _pairs(config)
        if name in ours
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _as_dict(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or RopeConfig()
    scaling = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[config.family]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_parameters": scaling,
        "torch_dtype": str(torch.float32).removeprefix("torch."),
    }
