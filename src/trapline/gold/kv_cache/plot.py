"""How a cache grows with the context, as a picture."""

from pathlib import Path

import numpy as np

from trapline.gold.kv_cache.shapes import ModelShape


def plot_growth(model: ModelShape, out: Path) -> None:
    """Bytes of one sequence at 16, 8 and 4 bits, beside the weights; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = np.unique(np.geomspace(64, model.context, 200).astype(int))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for bits, style in ((16, "-"), (8, "--"), (4, ":")):
        sizes = [model.cache_bytes(int(n), bits) / 2**30 for n in tokens]
        axes.loglog(tokens, sizes, style, label=f"cache, {bits} bits")
    axes.axhline(model.weight_bytes(16) / 2**30, color="gray", label="weights, 16 bits")
    axes.set(xlabel="tokens of one sequence", ylabel="GiB", title=f"KV cache of {model.name}")
    axes.legend()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
