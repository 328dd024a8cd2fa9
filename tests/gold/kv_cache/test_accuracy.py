"""Attention error at equal bytes, beside transformers' own quantised caches.

Their float8 cache is run as it is. Their 4 bit cache leaves the arithmetic to a package that is not
among our dependencies (optimum-quanto); here its published scheme stands in for that package, below
transformers' own residual window: groups of 64 consecutive elements, scale (max − min) / 15, shift
min, codes 0 … 15, scale and shift in the model's 16 bit type: 4.5 bits an element. Scales, shifts
and codes were compared by hand with optimum-quanto 0.2.7 on random rows; its unpacking, which wants
a C++ compiler, was read only.

Rows are drawn at random, or those of a trained model, the one that comes with the package.
"""

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from trapline.gold.decoder.calibrate import calibrate as calibrate_on
from trapline.gold.decoder.layers import Attention
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.calibrate import calibrate
from trapline.gold.kv_cache.calibrated import CalibratedPair, NumpyArithmetic
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.ternary.demo import demo_model

POSITIONS, KV_HEADS, WIDTH = 1024, 2, 128
TRAINED, QUERIES = 512, 16
#: Positions of a pool over which the constants of a calibration are spread: they are the model's.
POOL = 65_536
ROOT = Path(__file__).parents[3]


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


def draw(outliers):
    """Rows as in examples/kv_cache_strategies.py, and as many of another text to calibrate with."""
    rng = np.random.default_rng(31)
    q = rng.standard_normal((16, 2 * KV_HEADS, WIDTH))
    k, v, other = (rng.standard_normal((POSITIONS, KV_HEADS, WIDTH)) for _ in range(3))
    if outliers:
        channels = [3, 40, 77, 101]
        means = 10 * rng.choice([-1, 1], (KV_HEADS, 4))
        for keys in (k, other):
            keys[:, :, channels] = means + 3 * keys[:, :, channels]
    other_v = rng.standard_normal((POSITIONS, KV_HEADS, WIDTH))
    other_q = rng.standard_normal((POSITIONS, 2 * KV_HEADS, WIDTH))
    return [x.astype(np.float32) for x in (q, k, v)], [[x] for x in (other_q, other, other_v)]


def in_four_bits(rows):
    """Their codes without their window."""
    layer = FourBitLayer()
    return layer._dequantize(layer._quantize(torch.from_numpy(rows), 0)).numpy()


def prompt_of(k):
    """Of 1024 positions 832: the rest comes one by one, and some of it stays in their window."""
    return len(k) * 13 // 16


def theirs(layer, k, v):
    """A prompt, then one position after the other; what their layer answers at the last."""
    keys, values = (torch.from_numpy(x).transpose(0, 1)[None] for x in (k, v))
    prompt = prompt_of(k)
    layer.update(keys[:, :, :prompt], values[:, :, :prompt])
    for at in range(prompt, len(k)):
        last = layer.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    return [x[0].transpose(0, 1).numpy() for x in last]


def ours(k, v, **options):
    (rows,), bits = ours_of_layers([(k, v)], **options)
    return rows, bits


def ours_of_layers(layers, *, pool=None, **options):
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


