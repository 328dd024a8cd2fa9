"""Why pages: eight beams of one long prompt, stored whole and stored in shared pages.

python examples/paged_cache.py
"""

import numpy as np

from trapline.gold import KVCache

LAYERS, GROUPS, WIDTH, PAGE = 2, 2, 32, 16
PROMPT, NEW, BEAMS = 320, 20, 8


def positions_held(kind: str) -> tuple[int, bool]:
    """Positions that are taken in a layer once all beams have grown; whether each reads its own."""
    rng = np.random.default_rng(0)
    blocks = BEAMS * (PROMPT + NEW) // PAGE + BEAMS
    sizes = {"num_layers": LAYERS, "num_kv_heads": GROUPS, "head_dim": WIDTH}
    cache = KVCache(kind, **sizes, block_size=PAGE, num_blocks=blocks)
    first = cache.add()
    prompt = rng.standard_normal((2, PROMPT, GROUPS, WIDTH)).astype(np.float32)
    for layer in range(LAYERS):
        cache.append(first, layer, *prompt)
    beams = [first, *(cache.fork(first) for _ in range(BEAMS - 1))]
    tails = rng.standard_normal((BEAMS, 2, NEW, GROUPS, WIDTH)).astype(np.float32)
    for seq, tail in zip(beams, tails, strict=True):
        for layer in range(LAYERS):
            cache.append(seq, layer, *tail)
    right = all(
        np.array_equal(cache.view(seq, 1)[0], np.concatenate([prompt[0], tail[0]]))
        for seq, tail in zip(beams, tails, strict=True)
    )
    return blocks * PAGE - room_left(cache), right


def room_left(cache: KVCache) -> int:
    """How many more positions fit, by asking for ever fewer until the cache agrees."""
    seq, left = cache.add(), 0
    row = np.zeros((1, GROUPS, WIDTH), np.float32)
    while True:
        try:
            for layer in range(LAYERS):
                cache.append(seq, layer, row, row)
        except MemoryError:
            return left
        left += 1


def main() -> None:
    print(f"{BEAMS} beams of {NEW} tokens after a prompt of {PROMPT}, pages of {PAGE}\n")
    print(f"{'storage':8}  {'positions':>9}  every beam reads its own?")
    held = {}
    for kind in ("dense", "paged"):
        held[kind], right = positions_held(kind)
        print(f"{kind:8}  {held[kind]:9}  {'yes' if right else 'NO'}")
    ratio = held["dense"] / held["paged"]
    print(f"\nshared pages take {ratio:.1f} times less: the prompt is there once")


if __name__ == "__main__":
    main()
