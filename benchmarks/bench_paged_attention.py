"""Decoding over a paged cache against torch's attention on a contiguous one, in the same run.

    PYTHONPATH=src python benchmarks/bench_paged_attention.py
    … --quick is a smaller sweep; --only WORD takes the cases whose name has the word

Bytes are those of the keys and values that must be read, with their scales. torch's kernels get the
cache contiguous and the query heads of a group as queries of one head, which is the same sum and
the best that they can do; "gathered" copies the pages first. Errors are against float64 on the
values that are stored.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from harness import Contender, Rules, ceilings, compare, errors, show, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from trapline.gold import paged_append, paged_attention

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


def ours(case: Case, name: str = "ours", **more: Any) -> Contender:
    def make(number: int) -> Callable[[], Tensor]:
        cache = drawn(case, number)
        out = torch.empty_like(cache.q)
        return lambda: cache.attend(out, **more)

    return Contender(name, make, bytes=case.bytes, flops=case.flops)


def contiguous(case: Case, backend: SDPBackend, name: str) -> Contender:
    def make(number: int) -> Callable[[], Tensor]:
        q, k, v = laid_out(case, number)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return call

    return Contender(name, make, bytes=case.bytes, flops=case.flops)


def laid_out(case: Case, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, G, R, D), k and v (B, G, L, D)."""
    numbers = torch.Generator(DEVICE).manual_seed(number)
    B, H, G, D = case.batch, case.heads, case.groups, case.width
    q = normal((B, G, H // G, D), numbers)
    k, v = (normal((B, G, case.length, D), numbers) for _ in range(2))
    return q, k, v


def gathered(case: Case, *, compiled: bool) -> Contender:
    """Pages copied to a contiguous cache, then torch's attention."""

    def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> Tensor:
        k, v = (x[table].transpose(1, 2).flatten(2, 3)[:, :, : case.length]
                for x in (k_pages, v_pages))  # fmt: skip
        return sdpa(q, k, v)

    call = torch.compile(attend, dynamic=False) if compiled else attend

    def make(number: int) -> Callable[[], Tensor]:
        cache = drawn(case, number)
        grouped = cache.q.view(case.batch, case.groups, -1, case.width)
        table = cache.table.long()
        return lambda: call(grouped, cache.k_pages, cache.v_pages, table)

    name = "gathered, compiled" if compiled else "gathered, eager"
    return Contender(name, make, bytes=case.bytes, flops=case.flops)


def peers(case: Case) -> list[Contender]:
    return [
        contiguous(case, SDPBackend.CUDNN_ATTENTION, "cuDNN, contiguous"),
        contiguous(case, SDPBackend.FLASH_ATTENTION, "FlashAttention-2, contiguous"),
        gathered(case, compiled=False),
        # Compiling takes longer than all the rest: once is enough to see what it does.
        *([gathered(case, compiled=True)] if case == GOAL else []),
    ]


def wrong(case: Case, *, with_peers: bool, **more: Any) -> dict[str, dict[str, float]]:
    """Of ours against float64 on the stored values, and of torch's kernels on their own inputs."""
    cache = drawn(case, 0)
    wide = cache._replace(q=cache.q.double())
    if cache.k_scale is None:
        wide = wide._replace(k_pages=cache.k_pages.double(), v_pages=cache.v_pages.double())
    found = {"ours": errors(cache.attend(**more), wide.attend(impl="torch"))}
    if with_peers:
        q, k, v = laid_out(case, 0)
        exact = sdpa(q.double(), k.double(), v.double())
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with suppress(RuntimeError), sdpa_kernel(backend):
                found[backend.name.lower()] = errors(sdpa(q, k, v), exact)
    return found


def measured(
    name: str, made: list[Contender], size: int, rules: Rules, wrongs: dict[str, Any]
) -> dict[str, Any]:
    print(name)
    times = compare([*able(made), *ceilings(size, DEVICE)], DEVICE, rules)
    print(show(times))
    read = next(one for one in times if one.name == "read")
    share = (times[0].gb_per_s or 0.0) / (read.gb_per_s or 1.0)
    print(f"  {times[0].name}: {share:.1%} of reading", flush=True)
    for who, error in wrongs.items():
        print(f"  {who}: relative error {error['relative']:.2e}")
    torch.cuda.empty_cache()
    return {"times": times, "errors": wrongs, "share_of_read": share}


def able(made: list[Contender]) -> Iterator[Contender]:
    """Those that run here: a peer that refuses a shape is named and left out."""
    for one in made:
        try:
            one.make(0)()
        except RuntimeError as refused:
            print(f"  {one.name} does not run: {str(refused).splitlines()[0]}")
        else:
            yield one
    torch.cuda.empty_cache()


def against_peers(case: Case, rules: Rules, quick: bool) -> dict[str, Any]:
    others = peers(case)[: 1 if quick else None]
    wrongs = wrong(case, with_peers=True)
    return measured(case.name, [ours(case), *others], case.bytes, rules, wrongs)


def kinds(rules: Rules) -> dict[str, Any]:
    """bf16 first: the ratios of the others are to it."""
    cases = [replace(LONG, kind=kind) for kind in ("bf16", *CODES)]
    wrongs = {case.kind: wrong(replace(case, batch=2), with_peers=False)["ours"] for case in cases}
    made = [ours(case, case.kind) for case in cases]
    return measured(f"kinds of pages, {LONG.name}", made, LONG.bytes, rules, wrongs)


def layouts(rules: Rules) -> dict[str, Any]:
    made = []
    for page in (16, 64, 128):
        for shuffled in (True, False):
            case = replace(GOAL, page=page, shuffled=shuffled)
            made.append(ours(case, f"page {page}, {'shuffled' if shuffled else 'in order'}"))
    return measured("pages of 16, 64, 128", made, GOAL.bytes, rules, {})


def cascade(rules: Rules) -> dict[str, Any]:
    """With bytes counted once for the prefix: without the hint the cache has to find it out."""
    pages_ = torch.tensor([CASCADE.shared // CASCADE.page], dtype=torch.int32, device=DEVICE)
    hint = {"prefix_rows": CASCADE.batch, "prefix_pages": pages_}
    made = [ours(CASCADE, "prefix read once", **hint), ours(CASCADE, "every row reads it")]
    wrongs = wrong(CASCADE, with_peers=False, **hint)
    return measured(f"cascade, {CASCADE.name}", made, CASCADE.bytes, rules, wrongs)


def ragged(rules: Rules) -> dict[str, Any]:
    wrongs = wrong(RAGGED, with_peers=False)
    return measured("one long row, 31 short", [ours(RAGGED)], RAGGED.bytes, rules, wrongs)


def appending(rules: Rules, kind: str, tokens: int) -> dict[str, Any]:
    """New tokens of a step or a chunk; the same with RoPE on the way."""
    case = replace(GOAL, kind=kind, batch=4, length=max(tokens, 1024))
    size = tokens * case.groups * (2 * 2 * case.width + 2 * case.bytes // (2 * case.positions * 8))

    def make(turned: bool) -> Callable[[int], Callable[[], Any]]:
        def on(number: int) -> Callable[[], Any]:
            cache = drawn(case, number)
            numbers = torch.Generator(DEVICE).manual_seed(number)
            k, v = (normal((tokens, case.groups, case.width), numbers) for _ in range(2))
            free = len(cache.k_pages) * case.page
            slots = torch.randperm(free, generator=numbers, device=DEVICE)[:tokens]
            angles = torch.rand(tokens, case.width // 2, generator=numbers, device=DEVICE)
            turn = {"cosine": angles.cos(), "sine": angles.sin()} if turned else {}
            scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
            return lambda: paged_append(k, v, *cache[1:3], slots, **scales, **turn)

        return on

    made = [Contender("append", make(False), bytes=size),
            Contender("RoPE and append", make(True), bytes=size)]  # fmt: skip
    return measured(f"append {tokens} tokens, {kind}", made, size, rules, {})


def cases(rules: Rules, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, the most important first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    found["goal " + GOAL.name] = lambda: against_peers(GOAL, rules, quick)
    for case in ANCHORS:
        found["anchor " + case.name] = lambda case=case: against_peers(case, rules, quick)
    found["kinds " + LONG.name] = lambda: kinds(rules)
    found["cascade " + CASCADE.name] = lambda: cascade(rules)
    found["ragged"] = lambda: ragged(rules)
    found["layouts"] = lambda: layouts(rules)
    found["one row " + ONE.name] = lambda: against_peers(ONE, rules, quick)
    for kind in ("bf16", *CODES):
        for tokens in (32, 2048):
            found[f"append {tokens} {kind}"] = lambda k=kind, t=tokens: appending(rules, k, t)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rules = Rules(rounds=3, warm_up=0.1) if given.quick else Rules()
    results: dict[str, Any] = {}
    for name, run in cases(rules, given.quick).items():
        if given.only in name:
            results[name] = run()
            # Written as it grows: a run that is cut short keeps what it has.
            path = write("paged_attention", DEVICE, results)
    print(path if results else f"no case has {given.only!r} in its name")


if __name__ == "__main__":
    main()
