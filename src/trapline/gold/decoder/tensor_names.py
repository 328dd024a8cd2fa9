"""The tensors of a checkpoint, by their names there, and our parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trapline.gold.decoder.config import DecoderConfig
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
_GEMMA_LAYER = {
    **_LLAMA_LAYER,
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "feedforward_norm",
    "post_feedforward_layernorm": "feedforward_post_norm",
}
#: A comma joins parameters that the checkpoint stores as one tensor.
_PHI3_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": "attention.q,attention.k,attention.v",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "feedforward_norm",
    "mlp.gate_up_proj": "feedforward.gate,feedforward.up",
    "mlp.down_proj": "feedforward.down",
}
#: A star stands for the numbers of the experts, which are one parameter here.
_MIXTRAL_LAYER = {
    **{theirs: ours for theirs, ours in _LLAMA_LAYER.items() if not theirs.startswith("mlp.")},
    "block_sparse_moe.gate": "feedforward.router",
    "block_sparse_moe.experts.*.w1": "feedforward.gate",
    "block_sparse_moe.experts.*.w3": "feedforward.up",
    "block_sparse_moe.experts.*.w2": "feedforward.down",
}
_QWEN3_MOE_LAYER = {
    **_LLAMA_LAYER,
    "mlp.gate": "feedforward.router",
    "mlp.experts.*.gate_proj": "feedforward.gate",
    "mlp.experts.*.up_proj": "feedforward.up",
    "mlp.experts.*.down_proj": "feedforward.down",
}
_GPT2_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.q,attention.k,attention.v",
    "attn.c_proj": "attention.out",
    "ln_2": "feedforward_norm",
    "mlp.c_fc": "feedforward.up",
    "mlp.c_proj": "feedforward.down",
}
_LAYERS = {
    "gemma2": _GEMMA_LAYER,
    "gemma3_text": _GEMMA_LAYER,
    "phi3": _PHI3_LAYER,
    "mixtral": _MIXTRAL_LAYER,
    "qwen3_moe": _QWEN3_MOE_LAYER,
    "gpt2": _GPT2_LAYER,
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


@dataclass(frozen=True)
class TensorPair:
    """Tensors of a checkpoint and parameters here: one each, or several on one of the sides.

    One tensor holds several parameters one after another; several tensors are the parts of one
    parameter along a new first axis, as for experts.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    #: GPT-2 stores its matrices transposed.
    transposed: bool = False

    def find(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Their names in this checkpoint; GPT-2's original files omit the prefix."""
        return [_found(name, tensors) for name in self.theirs]

    def shape(self, ours: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape of each of their tensors."""
        if len(self.theirs) > 1:
            return tuple(ours[self.ours[0]].shape[1:])
        rest = ours[self.ours[0]].shape[1:]
        whole = (sum(len(ours[name]) for name in self.ours), *rest)
        return whole[::-1] if self.transposed else whole

    def read(self, found: list[Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our parameters from their tensors."""
        if len(found) > 1:
            return {self.ours[0]: torch.stack(found)}
        whole = found[0].T if self.transposed else found[0]
        parts = torch.split(whole, [len(ours[name]) for name in self.ours])
        return dict(zip(self.ours, parts, strict=True))

    def write(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors from our parameters."""
        if len(self.theirs) > 1:
            parts = ours[self.ours[0]].detach().unbind()
            return {name: part.clone() for name, part in zip(self.theirs, parts, strict=True)}
        whole = torch.cat([ours[name].detach() for name in self.ours])
        return {self.theirs[0]: (whole.T if self.transposed else whole).contiguous()}


def _found(name: str, tensors: Mapping[str, Tensor]) -> str:
    for spelling in (name, name.removeprefix("transformer.")):
        if spelling in tensors:
            return spelling
    raise ShapeError(f"the checkpoint has no tensor {name}")


def tensor_pairs(config: DecoderConfig, parameters: Mapping[str, Tensor]) -> Iterator[TensorPair]:
    """Every tensor of the checkpoint with its parameters here."""
    for theirs, ours in (_GPT2_REST if config.is_gpt2 else _LLAMA_REST).items():
        if ours in parameters:
            yield TensorPair((theirs,), (ours,))
    prefix = "transformer.h" if config.is_gpt2 else "model.layers"
    for number in range(config.layers):
        for theirs, ours in _LAYERS.get(config.family, _LLAMA_LAYER).items():
            for part in ("weight", "bias"):
                names = _our_names(number, ours, part, parameters)
                if names and (("*" in theirs) == (parameters[names[0]].ndim == 3)):
                    whole = f"{prefix}.{number}.{theirs}.{part}"
                    yield _pair(whole, names, parameters)


def _our_names(
    number: int, ours: str, part: str, parameters: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Our parameters, if the model has them; the experts' are not modules with a weight."""
    names = tuple(f"layers.{number}.{one}.{part}" for one in ours.split(","))
    if names[0] not in parameters and part == "weight":
        names = (f"layers.{number}.{ours}",)
    return names if names[0] in parameters else ()


def _pair(theirs: str, ours: tuple[str, ...], parameters: Mapping[str, Tensor]) -> TensorPair:
    transposed = theirs.endswith(".weight") and ".c_" in theirs
    if "*" not in theirs:
        return TensorPair((theirs,), ours, transposed)
    experts = range(len(parameters[ours[0]]))
    return TensorPair(tuple(theirs.replace("*", str(i)) for i in experts), ours)
