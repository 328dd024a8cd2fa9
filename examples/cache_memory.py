"""What a KV cache costs: its size by context, and whether decoding waits for memory.

Grouped heads, a latent vector and sliding windows are three ways to make it smaller. A step reads
all weights once and each sequence's cache once; a larger batch shares the weights, not the caches,
so with a long context no batch makes decoding compute-bound.

    python examples/cache_memory.py
"""

from trapline.gold.kv_cache.memory import decoding_step
from trapline.gold.kv_cache.shapes import ModelShape, Setting, gpus, models

CHOSEN = ("llama-2-7b", "llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v2-lite")
CONTEXTS = (1024, 8192, 32_768, 131_072)
BATCHED = (128, 2048, 32_768)


def kind(model: ModelShape) -> str:
    if model.latent:
        return "latent"
    if model.sliding_layers:
        return f"{model.sliding_layers}/{model.layers} layers slide"
    return "all heads" if model.kv_heads == model.query_heads else "grouped heads"


def print_sizes() -> None:
    head = "  ".join(f"{context // 1024:>4} Ki" for context in CONTEXTS)
    print(f"{'GiB by context, fp16':24}  {head}  {'KiB/token':>9}  kind")
    for name in CHOSEN:
        model = models()[name]
        sizes = "  ".join(f"{model.cache_bytes(n, 16) / 2**30:7.2f}" for n in CONTEXTS)
        last = model.cache_bytes(10**6 + 1, 16) - model.cache_bytes(10**6, 16)
        print(f"{model.name:24}  {sizes}  {last / 1024:9.1f}  {kind(model)}")


def print_intensity() -> None:
    model, gpu = models()["llama-3.1-8b"], gpus()["h200"]
    balance = gpu.tflops * 1e12 / (gpu.bandwidth * 1e9)
    print(f"\n{model.name} on {gpu.name}: operations per byte (balanced at {balance:.0f})\n")
    print(f"{'batch':>6}" + "".join(f"{f'context {context}':>22}" for context in BATCHED))
    for batch in (1, 8, 64, 512):
        cells = []
        for context in BATCHED:
            step = decoding_step(model, gpu, Setting(sequences=batch), context)
            bound = "memory" if step.memory_bound else "compute"
            cells.append(f"{step.flops_per_byte:13.1f}, {bound:7}")
        print(f"{batch:6}" + "".join(cells))


if __name__ == "__main__":
    print_sizes()
    print_intensity()
