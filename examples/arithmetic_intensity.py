"""When decoding waits for memory: operations a byte, by batch and context, against what a GPU has.

A step reads all weights once and each sequence's cache once. More sequences share the weights, but
not their caches: with a long context no batch makes decoding compute-bound.

    python examples/arithmetic_intensity.py
"""

from trapline.gold.kv_cache.memory import Setting, decoding_step, gpus, models

BATCHES = (1, 8, 64, 512)
CONTEXTS = (128, 2048, 32_768)


def main() -> None:
    model, gpu = models()["llama-3.1-8b"], gpus()["h200"]
    balance = gpu.tflops * 1e12 / (gpu.bandwidth * 1e9)
    print(f"{model.name} on {gpu.name}: balanced at {balance:.0f} operations a byte\n")
    print(f"{'batch':>6}" + "".join(f"{f'context {context}':>22}" for context in CONTEXTS))
    for batch in BATCHES:
        cells = []
        for context in CONTEXTS:
            step = decoding_step(model, gpu, Setting(sequences=batch), context)
            bound = "memory" if step.memory_bound else "compute"
            cells.append(f"{step.flops_per_byte:13.1f}, {bound:7}")
        print(f"{batch:6}" + "".join(cells))


if __name__ == "__main__":
    main()
