"""Attention with a cache is attention: the same numbers, a fraction of the work.

One new token after another: once by attending to everything again, once by asking the cache.

    python examples/cached_attention.py
"""

import numpy as np

from trapline.gold import KVCache, flash_attention

HEADS, GROUPS, WIDTH = 4, 2, 16


def main() -> None:
    rng = np.random.default_rng(0)
    steps = 64
    q = rng.standard_normal((steps, HEADS, WIDTH))
    k, v = rng.standard_normal((2, steps, GROUPS, WIDTH))
    sizes = {"num_layers": 1, "num_kv_heads": GROUPS, "head_dim": WIDTH}
    cache = KVCache("dense", **sizes, block_size=16, num_blocks=8)
    seq = cache.add()
    again = cached = 0
    worst = 0.0
    print(f"{'tokens':>6}  {'scores, all again':>18}  {'scores, cached':>15}  {'difference':>10}")
    for n in range(1, steps + 1):
        cache.append(seq, 0, k[n - 1 : n], v[n - 1 : n])
        from_cache = cache.attend(seq, 0, q[n - 1 : n])[0]
        whole = flash_attention(*(x[:n].swapaxes(0, 1)[None] for x in (q, k, v)), causal=True)
        worst = max(worst, float(np.abs(whole[0, :, -1] - from_cache).max()))
        again, cached = again + HEADS * n * n, cached + HEADS * n
        if n & (n - 1) == 0:
            print(f"{n:6}  {again:18,}  {cached:15,}  {worst:10.1e}")
    print(
        f"\nthe cache saved {again / cached:.0f} times the scores, and changed no digit that counts"
    )


if __name__ == "__main__":
    main()
