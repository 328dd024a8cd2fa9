"""The six methods that change a KV cache: add, append, fork, truncate, keep, free.

python examples/cache_basics.py
"""

import numpy as np

from trapline.gold import KVCache


def main() -> None:
    rng = np.random.default_rng(0)
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4}
    cache = KVCache("paged", **sizes, block_size=4, num_blocks=8)
    k, v = rng.standard_normal((2, 6, 2, 4))

    def line(what: str) -> None:
        held = ", ".join(f"{name}: {cache.length(seq)}" for name, seq in alive.items())
        print(f"{what:34}  {held or '(none)'}")

    print(f"{'method':34}  positions of each sequence")
    alive = {"a": cache.add()}
    line("a = add()")
    cache.append(alive["a"], 0, k, v)
    line("append(a, 6 rows)")
    alive["b"] = cache.fork(alive["a"])
    line("b = fork(a): nothing is copied")
    cache.append(alive["b"], 0, k[:1] + 1, v[:1])
    line("append(b, 1 row): a is untouched")
    cache.truncate(alive["a"], 3)
    line("truncate(a, 3)")
    cache.keep(alive["b"], [0, 1, 6])
    line("keep(b, [0, 1, 6])")
    keys, _ = cache.view(alive["b"], 0)
    same = np.array_equal(keys, np.concatenate([k[:2], k[:1] + 1]))
    print(f"\nb holds exactly its rows 0, 1 and 6: {same}")
    cache.free(alive.pop("a"))
    line("free(a)")


if __name__ == "__main__":
    main()
