"""A drafter as two files: `drafter.json` and `drafter.safetensors`."""

import json
from pathlib import Path
from typing import Any

import torch

from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.config_values import positive, read_table, size
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.weights import load_tensors, save_tensors
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding.drafter import DFlash, DrafterConfig

_SIZES = ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "hidden", "context")


def save(model: DFlash, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write both files; the weights in `dtype` if given."""
    folder, config = Path(folder), model.config
    written: dict[str, Any] = {
        "model_type": "dflash",
        **{name: getattr(config.body, name) for name in _SIZES},
        "norm_eps": config.body.norm_eps,
        "rope_theta": (config.body.rope or RopeConfig()).theta,
        "target_layers": list(config.target_layers),
        "block": config.block,
        "mask_id": config.mask_id,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drafter.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    tensors = {
        name: value.detach().to(dtype or value.dtype).cpu()
        for name, value in model.named_parameters()
    }
    save_tensors(tensors, folder / "drafter.safetensors")


def load(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DFlash:
    """Read both files; raises for a missing or unfitting file, field or tensor."""
    folder = Path(folder)
    for name in ("drafter.json", "drafter.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} is not a drafter: it has no {name}; give the folder of a trained "
                "drafter, or draft by prompt lookup, which needs none"
            )
    model = DFlash(_config(read_table(folder / "drafter.json")))
    tensors = load_tensors(folder / "drafter.safetensors")
    for name, parameter in model.named_parameters():
        if name not in tensors:
            raise ShapeError(f"drafter.safetensors has no tensor {name}")
        if tensors[name].shape != parameter.shape:
            shapes = tuple(tensors[name].shape), tuple(parameter.shape)
            raise ShapeError(f"{name} has shape {shapes[0]}, expected {shapes[1]}")
        parameter.data = tensors[name]
    return model.to(device=device, dtype=dtype).eval()


def _config(raw: dict[str, Any]) -> DrafterConfig:
    try:
        sizes: dict[str, Any] = {name: size(raw, name) for name in _SIZES}
        body = DecoderConfig(
            family="qwen3",
            **sizes,
            norm_eps=positive(raw, "norm_eps"),
            tied=True,
            rope=RopeConfig(theta=positive(raw, "rope_theta")),
            qk_norm=True,
        )
        layers, mask = raw["target_layers"], raw["mask_id"]
        if not isinstance(layers, list) or not all(type(one) is int for one in [*layers, mask]):
            raise RangeError(
                f"target_layers and mask_id must be integers, got {layers!r}, {mask!r}"
            )
        return DrafterConfig(body, tuple(layers), size(raw, "block"), mask)
    except KeyError as error:
        raise RangeError(f"drafter.json has no {error}") from None
