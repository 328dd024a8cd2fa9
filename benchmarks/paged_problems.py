"""Caches of pages for the paged benchmark: their shapes, and random contents."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold import paged_attention

DEVICE = "cuda"
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
#: What makes random codes times random scales about N(0, 1).
SPREAD = {"int8": 73.0, "fp8": 100.0, "int4": 4.6}


@dataclass(frozen=True)
class Case:
    """One query a row; every row has `length` positions unless `lengths` says more."""

    batch: int
    heads: int
    groups: int
    width: int
    length: int
    page: int = 16
    kind: str = "bf16"
    shuffled: bool = True
    #: The first positions that all rows share.
    shared: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return (
            f"B{self.batch} H{self.heads} G{self.groups} D{self.width} L{self.length}"
            f" page {self.page} {self.kind}"
        )

    @property
    def positions(self) -> int:
        return sum(self.lengths) if self.lengths else self.batch * self.length

    @property
    def bytes(self) -> int:
        """What has to be read, a shared prefix once."""
        row = {"bf16": 2 * self.width, "int4": self.width // 2 + 2}.get(self.kind, self.width + 2)
        alone = self.positions - self.batch * self.shared + self.shared
        return 2 * alone * self.groups * row

    @property
    def flops(self) -> int:
        return 4 * self.positions * self.heads * self.width


class Cache(NamedTuple):
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    lengths: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def attend(self, out: Tensor | None = None, **more: Any) -> Tensor:
        found: Tensor = paged_attention(
            *self[:5], k_scale=self.k_scale, v_scale=self.v_scale, out=out, **more
        )
        return found


ANCHORS = [
    Case(8, 32, 8, 128, 1024),
    Case(32, 32, 8, 128, 2048),
    Case(4, 64, 8, 128, 4096),
    Case(16, 32, 8, 128, 1535),
    Case(8, 16, 4, 64, 2000),
]
GOAL = Case(32, 32, 8, 128, 4096)
LONG = Case(32, 32, 8, 128, 8192)
ONE = Case(1, 32, 8, 128, 32768)
#: One long row among many short ones.
RAGGED = replace(GOAL, length=32768, lengths=(32768, *(1024,) * 15, *(3000,) * 16))
CASCADE = replace(GOAL, length=4096 + 256, shared=4096)
#: Draft trees and their number of nodes: many sequences or one, with long and short contexts.
TREES = [(replace(GOAL, batch=8), nodes) for nodes in (64, 32, 16)]
TREES += [(replace(GOAL, batch=1, length=length), 64) for length in (8192, 576, 192)]
TREES += [(replace(GOAL, batch=1, length=length), 16) for length in (8192, 512)]


def drawn(case: Case, seed: int) -> Cache:
    numbers = torch.Generator(DEVICE).manual_seed(seed)
    lengths = torch.tensor(case.lengths or [case.length] * case.batch).int()
    table = tables(case, lengths, seed)
    q = normal((case.batch, case.heads, case.width), numbers)
    shape = (int(table.max()) + 1, case.groups, case.page, case.width)
    (k, k_scale), (v, v_scale) = (pages(shape, case.kind, numbers) for _ in range(2))
    return Cache(q, k, v, table.to(DEVICE), lengths.to(DEVICE), k_scale, v_scale)


def tables(case: Case, lengths: Tensor, seed: int) -> Tensor:
    """(B, pages of the longest row); rows begin with the pages they share."""
    width = -(-int(lengths.max()) // case.page)
    used = -(-lengths // case.page)
    shared = case.shared // case.page
    own = int((used - shared).sum())
    order = torch.arange(shared + own)
    if case.shuffled:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
    table = torch.zeros((case.batch, width), dtype=torch.int32)
    at = shared
    for row, count in enumerate(used.tolist()):
        table[row, :shared] = order[:shared]
        table[row, shared:count] = order[at : at + count - shared]
        at += count - shared
    return table


def normal(shape: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=numbers, device=DEVICE, dtype=torch.bfloat16)


def pages(
    shape: tuple[int, ...], kind: str, numbers: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    if kind == "bf16":
        return normal(shape, numbers), None
    make: dict[str, Any] = {"generator": numbers, "device": DEVICE}
    scales = ((0.5 + torch.rand(shape[:-1], **make)) / SPREAD[kind]).half()
    if kind == "fp8":
        return (torch.randn(shape, **make) * 100).clamp(-448, 448).to(CODES[kind]), scales
    bytes_ = (*shape[:-1], shape[-1] // 2) if kind == "int4" else shape
    return torch.randint(0, 256, bytes_, **make, dtype=torch.uint8).view(CODES[kind]), scales


def laid_out(case: Case, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, G, R, D), k and v (B, G, L, D)."""
    numbers = torch.Generator(DEVICE).manual_seed(number)
    B, H, G, D = case.batch, case.heads, case.groups, case.width
    q = normal((B, G, H // G, D), numbers)
    k, v = (normal((B, G, case.length, D), numbers) for _ in range(2))
    return q, k, v


def in_float64(cache: Cache) -> Cache:
    """The same stored values; codes stay codes."""
    wide = cache._replace(q=cache.q.double())
    if cache.k_scale is None:
        wide = wide._replace(k_pages=cache.k_pages.double(), v_pages=cache.v_pages.double())
    return wide


def with_queries(case: Case, seed: int, count: int) -> Cache:
    """The case with `count` queries per sequence instead of one."""
    numbers = torch.Generator(DEVICE).manual_seed(seed + 1)
    return drawn(case, seed)._replace(
        q=normal((case.batch * count, case.heads, case.width), numbers)
    )


def binary_tree(nodes: int, device: str) -> Tensor:
    """bool (nodes, nodes): node n sees itself, its parent (n − 1) // 2, and so on to the root."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        sees[node] |= sees[(node - 1) // 2]
    return sees.to(device)
