"""How a cache grows with the text: five public models, fp16, one sequence.

Grouped heads, a latent vector and sliding windows are three answers to the same bill.

    python examples/memory_growth.py
"""

from trapline.gold.kv_cache.memory import ModelShape, models

CHOSEN = ("llama-2-7b", "llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v2-lite")
CONTEXTS = (1024, 8192, 32_768, 131_072)


def kind(model: ModelShape) -> str:
    if model.latent:
        return "latent"
    if model.sliding_layers:
        return f"{model.sliding_layers}/{model.layers} layers slide"
    return "all heads" if model.kv_heads == model.query_heads else "grouped heads"


def main() -> None:
    head = "  ".join(f"{context // 1024:>4} Ki" for context in CONTEXTS)
    print(f"{'GiB for a text of':24}  {head}  {'KiB/token':>9}  kind")
    for name in CHOSEN:
        model = models()[name]
        sizes = "  ".join(f"{model.cache_bytes(n, 16) / 2**30:7.2f}" for n in CONTEXTS)
        beyond = model.cache_bytes(10**6 + 1, 16) - model.cache_bytes(10**6, 16)
        print(f"{model.name:24}  {sizes}  {beyond / 1024:9.1f}  {kind(model)}")


if __name__ == "__main__":
    main()
