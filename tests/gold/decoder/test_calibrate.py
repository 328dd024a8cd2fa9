"""The constants of a 4 bit cache from a decoder: its own rows, before they are turned."""

import numpy as np
import pytest
import torch

from trapline.gold.decoder.cache import StoredSequence
from trapline.gold.decoder.calibrate import calibrate
from trapline.gold.decoder.packing import Packing
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.api import KVCache

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TEXTS = [[(7 * i + i * i // 5) % 23 for i in range(start, start + 60)] for start in (0, 100)]


def cached(decoder):
    """Keys and values of all texts as a cache gets them, (layers, positions, G, D)."""
    rows = []
    for text in TEXTS:
        cache = decoder.new_cache()
        decoder.run([text], [cache])
        rows.append([part[:, : len(text)].numpy() for part in (cache._keys, cache._values)])
    return [np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True)]


def turned_back(keys, turns):
    positions = np.concatenate([np.arange(len(text)) for text in TEXTS])
    half = keys.shape[-1] // 2
    wave = np.exp(-1j * positions[:, None, None] * turns)
    out = (keys[..., :half] + 1j * keys[..., half:]) * wave
    return np.concatenate([out.real, out.imag], axis=-1)


def check_constants(decoder):
    calibration = calibrate(decoder, TEXTS)
    keys, values = cached(decoder)
    if calibration.turns is not None:
        keys = turned_back(keys, calibration.turns)
    for basis, rows in ((calibration.keys, keys), (calibration.values, values)):
        center = rows.mean(1)
        np.testing.assert_allclose(basis.center, center, atol=2e-3 * np.abs(rows).max())
        unit = (rows - center[:, None]).swapaxes(1, 2) @ basis.into.astype(float)
        spread = unit.std(2)[..., : rows.shape[-1] // 2]
        assert 0.8 < spread.min() <= spread.max() < 1.1


def test_calibration_reads_the_cached_rows(decoder):
    check_constants(decoder)


def test_calibration_reads_rotated_queries(decoder, monkeypatch):
    """Turning changes no norm, so norms tell which queries were taken."""
    taken, met, attend = [], [], Packing._causal

    def keeping(queries, keys, values, *, turns):
        taken.extend(np.linalg.norm(q, axis=-1) for q in queries)

    def seen(self, window, q, stored):
        met.append(np.linalg.norm(q.numpy(), axis=-1))
        return attend(self, window, q, stored)

    monkeypatch.setattr("trapline.gold.decoder.calibrate.calibrate_rows", keeping)
    monkeypatch.setattr(Packing, "_causal", seen)
    calibrate(decoder, TEXTS[:1])
    np.testing.assert_allclose(taken, met, rtol=1e-5)


def test_calibration_with_a_yarn_attention_factor(make):
    check_constants(make("llama", rope_parameters={**YARN, "rope_theta": 10_000.0}))


def test_calibration_removes_its_hooks(decoder):
    calibrate(decoder, TEXTS)
    assert not any(part._forward_hooks for part in decoder.modules())
    with pytest.raises(RangeError, match="vocabulary"):
        calibrate(decoder, [[99] * 60])
    assert not any(part._forward_hooks for part in decoder.modules())


def test_calibration_needs_a_text(decoder):
    with pytest.raises(RangeError, match="at least one text"):
        calibrate(decoder, [])


def test_calibration_accepts_rows_of_an_array(decoder):
    want = calibrate(decoder, TEXTS)
    for texts in (np.array(TEXTS), torch.tensor(TEXTS)):
        np.testing.assert_array_equal(calibrate(decoder, texts).keys.into, want.keys.into)


def test_a_decoder_runs_on_a_calibrated_cache(make):
    """Closer to its own logits than with rotated codes in the same bits."""
    decoder = make("qwen3")
    text = [(5 * i + i // 3) % 23 for i in range(60)]
    config = decoder.config
    want = decoder.logits(decoder.run([text], [decoder.new_cache()]).last)
    errors = []
    for options in ({"calibration": calibrate(decoder, TEXTS)}, {"rotate": True}):
        pool = KVCache(
            "paged_quantized", num_layers=config.layers, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, block_size=16, num_blocks=4, bits=4, **options,
        )  # fmt: skip
        got = decoder.logits(decoder.run([text], [StoredSequence(pool)]).last)
        errors.append(float(torch.linalg.vector_norm(got - want)))
    assert errors[0] < errors[1]
