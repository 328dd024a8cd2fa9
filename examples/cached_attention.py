"""Attention with a KV cache: the same numbers, a fraction of the work, in chunks of any size.

First decoding, token by token: attention over everything again, against the cache. Then a prompt in
chunks: the largest score matrix shrinks with the chunk, the result stays.

    python examples/cached_attention.py
"""

import numpy as np

from trapline.gold import KVCache, flash_attention
from trapline.gold.kv_cache.api import chunked_prefill

TOKENS, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 16
SIZES = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": WIDTH}


def draw(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((tokens, HEADS, WIDTH))
    k, v = rng.standard_normal((2, tokens, KV_HEADS, WIDTH))
    return q, k, v


def decode() -> None:
    q, k, v = draw(TOKENS)
    cache = KVCache("dense", **SIZES, block_size=16, num_blocks=8)
    seq = cache.add()
    again = cached = 0
    print(f"{'tokens':>6}  {'scores, all again':>18}  {'scores, cached':>15}  {'difference':>10}")
    for n in range(1, TOKENS + 1):
        cache.append(seq, 0, k[n - 1 : n], v[n - 1 : n])
        from_cache = cache.attend(seq, 0, q[n - 1 : n])[0]
        whole = flash_attention(*(x[:n].swapaxes(0, 1)[None] for x in (q, k, v)), causal=True)
        difference = float(np.abs(whole[0, :, -1] - from_cache).max())
        again, cached = again + HEADS * n * n, cached + HEADS * n
        if n & (n - 1) == 0:
            print(f"{n:6}  {again:18,}  {cached:15,}  {difference:10.1e}")
    print(f"\nthe cache saves {again / cached:.0f} times the scores\n")


def prefill(tokens: int = 512) -> None:
    given = draw(tokens)
    print(f"{'chunk':>6}  {'largest score matrix':>20}  {'difference':>10}")
    at_once = None
    for chunk in (512, 256, 100, 32, 7):
        cache = KVCache("paged", **SIZES, block_size=16, num_blocks=tokens // 16)
        out = chunked_prefill(cache, cache.add(), 0, *given, chunk)
        at_once = out if at_once is None else at_once
        difference = float(np.abs(out - at_once).max())
        print(f"{chunk:6}  {HEADS * chunk * tokens:20,}  {difference:10.1e}")


if __name__ == "__main__":
    decode()
    prefill()