def error(q, rows, k, v):
    truth = attention(q, k, v)
    return np.linalg.norm(attention(q, *rows) - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize("outliers", [False, True])
def test_eight_bits_against_their_float8(outliers):
    """Both take 8 bits an element; ours has a scale for each row, theirs one for the first call."""
    (q, k, v), _ = draw(outliers)
    rows, bits = ours(k, v, bits=8)
    assert bits <= 8.2
    assert error(q, rows, k, v) <= 0.6 * error(q, theirs(Fp8QuantizedLayer(), k, v), k, v)


def test_four_bits_against_theirs_on_keys_with_outlying_channels():
    (q, k, v), other = draw(outliers=True)
    rows, bits = ours(k, v, bits=4, calibration=calibrate(*other), pool=POOL)
    assert bits <= 4.5  # what theirs takes without its residual window
    assert error(q, rows, k, v) <= 0.6 * error(q, theirs(FourBitLayer(), k, v), k, v)


def test_on_normal_rows_their_finer_groups_win_a_little():
    """Said in the docs, and held here so that it stays true: 4.15 bits against their 4.5."""
    (q, k, v), _ = draw(outliers=False)
    rows, bits = ours(k, v, bits=4, rotate=True)
    ratio = error(q, rows, k, v) / error(q, theirs(FourBitLayer(), k, v), k, v)
    assert bits < 4.2
    assert 1.0 < ratio < 1.3


@pytest.fixture(scope="module")
def reader():
    """A trained model, and the tokens that it reads: the first are judged, others calibrate."""
    model = Decoder.from_pretrained(demo_model(), dtype=torch.float32)
    return model, Tokenizer(demo_model()).encode((ROOT / "LICENSE").read_text())


@pytest.fixture(scope="module")
def trained(reader):
    """Of every layer: queries, keys, values."""
    model, ids = reader
    return [(q[-QUERIES:], k, v) for q, k, v in rows_of(model, ids[:TRAINED])]


@torch.no_grad()
def rows_of(model, ids):
    """(q, k, v) of every layer, as the cache gets them: normed and turned."""
    found, attend = [], Attention._causal

    def seen(self, q, stored, packing):
        found.append([x.numpy().copy() for x in (q, *stored[0])])
        return attend(self, q, stored, packing)

    with patch.object(Attention, "_causal", seen):
        model.run([ids], [model.new_cache()])
    return found


def over_layers(trained, cached):
    """Root mean square over the layers of the error of attention."""
    errors = [error(q, cached(k, v), k, v) for q, k, v in trained]
    return root_mean_square(errors)


def root_mean_square(errors):
    return np.sqrt(np.mean(np.square(errors)))


def test_eight_bits_on_rows_of_a_trained_model(trained):
    mine = over_layers(trained, lambda k, v: ours(k, v, bits=8)[0])
    peer = over_layers(trained, lambda k, v: theirs(Fp8QuantizedLayer(), k, v))
    assert mine <= 0.3 * peer


def four_bits_at_once(trained):
    """Their codes without their window: 4.5 bits."""
    return over_layers(trained, lambda k, v: (in_four_bits(k), in_four_bits(v)))


def calibrated_later(model, ids):
    chunks = [ids[at : at + TRAINED] for at in range(TRAINED, len(ids) - TRAINED, TRAINED)]
    return calibrate_on(model, chunks)


def test_four_bits_on_rows_of_a_trained_model(reader, trained):
    """Calibrated on what the model reads later, never on the rows that are judged."""
    found, bits = ours_of_layers(
        [rows[1:] for rows in trained], pool=POOL, bits=4, calibration=calibrated_later(*reader)
    )
    pairs = zip(trained, found, strict=True)
    mine = root_mean_square([error(q, rows, k, v) for (q, k, v), rows in pairs])
    assert bits <= 4.5
    assert mine <= 0.6 * four_bits_at_once(trained)


def test_rows_that_stand_elsewhere_lose_what_the_calibration_won(reader, trained):
    """Said in the docs, and held here so that it stays true."""
    codec = CalibratedPair(calibrated_later(*reader), NumpyArithmetic())
    errors = {}
    for off in (0, 1, 8, 100):
        found = [
            codec.decode(layer, codec.encode(layer, off, k, v), k.dtype)
            for layer, (_, k, v) in enumerate(trained)
        ]
        pairs = zip(trained, found, strict=True)
        errors[off] = root_mean_square([error(q, rows, k, v) for (q, k, v), rows in pairs])
    plain = over_layers(trained, lambda k, v: ours(k, v, bits=4)[0])
    assert errors[1] < 1.1 * errors[0]
    assert 1.3 * errors[0] < errors[8] < 0.8 * plain
    assert 0.9 * plain < errors[100] < 1.1 * plain


def test_four_bits_without_a_calibration_are_no_better_than_theirs(trained):
    """Said in the docs, and held here so that it stays true.

    Nothing stands out in these rows; and what is attended to is near, in the window of 96
    positions that they have not quantised yet.
    """
    mine = over_layers(trained, lambda k, v: ours(k, v, bits=4, rotate=True)[0])
    as_they_are = over_layers(trained, lambda k, v: theirs(FourBitLayer(), k, v))
    assert 0.95 < mine / four_bits_at_once(trained) < 1.1
    assert 2.5 < mine / as_they_are < 4.5


@pytest.mark.parametrize(("bits", "limit"), [(8, 8.5), ("fp8", 8.5), (4, 4.6)])
def test_bits_an_element_all_in(bits, limit):
    (_, k, v), _ = draw(outliers=False)
    assert ours(k, v, bits=bits)[1] <= limit
    assert ours(k, v, bits=bits, rotate=True)[1] <= limit


@pytest.mark.parametrize(
    "options",
    [{"bits": 8}, {"bits": 4, "rotate": True}, {"bits": 4, "calibration": True}, {"bits": "fp8"}],
)
def test_the_oldest_token_is_the_same_after_ten_and_three_thousand_steps(options):
    rng = np.random.default_rng(6)
    if "calibration" in options:
        other = [rng.standard_normal((1, 100, 1, 16)) for _ in range(3)]
        options = {**options, "calibration": calibrate(*other, turns=0.5 ** np.arange(8))}
    cache = KVCache(
        "paged_quantized", num_layers=1, num_kv_heads=1, head_dim=16, block_size=16,
        num_blocks=188, **options,
    )  # fmt: skip
    seq = cache.add()
    seen = {}
    while (step := cache.length(seq)) < 3000:
        # Fitted codecs try several scales: ten positions at a time, after the first ten.
        n = 10 if step >= 10 and options["bits"] == 4 else 1
        rows = rng.standard_normal((n, 1, 16)) * (1 + step)
        cache.append(seq, 0, rows, -rows)
        if cache.length(seq) in (10, 3000):
            seen[cache.length(seq)] = [part[0].tobytes() for part in cache.view(seq, 0)]
    assert seen[10] == seen[3000]
