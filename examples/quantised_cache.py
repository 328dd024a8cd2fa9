"""Keys and values in 8, 4 or fp8 bits: what they take, and what they cost in a model's answers.

Bits are counted with the scales. The last column is how far the logits of a small random decoder
move when its cache is stored so.

    python examples/quantised_cache.py
"""

import torch
from small_model import VOCABULARY, small_decoder

from trapline.gold import KVCache
from trapline.gold.decoder.cache import StoredSequence

TOKENS = 96
KINDS = {
    "as it is": ("paged", None),
    "int8": ("paged_quantized", 8),
    "fp8": ("paged_quantized", "fp8"),
    "int4": ("paged_quantized", 4),
}


def main() -> None:
    decoder = small_decoder(head_dim=64)
    config = decoder.config
    sizes = {
        "num_layers": config.layers,
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    exact = decoder(ids[None])[0, -1]
    elements = 2 * config.layers * config.kv_heads * config.head_dim * TOKENS
    print(f"{'stored':10}  {'bits an element':>15}  {'error of the logits':>19}")
    for name, (kind, bits) in KINDS.items():
        cache = KVCache(kind, **sizes, block_size=16, num_blocks=TOKENS // 16, bits=bits)
        sequence = StoredSequence(cache)
        decoder.run([ids[:-1]], [sequence])
        logits = decoder.step([ids[-1:].tolist()], [sequence])[0]
        error = float((logits - exact).norm() / exact.norm())
        # Without the page tables, which do not grow with the width of a head.
        stored = cache.nbytes() - 8 * (TOKENS // 16) * 3
        print(f"{name:10}  {8 * stored / elements:15.2f}  {error:19.1e}")


if __name__ == "__main__":
    main()
