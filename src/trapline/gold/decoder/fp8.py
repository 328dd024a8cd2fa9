"""Weights in FP8: codes of 8 bits with scales, read as dense weights.

| `quant_method` | codes | scales |
|---|---|---|
| `fp8` | `weight` | `weight_scale_inv`: one for each block, or one for all |
| `compressed-tensors` | `weight` | `weight_scale`: one for each block or row, or one for all |

A weight is its code times its scale. Scales of activations and caches are left out: both stay in
the model's dtype here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import RangeError, ShapeError

METHODS = ("fp8", "compressed-tensors")
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
#: Scales of activations and caches.
_UNUSED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")


def dequantized(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, with weights in `dtype` (that of its embedding by default)."""
    kind = dtype or tensors["model.embed_tokens.weight"].dtype
    if kind in _CODES:
        raise RangeError("the embedding is stored in 8 bits: give dtype, such as 'bfloat16'")
    block = _block_size(settings)
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            continue
        scale = next((name + end for end in _SCALES if name + end in tensors), None)
        if scale is None:
            raise ShapeError(f"{name} has 8 bits, but the checkpoint has no {name}_scale")
        made[name] = _weight(name, tensor, tensors[scale], block).to(kind)
        used.add(scale)
    rest = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in used and not name.endswith(_UNUSED)
    }
    return rest | made


def _weight(name: str, codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Codes times scales, in float32."""
    values, scale = codes.float(), scale.float()
    rows, columns = values.shape
    if scale.numel() == 1:
        return values * scale.reshape(())
    if tuple(scale.shape) in ((rows,), (rows, 1)):
        return values * scale.reshape(rows, 1)
    if block is None:
        raise ShapeError(f"the scales of {name} are {tuple(scale.shape)}, but no block size is set")
    high, wide = block
    expected = (cdiv(rows, high), cdiv(columns, wide))
    if tuple(scale.shape) != expected:
        raise ShapeError(
            f"the scales of {name} are {tuple(scale.shape)}, expected {expected} for blocks of "
            f"{high} × {wide}"
        )
    spread = scale.repeat_interleave(high, dim=0)[:rows]
    return values * spread.repeat_interleave(wide, dim=1)[:, :columns]


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of a block that the configuration names, if any."""
    found = settings.get("weight_block_size")
    if settings.get("quant_method") == "compressed-tensors":
        found = None
        for group in (settings.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
                raise RangeError(
                    "compressed-tensors are read if their weights are floats of 8 bits, got "
                    f"{weights.get('num_bits')!r} bits of {weights.get('type')!r}"
                )
            found = weights.get("block_structure") or found
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or any(type(n) is not int for n in found):
        raise RangeError(f"the block size of FP8 weights must be two integers, got {found!r}")
    return found[0], found[1]
