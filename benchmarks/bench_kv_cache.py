"""Attention error of quantised caches and their bits, beside transformers' own.

    python benchmarks/bench_kv_cache.py
    python benchmarks/bench_kv_cache.py --name B --model PAIR --text PAIR/held_out.txt \
        --positions 1024 --calibrate 8

Rows are those of a trained model: without options of the one that comes with the package, reading
LICENSE. The first positions of the text are judged, those after them calibrate. The error is that
of attention of the last queries against float64 on the rows as they were, root mean square over the
layers. Runs with several names add up in one results file.

Their float8 cache is run as it is. Their 4 bit cache leaves the arithmetic to a package that is not
among our dependencies (optimum-quanto); here its published scheme stands in for that package, below
transformers' own residual window: groups of 64 consecutive elements, scale (max − min) / 15, shift
min, codes 0 … 15, scale and shift in the model's 16 bit type: 4.5 bits an element. Scales, shifts
and codes were compared by hand with optimum-quanto 0.2.7 on random rows; its unpacking, which wants
a C++ compiler, was read only.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness import RESULTS, measured_before, write
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from trapline.gold.decoder.calibrate import calibrate
from trapline.gold.decoder.layers import Attention
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.ternary.demo import demo_model

Pair = tuple[np.ndarray, np.ndarray]
#: Positions of a pool over which the constants of a calibration are spread: they are the model's.
POOL = 65_536
QUERIES = 16
#: Of a text, to be tokenised.
LETTERS = 200_000
#: Bits of their 4 bit codes, with scale and shift of a group.
CODES = 4.5
OURS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "fp8": {"bits": "fp8"},
    "int4": {"bits": 4},
    "int4, rotated": {"bits": 4, "rotate": True},
}


class FourBitLayer(QuantizedLayer):
    """Their cache layer with the scheme of its backend written out."""

    group = 64

    def _quantize(self, tensor, axis):
        assert axis == 0
        groups = tensor.reshape(-1, self.group)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale, low = ((high - low) / 15).half().float(), low.half().float()
        codes = torch.round((groups - low) / scale).clamp(0, 15).to(torch.uint8)
        return codes, scale, low, tensor.shape

    def _dequantize(self, quantized):
        codes, scale, low, shape = quantized
        return (codes * scale + low).reshape(shape)


def in_four_bits(rows: np.ndarray) -> np.ndarray:
    """Their codes without their window."""
    layer = FourBitLayer()
    return layer._dequantize(layer._quantize(torch.from_numpy(rows), 0)).numpy()


def prompt_of(k: np.ndarray) -> int:
    """Of 1024 positions 832: the rest comes one by one, and some of it stays in their window."""
    return len(k) * 13 // 16


def theirs(layer: Any, k: np.ndarray, v: np.ndarray) -> Pair:
    """A prompt, then one position after the other; what their layer answers at the last."""
    keys, values = (torch.from_numpy(x).transpose(0, 1)[None] for x in (k, v))
    prompt = prompt_of(k)
    layer.update(keys[:, :, :prompt], values[:, :, :prompt])
    for at in range(prompt, len(k)):
        last = layer.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    return tuple(x[0].transpose(0, 1).numpy() for x in last)


def ours(layers: Sequence[Pair], *, pool: int | None = None, **options: Any) -> tuple[list, float]:
    """What our cache of all these layers answers, and its bits an element of the pool."""
    positions, heads, width = layers[0][0].shape
    cache = KVCache(
        "paged_quantized", num_layers=len(layers), num_kv_heads=heads, head_dim=width,
        block_size=16, num_blocks=(pool or positions) // 16, **options,
    )  # fmt: skip
    seq = cache.add()
    starts = [0, *range(prompt_of(layers[0][0]), positions)]
    for start, stop in pairwise([*starts, positions]):
        for layer, (k, v) in enumerate(layers):
            cache.append(seq, layer, k[start:stop], v[start:stop])
    elements = 2 * len(layers) * (pool or positions) * heads * width
    return [cache.view(seq, at) for at in range(len(layers))], 8 * cache.nbytes() / elements


def error(q: np.ndarray, rows: Pair, k: np.ndarray, v: np.ndarray) -> float:
    truth = attention(q, k, v)
    return float(np.linalg.norm(attention(q, *rows) - truth) / np.linalg.norm(truth))


def over_layers(rows: Sequence[tuple[np.ndarray, ...]], found: Sequence[Pair]) -> float:
    """Root mean square over the layers of the error of attention."""
    errors = [error(q, got, k, v) for (q, k, v), got in zip(rows, found, strict=True)]
    return float(np.sqrt(np.mean(np.square(errors))))


@torch.no_grad()
def rows_of(model: Decoder, ids: list[int]) -> list[list[np.ndarray]]:
    """(q, k, v) of every layer, as the cache gets them: normed and turned."""
    found, attend = [], Attention._causal

    def seen(self, q, stored, packing):
        found.append([x.numpy().copy() for x in (q, *stored[0])])
        return attend(self, q, stored, packing)

    with patch.object(Attention, "_causal", seen):
        model.run([ids], [model.new_cache()])
    return [[q[-QUERIES:], k, v] for q, k, v in found]


def measure(model: Decoder, ids: list[int], positions: int, chunks: int) -> dict[str, Any]:
    """Every cache on the first positions, calibrated on as many chunks of what follows."""
    first, *later = (ids[positions * at :][:positions] for at in range(1 + chunks))
    calibration = calibrate(model, later)
    rows = rows_of(model, first)
    pairs = [(k, v) for _, k, v in rows]
    chosen = {**OURS, "int4, calibrated": {"bits": 4, "calibration": calibration}}
    caches = {}
    for name, options in chosen.items():
        found, bits = ours(pairs, pool=POOL, **options)
        caches[name] = {"bits": bits, "error": over_layers(rows, found)}
    caches.update(_peers(rows, pairs))
    return {"positions": positions, "calibrated on": positions * chunks, "caches": caches}


def _peers(rows: Sequence[Any], pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    eight = [theirs(Fp8QuantizedLayer(), k, v) for k, v in pairs]
    codes = [(in_four_bits(k), in_four_bits(v)) for k, v in pairs]
    layers = [FourBitLayer() for _ in pairs]
    whole = [theirs(layer, k, v) for layer, (k, v) in zip(layers, pairs, strict=True)]
    window = layers[0].keys.shape[-2] / len(pairs[0][0])
    bits = {"theirs, 8": 8.0, "theirs, 4": CODES, "theirs, 4 and window": CODES}
    bits["theirs, 4 and window"] += (16 - CODES) * window
    found = zip(bits.items(), (eight, codes, whole), strict=True)
    return {name: {"bits": b, "error": over_layers(rows, got)} for (name, b), got in found}


def show(name: str, result: dict[str, Any]) -> str:
    caches = result["caches"]
    peers = [peer for peer in caches if peer.startswith("theirs")]
    lines = [f"{name}, {result['positions']} positions: bits, error, of that of {', '.join(peers)}"]
    for cache, at in caches.items():
        ratios = "  ".join(f"{at['error'] / caches[peer]['error']:5.2f}" for peer in peers)
        lines.append(f"{cache:22} {at['bits']:5.2f}  {at['error']:.4f}  {ratios}")
    return "\n".join(lines)


def main() -> None:
    given = _arguments()
    torch.set_num_threads(1)
    model = Decoder.from_pretrained(given.model, dtype=torch.float32)
    ids = Tokenizer(given.model).encode(given.text.read_text()[:LETTERS])
    wanted = given.positions * (1 + given.calibrate)
    if len(ids) < wanted:
        raise SystemExit(f"{given.text} has {len(ids)} tokens: {wanted} are needed")
    result = measure(model, ids, given.positions, given.calibrate)
    print(show(given.name, result))
    results = {**measured_before("kv_cache", "cpu", given.out), given.name: result}
    print(write("kv_cache", "cpu", results, folder=given.out))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    root = Path(__file__).parents[1]
    parser.add_argument("--name", default="A", help="of this case in the results")
    parser.add_argument("--model", type=Path, default=demo_model(), help="a checkpoint's folder")
    parser.add_argument("--text", type=Path, default=root / "LICENSE")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--calibrate", type=int, default=4, help="times as many tokens")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
