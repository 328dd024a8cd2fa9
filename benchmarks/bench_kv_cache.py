"""Attention error of quantised caches and their bits, beside transformers' own.

    python benchmarks/bench_kv_cache.py
    python benchmarks/bench_kv_cache.py --name B --model PAIR --text PAIR/held_out.txt \
        --positions 1024 --calibrate 8

Rows are those of a trained model: without options of the one that comes with the package, reading
LICENSE. The first positions of the text are measured, those after them calibrate. The error is that
of attention of the last queries against float64 on the rows as they were, root mean square over the
layers. Runs with several names add up in one results file.

Their 4 bit cache keeps its newest positions in 16 bits, up to 128, which it quantises together. So
it is also compared over a cycle of that window: the last 128 positions come one by one, and each is
a query on the cache as it is then. Errors are the root mean square over these queries, bytes are
the mean over them. Beside it stand ours, with as many `recent` rows as those bytes allow.

Their float8 cache is run as it is. Their 4 bit cache leaves the arithmetic to a package that is not
among our dependencies (optimum-quanto); here its published scheme stands in for that package, below
transformers' own residual window: groups of 64 consecutive elements, scale (max − min) / 15, shift
min, codes 0 … 15, scale and shift in the model's 16 bit type: 4.5 bits an element. Scales, shifts
and codes were compared by hand with optimum-quanto 0.2.7 on random rows; its unpacking, which needs
a C++ compiler, was read but not run.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness import RESULTS, measured_before, write
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.calibrate import calibrate
from trapline.gold.decoder.packing import Packing
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.ternary.demo import demo_model

Pair = tuple[np.ndarray, np.ndarray]
#: Of every layer the last queries, all keys and all values.
Rows = Sequence[Sequence[np.ndarray]]
#: Positions of a pool over which the constants of a calibration are spread: they are the model's.
POOL = 65_536
QUERIES = 16
#: Positions after which their window is quantised.
CYCLE = 128
#: Characters of a text that are tokenised.
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


def their_answers(layer: Any, k: np.ndarray, v: np.ndarray, prompt: int) -> Iterator[Pair]:
    """A prompt, then one position after the other; what their layer answers at each."""
    keys, values = (torch.from_numpy(x).transpose(0, 1)[None] for x in (k, v))
    layer.update(keys[:, :, :prompt], values[:, :, :prompt])
    for at in range(prompt, len(k)):
        found = layer.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
        yield tuple(x[0].transpose(0, 1).numpy() for x in found)


def theirs(layer: Any, k: np.ndarray, v: np.ndarray) -> Pair:
    """What it answers at the last."""
    *_, last = their_answers(layer, k, v, prompt_of(k))
    return last


def our_cache(layers: Sequence[Pair], pool: int | None = None, **options: Any) -> KVCache:
    positions, heads, width = layers[0][0].shape
    return KVCache(
        "paged_quantized", num_layers=len(layers), num_kv_heads=heads, head_dim=width,
        block_size=16, num_blocks=(pool or positions) // 16, **options,
    )  # fmt: skip


def our_answers(cache: KVCache, seq: int, layer: int, k: np.ndarray, v: np.ndarray, prompt: int):
    """As `their_answers`."""
    cache.append(seq, layer, k[:prompt], v[:prompt])
    for at in range(prompt, len(k)):
        cache.append(seq, layer, k[at : at + 1], v[at : at + 1])
        yield cache.view(seq, layer)


def ours(layers: Sequence[Pair], *, pool: int | None = None, **options: Any) -> tuple[list, float]:
    """What our cache of all these layers answers, and its bits an element of the pool."""
    positions, heads, width = layers[0][0].shape
    cache = our_cache(layers, pool, **options)
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


def over_layers(rows: Rows, found: Sequence[Pair]) -> float:
    """Root mean square over the layers of the error of attention of the last queries."""
    errors = [error(q[-QUERIES:], got, k, v) for (q, k, v), got in zip(rows, found, strict=True)]
    return root_mean_square(errors)


def in_turn(q: np.ndarray, k: np.ndarray, v: np.ndarray, answers: Iterable[Pair]) -> float:
    """The error of all queries, those of the last positions, each on the answer at its position."""
    missed = size = 0.0
    for query, found in zip(q[:, None], answers, strict=True):
        stop = len(found[0])
        truth = attention(query, k[:stop], v[:stop])
        missed += ((attention(query, *found) - truth) ** 2).sum()
        size += (truth**2).sum()
    return float(np.sqrt(missed / size))


def root_mean_square(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def over_a_cycle(rows: Rows, chosen: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Bits and errors of their 4 bit cache as it is, and of ours without and with recent rows."""
    caches = {"theirs, 4 and window": _their_cycle(rows)}
    most, width = caches["theirs, 4 and window"]["bits"], rows[0][1].shape[2]
    for name, options in chosen.items():
        error, nbytes = _our_cycle(rows, **options)
        bits = 8 * nbytes / _elements(rows, POOL)
        caches[name] = {"bits": bits, "error": error}
        recent = int((most - bits) * _mean_length(rows) / (4 + 16 / width))
        error, more = _our_cycle(rows, recent=recent, **options)
        # The pool is everyone's, second codes belong to this one sequence.
        bits += 8 * (more - nbytes) / _elements(rows, _mean_length(rows))
        caches[f"{name}, recent"] = {"bits": bits, "error": error, "recent": recent}
    return caches


