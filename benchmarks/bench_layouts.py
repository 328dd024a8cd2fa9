"""What the order of pages in memory costs on a CPU: appending, reading back, paged attention.

    python benchmarks/bench_layouts.py          one thread, CPU time, medians of interleaved bursts

Every layout gives the same numbers; docs/components/kv_cache.md has the table and what is
contiguous in each layout.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, get_args

import torch

from trapline.gold.attention.paged.api import paged_attention
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.page_layout import PageLayout

HEADS, KV_HEADS, WIDTH, PAGE, SEQUENCES, LENGTH = 32, 8, 128, 16, 8, 1024
ROUNDS = 15


def filled(layout: PageLayout) -> KVCache:
    """A cache of one layer with all sequences at their length."""
    cache = KVCache(
        "paged",
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        block_size=PAGE,
        num_blocks=SEQUENCES * (LENGTH // PAGE + 4),
        layout=layout,
        like=torch.zeros(1),
    )
    for _ in range(SEQUENCES):
        cache.append(cache.add(), 0, *torch.randn(2, LENGTH, KV_HEADS, WIDTH))
    return cache


def works(cache: KVCache) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    one, many = (torch.randn(2, n, KV_HEADS, WIDTH) for n in (1, 3 * PAGE))
    q = torch.randn(SEQUENCES, HEADS, WIDTH)
    table = torch.from_numpy(cache.block_table(range(SEQUENCES)))
    lengths = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32)
    pages = cache.pages(0)

    def token() -> None:
        for seq in range(SEQUENCES):
            cache.append(seq, 0, *one)
        for seq in range(SEQUENCES):
            cache.truncate(seq, LENGTH)

    def prompt() -> None:
        seq = cache.add()
        cache.append(seq, 0, *many)
        cache.free(seq)

    return {
        "append a token to 8 sequences": token,
        "append a prompt of 48": prompt,
        "read back 1024 positions": lambda: cache.view(0, 0),
        "paged attention, 8 × 1024": lambda: paged_attention(
            q, pages.k, pages.v, table, lengths, check=False
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layouts = get_args(PageLayout)
    asked = {layout: works(filled(layout)) for layout in layouts}
    print(f"| µs | {' | '.join(layouts)} |\n|---|{'---|' * len(layouts)}")
    for name in asked["bshd"]:
        times: dict[str, list[float]] = {layout: [] for layout in layouts}
        for _ in range(ROUNDS):
            for layout in layouts:
                started = time.thread_time()
                for _ in range(5):
                    asked[layout][name]()
                times[layout].append((time.thread_time() - started) / 5)
        row = " | ".join(f"{median(times[layout]) * 1e6:,.0f}" for layout in layouts)
        print(f"| {name} | {row} |")


if __name__ == "__main__":
    main()
