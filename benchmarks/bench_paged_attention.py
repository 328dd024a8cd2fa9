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
from dataclasses import replace
from typing import Any

import torch
from harness import Contender, Rules, ceilings, compare, errors, show, write
from paged_problems import (
    ANCHORS,
    CASCADE,
    CODES,
    DEVICE,
    GOAL,
    LONG,
    ONE,
    RAGGED,
    TREES,
    Case,
    binary_tree,
    drawn,
    in_float64,
    laid_out,
    normal,
    with_queries,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from trapline.gold import paged_append


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
    ]


def wrong(case: Case, *, with_peers: bool, **more: Any) -> dict[str, dict[str, float]]:
    """Of ours against float64 on the stored values, and of torch's kernels on their own inputs."""
    cache = drawn(case, 0)
    found = {"ours": errors(cache.attend(**more), in_float64(cache).attend(impl="torch"))}
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
    # As few rows as are computed by the same kernel.
    wrongs = {case.kind: wrong(replace(case, batch=4), with_peers=False)["ours"] for case in cases}
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


def copied(rules: Rules) -> dict[str, Any]:
    """What it costs to gather the pages first."""
    made = [ours(GOAL), gathered(GOAL, compiled=False), gathered(GOAL, compiled=True)]
    return measured(f"gathered first, {GOAL.name}", made, GOAL.bytes, rules, {})


def ragged(rules: Rules) -> dict[str, Any]:
    wrongs = wrong(RAGGED, with_peers=False)
    return measured("one long row, 31 short", [ours(RAGGED)], RAGGED.bytes, rules, wrongs)


def chunked(rules: Rules) -> dict[str, Any]:
    """A chunk of a prompt for each of eight sequences, after what is there already."""
    T, case = 256, replace(GOAL, batch=8)
    flops = 4 * case.batch * case.heads * case.width * T * (case.length - T // 2)

    def make(number: int) -> Callable[[], Tensor]:
        cache = with_queries(case, number, T)
        out = torch.empty_like(cache.q)
        return lambda: cache.attend(out, max_q=T)

    def peer(number: int) -> Callable[[], Tensor]:
        q, k, v = laid_out(case, number)
        q = normal((case.batch, case.heads, T, case.width), torch.Generator(DEVICE).manual_seed(1))
        bias = causal_lower_right(T, case.length)
        return lambda: sdpa(q, k, v, attn_mask=bias, enable_gqa=True)

    made = [
        Contender("ours", make, bytes=case.bytes, flops=flops),
        Contender("FlashAttention-2, contiguous", peer, bytes=case.bytes, flops=flops),
    ]
    small = with_queries(replace(case, batch=1), 0, T)
    wrongs = {
        "ours": errors(small.attend(max_q=T), in_float64(small).attend(max_q=T, impl="torch"))
    }
    return measured(f"chunks of {T}, {case.name}", made, case.bytes, rules, wrongs)


def drafted(rules: Rules, case: Case, nodes: int) -> dict[str, Any]:
    """A draft tree for each sequence, the last `nodes` positions: every node sees its ancestors."""
    tree = binary_tree(nodes, DEVICE)
    every = {"max_q": nodes, "tree_mask": tree.repeat(case.batch, 1)}

    def make(number: int) -> Callable[[], Tensor]:
        cache = with_queries(case, number, nodes)
        out = torch.empty_like(cache.q)
        return lambda: cache.attend(out, **every)

    flops = 4 * case.batch * case.heads * case.width * nodes * case.length
    made = [Contender("ours", make, bytes=case.bytes, flops=flops)]
    small, one = with_queries(replace(case, batch=1), 0, nodes), {"max_q": nodes, "tree_mask": tree}
    exact = in_float64(small).attend(**one, impl="torch")
    wrongs = {"ours": errors(small.attend(**one), exact)}
    return measured(f"trees of {nodes}, {case.name}", made, case.bytes, rules, wrongs)


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
    for kind in ("bf16", *CODES):
        for tokens in (32, 2048):
            found[f"append {tokens} {kind}"] = lambda k=kind, t=tokens: appending(rules, k, t)
    found["cascade " + CASCADE.name] = lambda: cascade(rules)
    found["chunks of 256"] = lambda: chunked(rules)
    for case, nodes in TREES:
        name = f"trees of {nodes} B{case.batch} L{case.length}"
        found[name] = lambda case=case, nodes=nodes: drafted(rules, case, nodes)
    found["ragged"] = lambda: ragged(rules)
    found["one row " + ONE.name] = lambda: against_peers(ONE, rules, quick)
    found["layouts"] = lambda: layouts(rules)
    # Compiling takes longer than all the rest.
    found["gathered first"] = lambda: copied(rules)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rules = Rules(rounds=3, warm_up=0.1) if given.quick else Rules(warm_up=0.25)
    results: dict[str, Any] = {}
    for name, run in cases(rules, given.quick).items():
        if given.only in name:
            results[name] = run()
            # Written as it grows: a run that is cut short keeps what it has.
            path = write("paged_attention", DEVICE, results)
    print(path if results else f"no case has {given.only!r} in its name")


if __name__ == "__main__":
    main()
