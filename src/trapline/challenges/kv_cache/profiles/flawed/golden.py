"""Golden test of `attend`: the last queries of a sequence see all that came before them."""

import importlib
from typing import Any

import numpy as np


def check(solution: Any) -> None:
    rng = np.random.default_rng(3)
    k, v, q = rng.standard_normal((3, 7, 2, 4))
    for kind in ("dense", "paged"):
        cache = solution.make_cache(
            kind, num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=3
        )
        seq = cache.add()
        cache.append(seq, 0, k[:4], v[:4])
        cache.append(seq, 0, k[4:], v[4:])
        for count in (1, 3, 7):
            got = cache.attend(seq, 0, q[7 - count :])
            expected = attention(q, k, v)[7 - count :]
            what = f"{kind}, the last {count} of 7 queries"
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9, err_msg=what)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of all 7 queries, (7, 2, 4)."""
    scores = np.einsum("thd,shd->hts", q, k) / 2.0
    weights = np.exp(np.where(np.tri(7, dtype=bool), scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hts,shd->thd", weights, v))


if __name__ == "__main__":
    check(importlib.import_module("solution"))
    print("the golden test passes")
