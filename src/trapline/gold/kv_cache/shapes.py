"""Models, GPUs and settings that determine the size and cost of a KV cache.

A layer of full attention stores 2·G·D elements per token, a sliding one the same for its last W
tokens only, a latent one its compressed vector. Quantised elements add a scale of 16 bits per token
and head.
"""

import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trapline.gold.errors import RangeError

Unit = Literal["gib", "gb"]
#: A vendor's "80 GB" read as 80 · 2³⁰ or as 80 · 10⁹ bytes.
UNITS: dict[Unit, int] = {"gib": 2**30, "gb": 10**9}
SCALE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a model. Parameters in billions."""

    name: str
    #: The repository on the Hugging Face hub, and where the figures below were checked.
    source: str
    checked: str = ""
    parameters: float
    active: float | None = None
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    sliding_layers: int = 0
    window: int = 0
    context: int

    def layer_bytes(self, kv_bits: float) -> float:
        """Bytes per token in one layer."""
        if self.latent:
            return self.latent * kv_bits / 8
        scales = SCALE_BITS if kv_bits <= 8 else 0
        return 2 * self.kv_heads * (self.head_dim * kv_bits + scales) / 8

    def cache_bytes(self, tokens: int, kv_bits: float) -> float:
        """Bytes of one sequence of this length."""
        full = self.layers - self.sliding_layers
        positions = full * tokens + self.sliding_layers * min(tokens, self.window)
        return self.layer_bytes(kv_bits) * positions

    def weight_bytes(self, bits: float) -> float:
        return self.parameters * 1e9 * bits / 8

    def step_flops(self, tokens: int) -> float:
        """FLOPs of one new token: two per weight, and q·k and p·v over the cached positions."""
        width = self.latent or self.head_dim
        full = self.layers - self.sliding_layers
        seen = full * tokens + self.sliding_layers * min(tokens, self.window)
        return 2e9 * (self.active or self.parameters) + 4 * self.query_heads * width * seen


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Memory in the vendor's gigabytes, bandwidth in GB/s, dense 16 bit TFLOP/s."""

    name: str
    memory: int
    bandwidth: float
    tflops: float


#: Limits far outside of practice, which keep the arithmetic inside the range of floats.
_FEWEST_BITS, _MOST_BITS, _MOST_GIB = 0.01, 1024, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The assumptions of a calculation, printed with its result."""

    kv_bits: float = 16
    weight_bits: float = 16
    utilization: float = 0.9
    reserve_gib: float = 0.0
    unit: Unit = "gib"
    block_size: int = 16
    sequences: int = 1

    def __post_init__(self) -> None:
        for bits in (self.kv_bits, self.weight_bits):
            if not _FEWEST_BITS <= bits <= _MOST_BITS:
                raise RangeError(f"bits must be {_FEWEST_BITS} to {_MOST_BITS}, got {bits}")
        if not 0 < self.utilization <= 1:
            raise RangeError(f"utilization must be in (0, 1], got {self.utilization}")
        if not 0 <= self.reserve_gib <= _MOST_GIB:
            raise RangeError(f"the reserve must be 0 to {_MOST_GIB} GiB, got {self.reserve_gib}")
        if self.unit not in UNITS:
            raise RangeError(f"unit must be gib or gb, got {self.unit!r}")
        if min(self.block_size, self.sequences) < 1:
            raise RangeError("block size and number of sequences must be at least 1")


@cache
def _shapes() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))


@cache
def models() -> dict[str, ModelShape]:
    """The models of `shapes.toml` by name."""
    shapes = _shapes()
    rows = ({"checked": shapes["checked"], **row} for row in shapes["model"])
    return {row["name"]: ModelShape(**row) for row in rows}


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs of `shapes.toml` by name."""
    return {row["name"]: Gpu(**row) for row in _shapes()["gpu"]}


#: Words in a repository name that do not affect the shape of the model.
_NOT_SHAPE = {"meta", "instruct", "chat", "it", "base", "pt", "hf", "bf16"}


def find_model(name: str) -> ModelShape:
    """The model of this name, as `models` or the Hugging Face hub spell it.

    Case, organisation, separators and words such as `-Instruct` do not matter. An unknown name is a
    RangeError that lists similar ones.
    """
    known = {
        _key(spelling): one for one in models().values() for spelling in (one.source, one.name)
    }
    if (found := known.get(_key(name))) is not None:
        return found
    near = get_close_matches(name.split("/")[-1].lower(), models(), n=5, cutoff=0.5)
    listed = f"similar names: {', '.join(near)}" if near else f"there are: {', '.join(models())}"
    raise RangeError(f"unknown model {name!r}; {listed}")


def _key(name: str) -> str:
    """`meta-llama/Meta-Llama-3-8B-Instruct` and `llama3_8b` → `llama38b`."""
    words = re.split(r"[-_:\s]+", name.strip().lower().split("/")[-1])
    return "".join(word for word in words if word not in _NOT_SHAPE)
