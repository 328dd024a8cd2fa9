"""Ternary weights in torch: quantiser, straight-through estimator, modules, conversion of a model.

A module keeps a dense latent weight to train. Its forward pass uses the ternary weight, with the
scale rounded to float16, so that the trained model and the shipped one are the same.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.c_pointer import in_cpu_memory
from trapline.gold.errors import RangeError
from trapline.gold.ternary.quantize import GROUP, LARGEST_SCALE, METHODS, ROOM, THRESHOLDS


def ternarize(w: Tensor, group_size: int = GROUP, method: str = "absmean") -> tuple[Tensor, Tensor]:
    """codes int8 like w, scales float16 (…, ceil(n / group_size)), as `oracle.ternarize`."""
    columns = w.shape[-1]
    group_size = _within(group_size, columns)
    groups = cdiv(columns, group_size)
    magnitude = w.detach().abs().double() * ROOM
    magnitude = functional.pad(magnitude, (0, groups * group_size - columns))
    magnitude = magnitude.reshape(*w.shape[:-1], groups, group_size)
    sizes = (columns - torch.arange(groups, device=w.device) * group_size).clamp(max=group_size)
    counts = _chosen(magnitude, sizes, method)
    number = counts.sum(-1).clamp(min=1)
    means = (magnitude * counts).sum(-1) / number
    scales = _half(means.clamp(max=LARGEST_SCALE * ROOM) / ROOM)
    counts = counts & (scales[..., None] > 0)
    flags = counts.flatten(-2)[..., :columns]
    return (w.detach().sign() * flags).to(torch.int8), scales


def has_readable_infinities(w: Tensor) -> bool:
    """Whether w has NaN or ±inf; False where looking would wait for a GPU or break a trace."""
    if not in_cpu_memory(w) or torch.compiler.is_compiling():
        return False
    return not bool(torch.isfinite(w).all())


def _half(x: Tensor) -> Tensor:
    """float64 to float16, rounded once; many devices convert via float32 and round twice.

    The bits that float32 cannot hold are folded into its last bit, so that no false tie arises.
    """
    bits = x.view(torch.int64)
    lost = bits & ((1 << 29) - 1)
    kept = (bits - lost) | ((lost != 0).long() << 29)
    return kept.view(torch.float64).half()


def dequantize(codes: Tensor, scales: Tensor, group_size: int = GROUP) -> Tensor:
    """code · scale of its group, float32."""
    columns = codes.shape[-1]
    wide = scales.float().repeat_interleave(_within(group_size, columns), dim=-1)[..., :columns]
    return codes.float() * wide


def _within(group_size: int, columns: int) -> int:
    """Cuts a group wider than the row to the row: padding it would waste memory."""
    return min(group_size, max(1, columns))


def _chosen(magnitude: Tensor, sizes: Tensor, method: str) -> Tensor:
    if method == "lstsq":
        return _least_squares(magnitude)
    # Sums instead of means, whose rounding would decide ties.
    return magnitude * sizes[:, None] > THRESHOLDS[method] * magnitude.sum(-1, keepdim=True)


def _least_squares(magnitude: Tensor) -> Tensor:
    if not magnitude.numel():
        return torch.zeros_like(magnitude, dtype=torch.bool)
    falling, order = magnitude.sort(dim=-1, descending=True, stable=True)
    tiny = torch.finfo(torch.float64).tiny
    relative = falling / magnitude.amax(-1, keepdim=True).clamp(min=tiny)
    places = torch.arange(1, magnitude.shape[-1] + 1, device=magnitude.device)
    best = (relative.cumsum(-1) ** 2 / places).argmax(-1, keepdim=True)
    kept = torch.zeros_like(magnitude, dtype=torch.bool)
    kept.scatter_(-1, order, places <= best + 1)
    return kept & (magnitude > 0)


def straight_through(
    w: Tensor, group_size: int = GROUP, method: str = "absmean", gain: Tensor | None = None
) -> Tensor:
    """The ternary weight of a latent one, with the identity as its gradient.

    w − w is exactly 0 with derivative 1. An `autograd.Function` would do the same, but torch 2.11
    compiles one around `ternarize` to a gradient of zero.
    """
    return _hard(w, group_size, method, gain) + (w - w.detach())


def _hard(w: Tensor, group_size: int, method: str, gain: Tensor | None) -> Tensor:
    """The ternary weight, differentiable with respect to the gains only."""
    codes, scales = ternarize(w, group_size, method)
    if gain is not None:
        # g − g is exactly 0: the stored value with the derivative of the product.
        free = (gain - gain.detach()).view(scales.shape)
        scales = _times(scales, gain).float() + scales.float() * free
    return dequantize(codes, scales, group_size).to(w.dtype)


def _times(scales: Tensor, gain: Tensor) -> Tensor:
    """The stored scales: multiplied by the gains, clamped and rounded to float16."""
    product = scales.float() * gain.detach().view(scales.shape)
    return product.clamp(-LARGEST_SCALE, LARGEST_SCALE).half()


class _Latent(nn.Module):
    """A latent weight and how it becomes ternary."""

    weight: nn.Parameter
    #: The fraction of the latent weight in the forward pass; None: always 0.
    softness: Tensor | None = None
    #: Learned factors of the group scales; None: the latent weights determine the scales.
    gain: nn.Parameter | None

    def __init__(self, weight: Tensor, group_size: int, method: str) -> None:
        super().__init__()
        checks.integer_between(1, 2**31, group_size=group_size)
        if method not in METHODS:
            raise RangeError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        self.weight = nn.Parameter(weight)
        self.register_parameter("gain", None)
        self.group_size, self.method = group_size, method

    def ternary_weight(self) -> Tensor:
        """The ternary weight, as exported."""
        return straight_through(self.weight, self.group_size, self.method, self.gain)

    def forward_weight(self) -> Tensor:
        """The weight of the forward pass: ternary, mixed with the latent one by `softness`."""
        if self.softness is None:
            return self.ternary_weight()
        latent = self.weight.detach()
        hard = _hard(self.weight, self.group_size, self.method, self.gain)
        # Exactly the latent weight at 1 and exactly the ternary one at 0.
        return torch.lerp(hard, latent, self.softness) + (self.weight - latent)

    def ternary(self) -> tuple[Tensor, Tensor]:
        """The stored codes and scales."""
        codes, scales = ternarize(self.weight, self.group_size, self.method)
        if self.gain is None:
            return codes, scales
        scales = _times(scales, self.gain)
        # A group of scale 0 has no codes, as in the quantiser.
        return codes * (dequantize(codes, scales, self.group_size) != 0), scales

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{columns} → {rows}, groups of {self.group_size}, {self.method}"


class TernaryLinear(_Latent):
    """y = x Wᵀ with a ternary W (out, in). There is no bias: it would not be ternary."""

    def __init__(
        self, in_features: int, out_features: int, group_size: int = GROUP, method: str = "absmean"
    ) -> None:
        checks.integer_between(1, 2**31, in_features=in_features, out_features=out_features)
        spread = in_features**-0.5
        super().__init__(torch.randn(out_features, in_features) * spread, group_size, method)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.forward_weight())


class TernaryEmbedding(_Latent):
    """Rows of a ternary table (vocabulary, width)."""

    def __init__(
        self, num_embeddings: int, dim: int, group_size: int = GROUP, method: str = "absmean"
    ) -> None:
        super().__init__(torch.randn(num_embeddings, dim), group_size, method)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.forward_weight())


class TiedHead(nn.Module):
    """Logits from the ternary table of an embedding."""

    def __init__(self, embedding: TernaryEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.embedding.forward_weight())


def latents(model: nn.Module) -> list[_Latent]:
    """The ternary modules of a model, one for each shared weight."""
    found: dict[int, _Latent] = {}
    for module in model.modules():
        if isinstance(module, _Latent):
            found.setdefault(id(module.weight), module)
    return list(found.values())


def soften(model: nn.Module, softness: Tensor) -> None:
    """Makes every ternary module read its softness from one tensor, which a trainer updates."""
    for module in model.modules():
        if isinstance(module, _Latent):
            module.softness = softness


def learn_scales(model: nn.Module) -> None:
    """Adds a learnable factor, initially 1, to every group's scale; shared tables share it.

    Without it a scale changes only when its latent weights change together.
    """
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _Latent):
            scales = module.ternary()[1]
            # One axis, so that optimisers and reports do not treat it as a matrix.
            gain = nn.Parameter(
                torch.ones(scales.numel(), dtype=torch.float32, device=scales.device)
            )
            module.gain = known.setdefault(id(module.weight), gain)


class Share(NamedTuple):
    """One parameter of a model in a coverage report."""

    name: str
    shape: tuple[int, ...]
    ternary: bool
    share: float  # of all parameters of the model


def convert(model: nn.Module, group_size: int = GROUP, method: str = "absmean") -> list[Share]:
    """Replaces every `nn.Linear` and `nn.Embedding` inside, in place, and reports the coverage.

    The weights become latent weights; shared weights stay shared. A linear layer with a bias raises
    RangeError, because the bias would stay dense.
    """
    check_trainable(model)
    known: dict[int, _Latent] = {}
    for parent, name, child in list(_replaceable(model)):
        setattr(parent, name, _ternary_twin(child, known, group_size, method))
    return coverage(model)


def check_trainable(model: nn.Module) -> None:
    """Refuses models without trainable matrices: packed weights are not parameters."""
    if not latents(model) and not any(_replaceable(model)):
        raise RangeError("no dense weights to make ternary; packed weights cannot be trained")


def coverage(model: nn.Module) -> list[Share]:
    """Every parameter by name, whether it is ternary, and its share of all of them."""
    ternary = {id(p) for module in latents(model) for p in (module.weight, module.gain)}
    parameters = list(model.named_parameters())
    total = max(1, sum(p.numel() for _, p in parameters))
    return [
        Share(name, tuple(p.shape), id(p) in ternary, p.numel() / total) for name, p in parameters
    ]


def assert_all_ternary(model: nn.Module) -> None:
    """Every parameter with two or more axes is ternary; norms and other vectors may be dense."""
    dense = [s.name for s in coverage(model) if not s.ternary and len(s.shape) > 1]
    if dense:
        raise RangeError(f"not ternary: {', '.join(dense)}")


def dequantized(model: Any) -> Any:
    """A copy of a model with plain `nn.Linear` and `nn.Embedding` that hold the ternary values."""
    twin = copy.deepcopy(model)
    shared: dict[int, nn.Parameter] = {}
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _Latent):
                value = child.ternary_weight().detach()
                weight = shared.setdefault(id(child.weight), nn.Parameter(value))
                setattr(parent, name, _plain(child, weight))
    return twin


def _plain(child: _Latent, weight: nn.Parameter) -> nn.Module:
    rows, columns = weight.shape
    with torch.device("meta"):
        plain: nn.Module = (
            nn.Linear(columns, rows, bias=False)
            if isinstance(child, TernaryLinear)
            else nn.Embedding(rows, columns)
        )
    plain.weight = weight
    return plain


def _replaceable(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Embedding]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding):
                yield parent, name, child


def _ternary_twin(
    child: nn.Linear | nn.Embedding, known: dict[int, _Latent], group_size: int, method: str
) -> _Latent:
    kind = TernaryLinear if isinstance(child, nn.Linear) else TernaryEmbedding
    if isinstance(child, nn.Linear) and child.bias is not None:
        raise RangeError("a linear layer with a bias cannot become ternary as a whole")
    rows, columns = child.weight.shape
    sizes = (columns, rows) if kind is TernaryLinear else (rows, columns)
    twin: _Latent = kind(*sizes, group_size, method)
    first = known.setdefault(id(child.weight), twin)
    twin.weight = first.weight if first is not twin else nn.Parameter(child.weight.detach().clone())
    return twin
