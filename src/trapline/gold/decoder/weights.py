"""Reads and writes Hugging Face checkpoints; maps their tensor names to ours."""

import json
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.network import Network
from trapline.gold.errors import DTypeError, RangeError, ShapeError, UnsupportedError

NetworkT = TypeVar("NetworkT", bound=Network)
#: The file that maps tensors to the files of a sharded checkpoint.
INDEX = "model.safetensors.index.json"
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
    "attn.c_attn": "attention.q",
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
_ROPE_EXTRAS: dict[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
#: Constants that older files store beside the weights of a layer.
_CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Pair:
    """One tensor of a checkpoint and its one or (GPT-2's joined q, k, v) three parameters here."""

    theirs: str
    ours: tuple[str, ...]
    #: GPT-2 stores its matrices transposed.
    transposed: bool = False

    def find(self, tensors: dict[str, Tensor]) -> str:
        """Its name in this checkpoint; GPT-2's original files omit the prefix."""
        for name in (self.theirs, self.theirs.removeprefix("transformer.")):
            if name in tensors:
                return name
        raise ShapeError(f"the checkpoint has no tensor {self.theirs}")

    def split(self, found: Tensor) -> dict[str, Tensor]:
        """Our parameters from their tensor."""
        parts = (found.T if self.transposed else found).chunk(len(self.ours))
        return dict(zip(self.ours, parts, strict=True))

    def join(self, ours: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from our parameters."""
        whole = torch.cat([ours[name].detach() for name in self.ours])
        return (whole.T if self.transposed else whole).contiguous()

    def shape(self, ours: Mapping[str, Tensor]) -> tuple[int, ...]:
        first, *rest = ours[self.ours[0]].shape
        whole = (first * len(self.ours), *rest)
        return whole[::-1] if self.transposed else whole


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype by its name; refuses what weights cannot have."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and found not in _DTYPES:
        raise DTypeError(f"dtype must be a float of 16, 32 or 64 bits, got {found}")
    assert not isinstance(found, str)
    return found


def check_device(device: str) -> None:
    """Refuses CUDA where there is none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("device is 'cuda', but this machine has no CUDA device")


def from_tensors(
    model: type[NetworkT],
    config: DecoderConfig,
    theirs: dict[str, Tensor],
    dtype: torch.dtype | None,
    device: str,
) -> NetworkT:
    """A model with these tensors, named as in a checkpoint; shares their memory if possible."""
    with torch.device("meta"):
        decoder = model(config)
    ours = dict(decoder.named_parameters())
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for pair in _pairs(decoder):
        name, expected = pair.find(theirs), pair.shape(ours)
        tensor = theirs[name]
        if tuple(tensor.shape) != expected:
            raise ShapeError(f"{pair.theirs} has shape {tuple(tensor.shape)}, expected {expected}")
        if tensor.dtype not in _DTYPES:
            given = str(tensor.dtype).removeprefix("torch.")
            raise DTypeError(
                f"{pair.theirs} is {given}; weights must be floats of 16, 32 or 64 bits"
            )
        found |= pair.split(tensor)
        used.add(name)
    _refuse_unexpected(theirs.keys() - used)
    # One dtype throughout, although some checkpoints store norms in another.
    kind = dtype or found["embedding.weight"].dtype
    state = {name: one.to(device, kind).contiguous() for name, one in found.items()}
    decoder.load_state_dict(state, strict=False, assign=True)
    if decoder.config.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.eval()


def _refuse_unexpected(names: Set[str]) -> None:
    """Refuses layer tensors that the configuration does not cover: ignoring them is unsafe."""
    for name in sorted(names):
        inside = name.removeprefix("transformer.").startswith(("model.layers.", "h."))
        if inside and not name.endswith(_CONSTANTS):
            raise ShapeError(
                f"the checkpoint has {name}, which its configuration does not describe"
            )


def quantisation(folder: Path) -> str | None:
    """The `quant_method` that `config.json` declares, if any."""
    path = folder / "config.json"
    try:
        declared = json.loads(path.read_text())["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(declared)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, sharded or not."""
    tensors: dict[str, Tensor] = {}
    for shard in _shards(folder):
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder} has no {shard}")
        tensors |= load_tensors(folder / shard)
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise RangeError(f"{path} is not a safetensors file: {error}") from None


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RangeError(f"{index} is not the index of a sharded checkpoint") from None


@dataclass(frozen=True)
class CheckpointFiles:
    """A dense checkpoint in memory: what `config.json` and each safetensors file will hold."""

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    #: File name → names of its tensors.
    shards: dict[str, list[str]]

    def write(self, folder: Path) -> None:
        """Writes all files, for transformers too."""
        (folder / "config.json").write_text(json.dumps(self.settings, indent=1) + "\n")
        for name, names in self.shards.items():
            save_tensors({one: self.tensors[one] for one in names}, folder / name)
        if len(self.shards) > 1:
            total = sum(one.numel() * one.element_size() for one in self.tensors.values())
            where = {one: name for name, names in self.shards.items() for one in names}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def files_of(decoder: Network, shard_bytes: int) -> CheckpointFiles:
    """The files of a dense decoder; refuses one whose weights are stored in another form."""
    check_shard_bytes(shard_bytes)
    with torch.device("meta"):
        expected = dict(Network(decoder.config).named_parameters())
    ours = dict(decoder.named_parameters())
    for name in expected:
        if name not in ours:
            raise RangeError(
                f"{name} is not a dense weight, so it cannot be saved in a dense checkpoint; "
                "save packed models with save_packed or `trapline pack`"
            )
    tensors = {pair.theirs: pair.join(ours).cpu() for pair in _pairs(decoder)}
    settings = as_dict(decoder.config, decoder.norm.weight.dtype)
    return CheckpointFiles(settings, tensors, _sharded(tensors, shard_bytes))


def check_shard_bytes(shard_bytes: int) -> None:
    if shard_bytes < 1:
        raise RangeError(f"shard_bytes must be at least 1, got {shard_bytes}")


def remove_stale(folder: Path, written: Set[str]) -> None:
    """Removes weights of an earlier save: a whole file and an index would contradict each other."""
    if INDEX not in written:
        (folder / INDEX).unlink(missing_ok=True)
    for pattern in ("model.safetensors", "model-?????-of-?????.safetensors"):
        for path in list(folder.glob(pattern)):
            if path.name not in written:
                path.unlink()


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes one safetensors file with the permissions that the umask gives."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    # The library writes for the owner only. Reading the umask requires setting one briefly.
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _sharded(tensors: dict[str, Tensor], shard_bytes: int) -> dict[str, list[str]]:
    """File names and the tensors of each, filled in order."""
    number, room = 0, shard_bytes
    places: list[tuple[int, str]] = []
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and room < shard_bytes:
            number, room = number + 1, shard_bytes
        room -= size
        places.append((number, name))
    if number == 0:
        return {"model.safetensors": list(tensors)}
    return {
        f"model-{which + 1:05}-of-{number + 1:05}.safetensors": [name for _, name in group]
        for which, group in groupby(places, key=lambda place: place[0])
    }


def _pairs(decoder: Network) -> Iterator[_Pair]:
    """Every tensor of the checkpoint with its parameters here."""
    config = decoder.config
    parameters = {name for name, _ in decoder.named_parameters()}
    for theirs, ours in (_GPT2_REST if config.is_gpt2 else _LLAMA_REST).items():
        if ours in parameters:
            yield _Pair(theirs, (ours,))
    prefix = "transformer.h" if config.is_gpt2 else "model.layers"
    for number in range(config.layers):
        for theirs, ours in (_GPT2_LAYER if config.is_gpt2 else _LLAMA_LAYER).items():
            for part in ("weight", "bias"):
                name = f"layers.{number}.{ours}.{part}"
                if name in parameters:
                    yield _layer_pair(f"{prefix}.{number}.{theirs}.{part}", name)


def _layer_pair(theirs: str, ours: str) -> _Pair:
    transposed = theirs.endswith(".weight") and (".c_" in theirs)
    if ".c_attn." not in theirs:
        return _Pair(theirs, (ours,), transposed)
    three = tuple(ours.replace("attention.q.", f"attention.{letter}.") for letter in "qkv")
    return _Pair(theirs, three, transposed)


def as_dict(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    shape = _gpt2_dict(config) if config.is_gpt2 else _llama_dict(config)
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
        "n_positions": config.context,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _llama_dict(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or RopeConfig()
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[config.family]
    written: dict[str, Any] = {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_parameters": _rope_dict(rope),
    }
    if config.window is not None:
        written["layer_types"] = [
            "full_attention" if config.window_of(layer) is None else "sliding_attention"
            for layer in range(config.layers)
        ]
    return written


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rope.original_context
    return {**written, **{name: getattr(rope, name) for name in _ROPE_EXTRAS.get(rope.kind, ())}}
