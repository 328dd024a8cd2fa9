"""Reads and writes the weights of Hugging Face checkpoints."""

import json
import os
from collections.abc import Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.decoder import fp8
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.config_dict import as_dict
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.tensor_names import tensor_pairs
from trapline.gold.errors import DTypeError, RangeError, ShapeError, UnsupportedError

NetworkT = TypeVar("NetworkT", bound=Network)
#: The file that maps tensors to the files of a sharded checkpoint.
INDEX = "model.safetensors.index.json"
#: Constants that older files store beside the weights of a layer.
_CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype by its name; refuses what weights cannot have."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and found not in _DTYPES:
        raise DTypeError(f"dtype must be a float of 16, 32 or 64 bits, got {found}")
    assert not isinstance(found, str)
    return found


def checked_device(device: torch.device | str) -> torch.device:
    """The device by its name; refuses CUDA where there is none."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise RangeError(f"device must be 'cpu' or 'cuda', got {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device is 'cuda', but this machine has no CUDA device")
    return found


def from_tensors(
    model: type[NetworkT],
    config: DecoderConfig,
    theirs: dict[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> NetworkT:
    """A model with these tensors, named as in a checkpoint; shares their memory if possible."""
    with torch.device("meta"):
        decoder = model(config)
    ours = dict(decoder.named_parameters())
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for pair in tensor_pairs(config, ours):
        names = pair.find(theirs)
        for name in names:
            _check_tensor(name, theirs[name], pair.shape(ours))
        found |= pair.read([theirs[name] for name in names], ours)
        used.update(names)
    _refuse_unexpected(theirs.keys() - used)
    # One dtype throughout, although some checkpoints store norms in another.
    kind = dtype or found["embedding.weight"].dtype
    state = {name: one.to(device, kind).contiguous() for name, one in found.items()}
    decoder.load_state_dict(state, strict=False, assign=True)
    if decoder.config.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.eval()


def _check_tensor(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.dtype not in _DTYPES:
        given = str(tensor.dtype).removeprefix("torch.")
        raise DTypeError(f"{name} is {given}; weights must be floats of 16, 32 or 64 bits")


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
    method = quantisation_settings(folder).get("quant_method")
    return None if method is None else str(method)


def quantisation_settings(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of `config.json`; empty without one."""
    try:
        declared = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
            "quantization_config"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return declared if isinstance(declared, dict) else {}


def text_part(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The language model of a checkpoint that also has images; other tensors are left out."""
    prefixes = ("model.language_model.", "language_model.model.", "language_model.")
    if not any(name.startswith(prefixes) for name in tensors):
        return tensors
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for prefix, instead in zip(prefixes, ("model.", "model.", ""), strict=True):
            if name.startswith(prefix):
                found[instead + name.removeprefix(prefix)] = tensor
                break
        else:
            if name == "lm_head.weight":
                found[name] = tensor
    return found


def read_weights(folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All tensors of a dense or FP8 checkpoint; refuses other quantised ones."""
    settings = quantisation_settings(folder)
    method = settings.get("quant_method")
    if method is None:
        return text_part(read_tensors(folder))
    if method not in fp8.METHODS:
        raise RangeError(
            f"quant_method must be trapline-ternary, {' or '.join(fp8.METHODS)}, got {method!r}; "
            "use the checkpoint before its quantisation"
        )
    return fp8.dequantized(text_part(read_tensors(folder)), settings, dtype)


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
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
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
        (folder / "config.json").write_text(
            json.dumps(self.settings, indent=1) + "\n", encoding="utf-8"
        )
        for name, names in self.shards.items():
            save_tensors({one: self.tensors[one] for one in names}, folder / name)
        if len(self.shards) > 1:
            total = sum(one.numel() * one.element_size() for one in self.tensors.values())
            where = {one: name for name, names in self.shards.items() for one in names}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


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
    tensors = {
        name: tensor.cpu()
        for pair in tensor_pairs(decoder.config, ours)
        for name, tensor in pair.write(ours).items()
    }
    settings = as_dict(decoder.config, decoder.norm.weight.dtype)
    return CheckpointFiles(settings, tensors, _sharded(tensors, shard_bytes))


def check_shard_bytes(shard_bytes: int) -> None:
    checks.integers(shard_bytes=shard_bytes)
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