def _mean_length(rows: Rows) -> float:
    return len(rows[0][1]) - (CYCLE - 1) / 2


def _elements(rows: Rows, positions: float) -> float:
    return 2 * len(rows) * positions * rows[0][1][0].size


def _their_cycle(rows: Rows) -> dict[str, float]:
    held = []

    def watched(k, v):
        layer = FourBitLayer()
        for found in their_answers(layer, k, v, len(k) - CYCLE):
            held.append(layer.keys.numel() / k[0].size)
            yield found

    errors = [in_turn(q, k, v, watched(k, v)) for q, k, v in rows]
    window = float(np.mean(held)) / _mean_length(rows)
    return {"bits": CODES + (16 - CODES) * window, "error": root_mean_square(errors)}


def _our_cycle(rows: Rows, **options: Any) -> tuple[float, int]:
    """The error, and the bytes of a pool with this one sequence."""
    cache = our_cache([(k, v) for _, k, v in rows], POOL, **options)
    seq = cache.add()
    errors = [
        in_turn(q, k, v, our_answers(cache, seq, layer, k, v, len(k) - CYCLE))
        for layer, (q, k, v) in enumerate(rows)
    ]
    return root_mean_square(errors), cache.nbytes()


@torch.no_grad()
def rows_of(model: Decoder, ids: list[int]) -> Rows:
    """(q, k, v) of every layer, as the cache gets them: normed and turned; q of a cycle."""
    found, attend = [], Packing._causal

    def seen(self, window, q, rows):
        found.append([x.numpy().copy() for x in (q, rows[0].keys, rows[0].values)])
        return attend(self, window, q, rows)

    with patch.object(Packing, "_causal", seen):
        model.run([ids], [model.new_cache()])
    return [[q[-CYCLE:], k, v] for q, k, v in found]


def read(
    model: Decoder, ids: list[int], positions: int, chunks: int
) -> tuple[Rows, dict[str, dict[str, Any]]]:
    """Rows of the first positions, and our caches; calibrated on as many chunks of what follows."""
    first, *later = (ids[positions * at :][:positions] for at in range(1 + chunks))
    calibrated = {"bits": 4, "calibration": calibrate(model, later)}
    return rows_of(model, first), {**OURS, "int4, calibrated": calibrated}


def at_the_end(rows: Rows, chosen: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Bits and errors of every cache when all positions are there, for the last queries."""
    pairs = [(k, v) for _, k, v in rows]
    caches = {}
    for name, options in chosen.items():
        found, bits = ours(pairs, pool=POOL, **options)
        caches[name] = {"bits": bits, "error": over_layers(rows, found)}
    return {**caches, **_peers(rows, pairs)}


def _peers(rows: Rows, pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    eight = [theirs(Fp8QuantizedLayer(), k, v) for k, v in pairs]
    codes = [(in_four_bits(k), in_four_bits(v)) for k, v in pairs]
    layers = [FourBitLayer() for _ in pairs]
    whole = [theirs(layer, k, v) for layer, (k, v) in zip(layers, pairs, strict=True)]
    window = layers[0].keys.shape[-2] / len(pairs[0][0])
    bits = {"theirs, 8": 8.0, "theirs, 4": CODES, "theirs, 4 and window": CODES}
    bits["theirs, 4 and window"] += (16 - CODES) * window
    found = zip(bits.items(), (eight, codes, whole), strict=True)
    return {name: {"bits": b, "error": over_layers(rows, got)} for (name, b), got in found}


def show(title: str, caches: dict[str, dict[str, float]]) -> str:
    peers = [peer for peer in caches if peer.startswith("theirs")]
    lines = [f"{title}: bits, error, of that of {', '.join(peers)}"]
    for cache, at in caches.items():
        ratios = "  ".join(f"{at['error'] / caches[peer]['error']:5.2f}" for peer in peers)
        recent = f"  {at['recent']} rows" if "recent" in at else ""
        lines.append(f"{cache:24} {at['bits']:5.2f}  {at['error']:.4f}  {ratios}{recent}")
    return "\n".join(lines)


def main() -> None:
    given = _arguments()
    torch.set_num_threads(1)
    model = Decoder.from_pretrained(given.model, dtype=torch.float32)
    ids = Tokenizer(given.model).encode(given.text.read_text()[:LETTERS])
    wanted = given.positions * (1 + given.calibrate)
    if len(ids) < wanted:
        raise SystemExit(f"{given.text} has {len(ids)} tokens: {wanted} are needed")
    rows, chosen = read(model, ids, given.positions, given.calibrate)
    four = {name: options for name, options in chosen.items() if options["bits"] == 4}
    parts = {"caches": at_the_end(rows, chosen), "over a cycle": over_a_cycle(rows, four)}
    for name, caches in parts.items():
        print(show(f"{given.name}, {given.positions} positions, {name}", caches))
    sizes = {"positions": given.positions, "calibrated on": given.positions * given.calibrate}
    results = {**measured_before("kv_cache", "cpu", given.out), given.name: {**sizes, **parts}}
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
