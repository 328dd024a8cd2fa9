"""GGUF files of ternary decoders, for llama.cpp and other readers.

| type | what it holds | exact |
|---|---|---|
| F16 | code · scale | always: a scale is a float16 |
| Q8_0 | blocks of 32: the scale, and the codes as 8-bit numbers | groups of 32, 64, 96 … |
| TQ2_0 | blocks of 256 with one scale, 2 bits per code | if both groups of a block share a scale |
| Q2_0 | blocks of 128 with one scale, 2 bits per code | groups of 128; two meanings of the name |

All types but F16 need rows of whole blocks.
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trapline.gold.atomic_write import write_file
from trapline.gold.decoder.gguf_format import FORK_Q2_0, interleaved, package
from trapline.gold.decoder.text import end_ids
from trapline.gold.errors import RangeError
from trapline.gold.ternary import quantize
from trapline.gold.ternary.pack import to_blocks

FORMATS = ("f16", "q8_0", "tq2_0", "q2_0")
_EIGHT, _LARGE = 32, 256
#: Shape, bytes and type number by the names in the file.
_Encoded = dict[str, tuple[tuple[int, ...], np.ndarray, Any]]


class Tensor(NamedTuple):
    """One matrix of a file: dense, or as codes and scales."""

    values: np.ndarray | None
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    group_size: int = 128

    def dense(self) -> np.ndarray:
        if self.values is not None:
            return self.values
        assert self.codes is not None
        assert self.scales is not None
        return quantize.dequantize(self.codes, self.scales, self.group_size)


def encode(name: str, tensor: Tensor, kind: str) -> tuple[np.ndarray, int]:
    """The bytes of a matrix in the file, and their type number."""
    if tensor.codes is None:
        raise RangeError(f"{name} is not ternary")
    return {"f16": _f16, "q8_0": _q8_0, "tq2_0": _tq2_0, "q2_0": _q2_0}[kind](name, tensor)


def _f16(name: str, tensor: Tensor) -> tuple[np.ndarray, int]:  # noqa: ARG001
    return tensor.dense().astype(np.float16), 1


def _q8_0(name: str, tensor: Tensor) -> tuple[np.ndarray, int]:
    """Stores the scale as the block's factor, with codes of ±1: lossless."""
    codes, scales = _blocks(name, tensor, _EIGHT)
    rows, columns = codes.shape
    blocks = np.empty((rows, columns // _EIGHT, 2 + _EIGHT), dtype=np.uint8)
    blocks[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2:] = codes.reshape(rows, -1, _EIGHT).view(np.uint8)
    return blocks.reshape(rows, -1), 8


def _tq2_0(name: str, tensor: Tensor) -> tuple[np.ndarray, int]:
    codes, scales = _blocks(name, tensor, _LARGE)
    rows, columns = codes.shape
    stored = (codes + 1).astype(np.uint8).reshape(rows, columns // _LARGE, 2, 4, 32)
    bytes_ = np.zeros((rows, columns // _LARGE, 2, 32), dtype=np.uint8)
    for place in range(4):
        bytes_ |= stored[..., place, :] << (2 * place)
    blocks = np.empty((rows, columns // _LARGE, 66), dtype=np.uint8)
    blocks[..., :64] = bytes_.reshape(rows, -1, 64)
    blocks[..., 64:] = scales.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1), 35


def _q2_0(name: str, tensor: Tensor) -> tuple[np.ndarray, int]:
    codes, scales = _blocks(name, tensor, 128)
    return to_blocks(codes, scales), FORK_Q2_0


def _blocks(name: str, tensor: Tensor, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and the scale of each block; raises RangeError where a block would need two."""
    assert tensor.codes is not None
    assert tensor.scales is not None
    columns = tensor.codes.shape[1]
    group = min(tensor.group_size, columns)
    if columns % block:
        said = f"{name} has {columns} columns, not a multiple of {block}"
        raise RangeError(f"{said}: {_advice(columns, group)}")
    if group % block and block % group:
        said = f"{name}: groups of {group} do not fit blocks of {block}"
        raise RangeError(f"{said}: {_advice(columns, group)}")
    step = math.gcd(group, block)
    fine = np.repeat(tensor.scales, group // step, axis=1)[:, : columns // step]
    parts = (len(fine), columns // block, block // step)
    used = tensor.codes.reshape(*parts, step).any(axis=3)
    scales = np.where(used, fine.reshape(parts), 0)
    # A part without codes takes the scale of the first part with codes.
    shared = np.take_along_axis(scales, used.argmax(axis=2)[..., None], axis=2)
    if np.any((scales != shared) & used):
        said = f"{name} has neighbouring groups with different scales, a block of {block} has one"
        raise RangeError(f"{said}: {_advice(columns, group)}")
    return tensor.codes, shared[..., 0]


def _advice(columns: int, group: int) -> str:
    """Formats without loss: f16, and q8_0 where its blocks lie within groups."""
    if columns % _EIGHT or group % _EIGHT:
        return "write f16, which loses nothing"
    larger = "" if columns % _LARGE else f", or train with groups of {_LARGE} for tq2_0"
    return f"write f16 or q8_0, which lose nothing{larger}"


def write(
    path: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    kind: str,
    tokenizer: Path | None = None,
) -> None:
    """Writes the tensors of a decoder, by our names; a failure leaves no file."""
    # The target of a link is replaced, which may be a file of the checkpoint.
    if path.resolve().suffix.lower() != ".gguf":
        raise RangeError(f"{path} is not the name of a GGUF file: it must end in .gguf")
    if kind not in FORMATS:
        raise RangeError(f"the format must be one of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "q2_0":
        warnings.warn(
            "q2_0 means blocks of 128 in the fork that ships ternary models and blocks of 64 in"
            " llama.cpp, under the same number: only the fork reads this file right",
            stacklevel=2,
        )
    encoded = _encoded(config, tensors, kind)
    write_file(path, lambda partial: _write(partial, config, encoded, tokenizer))


def _write(path: Path, config: Any, encoded: _Encoded, tokenizer: Path | None) -> None:
    writer = package().GGUFWriter(path, str(config.family))
    _describe(writer, config)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, config.vocab)
    for name, (shape, array, type_number) in encoded.items():
        writer.add_tensor_info(name, shape, array.dtype, array.nbytes, type_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, array, _ in encoded.values():
        writer.write_tensor_data(array)
    writer.close()


def _encoded(config: Any, tensors: Mapping[str, Tensor], kind: str) -> _Encoded:
    types = package().GGMLQuantizationType
    known = {int(one) for one in types}
    made: _Encoded = {}
    for ours, theirs in tensor_names(config).items():
        tensor = tensors[ours]
        if tensor.codes is None:
            assert tensor.values is not None
            values = tensor.values.astype(np.float32)
            made[theirs] = (values.shape, values, types.F32)
            continue
        turned = _turned(ours, tensor, config)
        array, number = encode(ours, turned, kind)
        # An int8 view: the writer then takes the shape as the matrix's own.
        stored = array if number == 1 else array.view(np.int8)
        assert turned.codes is not None
        made[theirs] = (turned.codes.shape, stored, types(number) if number in known else number)
    return made


def _turned(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Reorders rows for Llama: llama.cpp rotates neighbouring elements of a head, we rotate halves.

    Rows keep their groups, so this is lossless. Qwen3 files have our order.
    """
    heads = {"attention.q": config.heads, "attention.k": config.kv_heads}
    part = next((heads[end] for end in heads if name.endswith(end)), None)
    if config.family == "qwen3" or part is None:
        return tensor
    order = interleaved(part, config.head_dim)
    assert tensor.codes is not None
    assert tensor.scales is not None
    return tensor._replace(codes=tensor.codes[order], scales=tensor.scales[order])


def tensor_names(config: Any) -> dict[str, str]:
    """Our name of every tensor (without `.weight`) and the file's."""
    if config.family not in ("llama", "qwen3") or config.window is not None:
        raise RangeError(f"{config.family} models are not written as GGUF: llama and qwen3 are")
    if config.attention_bias or config.mlp_bias:
        raise RangeError("a model with biases is not all ternary")
    names = {"embedding": "token_embd.weight", "norm": "output_norm.weight"}
    if not config.tied:
        names["head"] = "output.weight"
    inner = {
        "attention_norm": "attn_norm",
        "attention.q": "attn_q",
        "attention.k": "attn_k",
        "attention.v": "attn_v",
        "attention.out": "attn_output",
        "feedforward_norm": "ffn_norm",
        "feedforward.gate": "ffn_gate",
        "feedforward.up": "ffn_up",
        "feedforward.down": "ffn_down",
    }
    if config.qk_norm:
        inner |= {"attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm"}
    for layer in range(config.layers):
        names |= {f"layers.{layer}.{a}": f"blk.{layer}.{b}.weight" for a, b in inner.items()}
    return names


def _describe(writer: Any, config: Any) -> None:
    writer.add_name("trapline ternary")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab)
    if config.rope is None or config.rope.kind != "default":
        raise RangeError("only plain rotary positions are written as GGUF")
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)


def _add_tokenizer(writer: Any, path: Path, vocab: int) -> None:
    """Adds a byte-level BPE tokeniser with GPT-2's pre-tokeniser."""
    words, special, merges = _read_tokenizer(path)
    tokens = [words.get(number, f"[unused{number}]") for number in range(vocab)]
    kinds = package().TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if word in special else kinds.NORMAL for word in tokens])
    writer.add_token_merges(merges)
    ends = end_ids(path.parent) or [special[one] for one in ("</s>",) if one in special]
    if ends:
        writer.add_eos_token_id(ends[0])
        # Readers require a start token, although the model has none.
        writer.add_bos_token_id(ends[0])
        writer.add_add_bos_token(False)


class _Words(NamedTuple):
    """The parts of a tokeniser that a file stores."""

    words: dict[int, str]
    special: dict[str, int]
    merges: list[str]


def _read_tokenizer(path: Path) -> _Words:
    """Raises RangeError unless it is byte-level BPE, which readers assume."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        splits = raw.get("pre_tokenizer") or {}
        parts = [dict(part) for part in splits.get("pretokenizers", [splits])]
        special = {one["content"]: one["id"] for one in raw.get("added_tokens", [])}
        numbers = dict(raw["model"]["vocab"]) | special
        merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
        is_bpe = raw["model"]["type"] == "BPE"
    except (ValueError, TypeError, KeyError, AttributeError):  # other JSON, or none
        raise RangeError(f"{path} is not a byte-level BPE tokeniser") from None
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    if not is_bpe or not byte_level:
        raise RangeError(f"{path} is not a byte-level BPE tokeniser")
    _warn_of_differences(path, parts, byte_level[0], raw.get("normalizer"))
    return _Words({number: word for word, number in numbers.items()}, special, merges)


def _warn_of_differences(
    path: Path, parts: list[dict[str, Any]], byte_level: dict[str, Any], normaliser: Any
) -> None:
    """Warns where the file cannot describe the pre-tokeniser or normaliser."""
    said = []
    if len(parts) > 1 or not byte_level.get("use_regex", True):
        said.append("splits text otherwise than")
    if normaliser is not None or byte_level.get("add_prefix_space"):
        said.append("changes text before it splits it, unlike")
    for does in said:
        warnings.warn(
            f"{path} {does} GPT-2's tokeniser, which the file names: the model is the same, but"
            " other tools may cut a text into other tokens",
            stacklevel=2,
        )
