"""Paged against dense storage: eight beams of one long prompt share its pages.

python examples/paged_cache.py
"""

import numpy as np

from trapline.gold import KVCache

HEADS, WIDTH, PAGE = 2, 32, 16
PROMPT, NEW, BEAMS = 320, 20, 8
BLOCKS = BEAMS * (PROMPT + NEW) // PAGE + BEAMS


def grown(kind: str) -> tuple[KVCache, bool]:
    """A cache of eight grown beams, and whether each beam reads exactly its own rows."""
    rng = np.random.default_rng(0)
    sizes = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH}
    cache = KVCache(kind, **sizes, block_size=PAGE, num_blocks=BLOCKS)
    prompt = rng.standard_normal((2, PROMPT, HEADS, WIDTH)).astype(np.float32)
    tails = rng.standard_normal((BEAMS, 2, NEW, HEADS, WIDTH)).astype(np.float32)
    first = cache.add()
    cache.append(first, 0, *prompt)
    beams = [first, *(cache.fork(first) for _ in range(BEAMS - 1))]
    for seq, tail in zip(beams, tails, strict=True):
        cache.append(seq, 0, *tail)
    return cache, all(
        np.array_equal(cache.view(seq, 0)[0], np.concatenate([prompt[0], tail[0]]))
        for seq, tail in zip(beams, tails, strict=True)
    )


def positions_left(cache: KVCache) -> int:
    """How many rows a new sequence can append before the pool is full."""
    seq, row = cache.add(), np.zeros((1, HEADS, WIDTH), np.float32)
    try:
        while True:
            cache.append(seq, 0, row, row)
    except MemoryError:
        return cache.length(seq)


def main() -> None:
    print(f"{BEAMS} beams of {NEW} tokens after a prompt of {PROMPT}, pages of {PAGE}\n")
    print(f"{'storage':8}  {'positions':>9}  each beam reads its own rows")
    held = {}
    for kind in ("dense", "paged"):
        cache, right = grown(kind)
        held[kind] = BLOCKS * PAGE - positions_left(cache)
        print(f"{kind:8}  {held[kind]:9}  {right}")
    ratio = held["dense"] / held["paged"]
    print(f"\nshared pages need {ratio:.1f} times less: the prompt is stored once")


if __name__ == "__main__":
    main()
