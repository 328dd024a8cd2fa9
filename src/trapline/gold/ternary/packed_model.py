"""Modules with packed weights, which never hold the dense matrix, and their checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from trapline.gold.arithmetic import cdiv
from trapline.gold.atomic_write import write_file
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.config_dict import as_dict
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.weights import NetworkT, read_tensors, save_tensors
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.ternary import pack as storage
from trapline.gold.ternary.layers import TernaryEmbedding, TernaryLinear
from trapline.gold.ternary.packed_linear import packed_linear, packed_rows

METHOD = "trapline-ternary"
_FILE = "model.safetensors"


class _Packed(nn.Module):
    """A matrix (N, K) stored as runtime plane and scales."""

    codes: Tensor
    scales: Tensor

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        columns: int,
        group_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.columns, self.group_size, self.dtype = columns, group_size, dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casting a model changes the dtype of activations, not of scales."""
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.scales.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scales.device)).dtype
        return self

    def extra_repr(self) -> str:
        return f"{self.columns} → {self.codes.shape[0]}, groups of {self.group_size}, packed"


class PackedLinear(_Packed):
    """y = x Wᵀ, read from packed codes."""

    _seen: tuple[int, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise DTypeError(f"x must be a torch tensor, got {type(x).__name__}")
        if not x.dim() or x.shape[-1] != self.columns:
            found = x.shape[-1] if x.dim() else "no"
            raise ShapeError(f"x has {found} columns, this layer takes {self.columns}")
        settled = x.is_cuda and self.weights_settled()
        return packed_linear(x, self.codes, self.scales, self.group_size, settled=settled)

    def weights_settled(self) -> bool:
        """Whether the weights are unchanged since the last call: no pending kernel writes them."""
        if self.codes.is_inference() or self.scales.is_inference():
            return False  # inference tensors have no version counter
        both = (self.codes, self.scales)
        now = tuple(number for one in both for number in (one.data_ptr(), one._version))
        before, self._seen = self._seen, now
        return now == before


class PackedEmbedding(_Packed):
    """Rows of a packed table."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = packed_rows(tokens, self.codes, self.scales, self.columns, self.group_size)
        return rows.to(self.dtype)


def pack_model(model: nn.Module) -> nn.Module:
    """Replaces every ternary module by a packed one, in place; shared weights stay shared."""
    planes: dict[int, tuple[Tensor, Tensor]] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, TernaryLinear | TernaryEmbedding):
                kind = PackedLinear if isinstance(child, TernaryLinear) else PackedEmbedding
                if id(child.weight) not in planes:
                    codes, scales = child.ternary()
                    plane = torch.from_numpy(storage.pack(codes.cpu().numpy()))
                    planes[id(child.weight)] = plane.to(codes.device), scales
                columns = child.weight.shape[1]
                twin = kind(*planes[id(child.weight)], columns, child.group_size)
                setattr(parent, name, twin)
    return model.requires_grad_(False)


def packed_bytes(model: nn.Module) -> int:
    """Bytes of the model's tensors; shared tensors count once."""
    tensors = {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()] if t.numel()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def is_packed(model: nn.Module) -> bool:
    """Whether any of the model's matrices is packed."""
    return any(isinstance(module, _Packed) for module in model.modules())


def save_packed(decoder: Network, folder: str | Path) -> None:
    """Writes `config.json` and one safetensors file of planes, scales and dense norms.

    Existing files stay until the new ones are complete.
    """
    folder = Path(folder)
    packed = {n: m for n, m in decoder.named_modules() if isinstance(m, _Packed)}
    if not packed:
        raise RangeError("this decoder has no packed weights: pack_model makes them")
    dense = [n for n, m in decoder.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    if dense:
        raise RangeError(f"{dense[0]} is dense; a packed checkpoint has packed matrices only")
    groups = {module.group_size for module in packed.values()}
    if len(groups) > 1:
        raise RangeError(f"one group size a checkpoint, got {sorted(groups)}")
    tensors = {name: value.detach().contiguous() for name, value in decoder.state_dict().items()}
    if decoder.config.tied:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("head.")}
    folder.mkdir(parents=True, exist_ok=True)
    raw = as_dict(decoder.config, torch.float32) | {
        "quantization_config": {"quant_method": METHOD, "group_size": groups.pop(), "bits": 2}
    }
    write_file(folder / _FILE, lambda place: save_tensors(tensors, place))
    text = json.dumps(raw, indent=1) + "\n"
    write_file(folder / "config.json", lambda place: place.write_text(text, encoding="utf-8"))


def load_packed(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    model: type[NetworkT],
) -> NetworkT:
    """Reads what `save_packed` wrote, without ever creating a dense matrix.

    `dtype` is that of norms and activations; default: float32 on a CPU, bfloat16 elsewhere.
    """
    folder = Path(folder)
    kind = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    group_size = raw["quantization_config"].get("group_size")
    if type(group_size) is not int or group_size < 1:
        raise RangeError(f"group_size of the packed weights must be positive, got {group_size!r}")
    with torch.device("meta"):
        decoder = model(from_dict(raw))
    tensors = {name: value.to(device) for name, value in read_tensors(folder).items()}
    _put_matrices(decoder, tensors, group_size, kind)
    for name, parameter in list(decoder.named_parameters()):
        value = _taken(tensors, name, tuple(parameter.shape))
        owner, _, last = name.rpartition(".")
        fixed = nn.Parameter(value.to(kind), requires_grad=False)
        setattr(decoder.get_submodule(owner), last, fixed)
    return decoder.eval()


def _put_matrices(
    decoder: Network, tensors: dict[str, Tensor], group_size: int, dtype: torch.dtype
) -> None:
    kinds = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}
    for name, child in list(decoder.named_modules()):
        kind = kinds.get(type(child))
        if kind is None:
            continue
        rows, columns = child.weight.shape
        source = "embedding" if name == "head" and decoder.config.tied else name
        codes = _taken(tensors, f"{source}.codes", (rows, cdiv(columns, 4)))
        scales = _taken(tensors, f"{source}.scales", (rows, cdiv(columns, group_size)))

        owner, _, last = name.rpartition(".")
        setattr(decoder.get_submodule(owner), last, kind(codes, scales, columns, group_size, dtype))


def _taken(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise ShapeError(f"the checkpoint has no {name}")
    if tuple(found.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(found.shape)}, expected {shape}")
    return found
