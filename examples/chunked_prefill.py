"""A long prompt in pieces: the same answer for every size, and never all scores at once.

python examples/chunked_prefill.py
"""

import numpy as np

from trapline.gold import KVCache
from trapline.gold.kv_cache.prefill import chunked_prefill

TOKENS, HEADS, GROUPS, WIDTH = 512, 4, 2, 16


def main() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((TOKENS, HEADS, WIDTH))
    k, v = rng.standard_normal((2, TOKENS, GROUPS, WIDTH))
    sizes = {"num_layers": 1, "num_kv_heads": GROUPS, "head_dim": WIDTH}

    def prefilled(chunk: int) -> np.ndarray:
        cache = KVCache("paged", **sizes, block_size=16, num_blocks=TOKENS // 16)
        return chunked_prefill(cache, cache.add(), 0, q, k, v, chunk)

    at_once = prefilled(TOKENS)
    print(f"{'chunk':>6}  {'most scores at once':>20}  {'largest difference':>18}")
    for chunk in (512, 256, 100, 32, 7):
        difference = float(np.abs(prefilled(chunk) - at_once).max())
        print(f"{chunk:6}  {HEADS * chunk * TOKENS:20,}  {difference:18.1e}")


if __name__ == "__main__":
    main()
