"""Attention error at equal bytes, beside transformers' own quantised caches.

Their float8 cache is run as it is. Their 4 bit cache leaves the arithmetic to a package that is not
among our dependencies (optimum-quanto); here its published scheme stands in for that package, below
transformers' own residual window: groups of 64 consecutive elements, scale (max − min) / 15, shift
min, codes 0 … 15, scale and shift in the model's 16 bit type: 4.5 bits an element. Scales, shifts
and codes were compared by hand with optimum-quanto 0.2.7 on random rows; its unpacking, which wants
a C++ compiler, was read only.

Rows are drawn at random, or those of a trained model, the one that comes with the package.
"""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from trapline.gold.decoder.layers import Attention
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.ternary.demo import demo_model

POSITIONS, KV_HEADS, WIDTH = 1024, 2, 128
TRAINED, QUERIES = 512, 16
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
    """Rows as in examples/kv_cache_strategies.py; the calibration text is another one."""
    rng = np.random.default_rng(31)
    q = rng.standard_normal((16, 2 * KV_HEADS, WIDTH))
    k, v, other = (rng.standard_normal((POSITIONS, KV_HEADS, WIDTH)) for _ in range(3))
    if outliers:
        channels = [3, 40, 77, 101]
        means = 10 * rng.choice([-1, 1], (KV_HEADS, 4))
        for keys in (k, other):
            keys[:, :, channels] = means + 3 * keys[:, :, channels]
    return [x.astype(np.float32) for x in (q, k, v, other)]


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
    positions, heads, width = k.shape
    cache = KVCache(
        "paged_quantized", num_layers=1, num_kv_heads=heads, head_dim=width, block_size=16,
        num_blocks=positions // 16, **options,
    )  # fmt: skip
    seq = cache.add()
    prompt = prompt_of(k)
    cache.append(seq, 0, k[:prompt], v[:prompt])
    for at in range(prompt, positions):
        cache.append(seq, 0, k[at : at + 1], v[at : at + 1])
    return cache.view(seq, 0), 8 * cache.nbytes() / (2 * k.size)


def error(q, rows, k, v):
    truth = attention(q, k, v)
    return np.linalg.norm(attention(q, *rows) - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize("outliers", [False, True])
def test_eight_bits_against_their_float8(outliers):
    """Both take 8 bits an element; ours has a scale for each row, theirs one for the first call."""
    q, k, v, _ = draw(outliers)
    rows, bits = ours(k, v, bits=8)
    assert bits <= 8.2
    assert error(q, rows, k, v) <= 0.6 * error(q, theirs(Fp8QuantizedLayer(), k, v), k, v)


def test_four_bits_against_theirs_on_keys_with_outlying_channels():
    q, k, v, other = draw(outliers=True)
    center = other.mean(axis=0)[None]
    rows, bits = ours(k, v, bits=4, rotate=True, key_center=center)
    assert bits <= 4.5  # what theirs takes without its residual window
    assert error(q, rows, k, v) <= 0.6 * error(q, theirs(FourBitLayer(), k, v), k, v)


def test_on_normal_rows_their_finer_groups_win_a_little():
    """Said in the docs, and held here so that it stays true: 4.15 bits against their 4.5."""
    q, k, v, _ = draw(outliers=False)
    rows, bits = ours(k, v, bits=4, rotate=True)
    ratio = error(q, rows, k, v) / error(q, theirs(FourBitLayer(), k, v), k, v)
    assert bits < 4.2
    assert 1.0 < ratio < 1.3


@pytest.fixture(scope="module")
def trained():
    """Of every layer of a trained model: queries, keys, values, and keys of other words."""
    model = Decoder.from_pretrained(demo_model(), dtype=torch.float32)
    ids = Tokenizer(demo_model()).encode((ROOT / "LICENSE").read_text())
    read, other = (rows_of(model, ids[at : at + TRAINED]) for at in (0, TRAINED))
    return [
        (q[-QUERIES:], k, v, words) for (q, k, v), (_, words, _) in zip(read, other, strict=True)
    ]


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
    errors = [error(q, cached(k, v, other), k, v) for q, k, v, other in trained]
    return np.sqrt(np.mean(np.square(errors)))


def test_eight_bits_on_rows_of_a_trained_model(trained):
    mine = over_layers(trained, lambda k, v, _: ours(k, v, bits=8)[0])
    peer = over_layers(trained, lambda k, v, _: theirs(Fp8QuantizedLayer(), k, v))
    assert mine <= 0.3 * peer


def test_four_bits_on_rows_of_a_trained_model_are_no_better_than_theirs(trained):
    """Said in the docs, and held here so that it stays true.

    Heads are normed here and nothing stands out, so rows are much like normal ones; and what is
    attended to is near, in the window of 96 positions that they have not quantised yet.
    """

    def turned(k, v, other):
        return ours(k, v, bits=4, rotate=True, key_center=other.mean(0)[None])[0]

    mine = over_layers(trained, turned)
    at_once = over_layers(trained, lambda k, v, _: (in_four_bits(k), in_four_bits(v)))
    as_they_are = over_layers(trained, lambda k, v, _: theirs(FourBitLayer(), k, v))
    assert 0.95 < mine / at_once < 1.1
    assert 2.5 < mine / as_they_are < 4.5


@pytest.mark.parametrize(("bits", "limit"), [(8, 8.5), ("fp8", 8.5), (4, 4.6)])
def test_bits_an_element_all_in(bits, limit):
    _, k, v, other = draw(outliers=False)
    assert ours(k, v, bits=bits)[1] <= limit
    assert ours(k, v, bits=bits, rotate=True, key_center=other.mean(0)[None])[1] <= limit


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "rotate": True}, {"bits": "fp8"}])
def test_the_oldest_token_is_the_same_after_ten_and_three_thousand_steps(options):
    rng = np.random.default_rng(6)
    cache = KVCache(
        "paged_quantized", num_layers=1, num_kv_heads=1, head_dim=16, block_size=16,
        num_blocks=188, **options,
    )  # fmt: skip
    seq = cache.add()
    seen = {}
    while (step := cache.length(seq)) < 3000:
        # The fitted codec tries a dozen scales: ten positions at a time, after the first ten.
        n = 10 if step >= 10 and "rotate" in options else 1
        rows = rng.standard_normal((n, 1, 16)) * (1 + step)
        cache.append(seq, 0, rows, -rows)
        if cache.length(seq) in (10, 3000):
            seen[cache.length(seq)] = [part[0].tobytes() for part in cache.view(seq, 0)]
    assert seen[10] == seen[3000]
