"""The integer codecs: half a step of error, every code, odd widths, the ends of the range."""

import numpy as np
import pytest

from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.codecs import (
    IntCodec,
    RotatedCodec,
    hadamard,
    pack_nibbles,
    unpack_nibbles,
)
from trapline.gold.kv_cache.oracle import quantization_step

FLOAT64 = np.dtype(np.float64)


@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_at_most_half_a_step(rng, bits, width):
    codec = IntCodec(bits, width)
    for size in (1e-3, 1.0, 1e4):
        rows = size * (0.5 + rng.random((20, 3, width))) * rng.choice([-1, 1], (20, 3, width))
        back = codec.decode(codec.encode(rows), FLOAT64)
        assert np.all(np.abs(back - rows) <= 0.51 * quantization_step(rows, bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_and_tiny_rows(bits):
    codec = IntCodec(bits, 4)
    rows = np.zeros((2, 1, 4))
    rows[1] = 1e-12
    back = codec.decode(codec.encode(rows), FLOAT64)
    np.testing.assert_array_equal(back[0], 0)
    assert np.all(np.abs(back[1]) <= 1e-7)


@pytest.mark.parametrize("value", [1e9, np.inf, np.nan])
def test_rows_without_a_finite_scale_raise(value):
    with pytest.raises(RangeError, match="at most"):
        IntCodec(8, 2).encode(np.full((1, 1, 2), value))


def test_nibbles_round_trip():
    codes = np.arange(-8, 8, dtype=np.int8)
    for width in range(1, 17):
        packed = pack_nibbles(codes[:width])
        assert packed.shape == (-(-width // 2),)
        np.testing.assert_array_equal(unpack_nibbles(packed, width), codes[:width])


def test_byte_holds_elements_d_and_d_plus_half():
    packed = pack_nibbles(np.array([1, 2, 3, -4], np.int8))
    np.testing.assert_array_equal(packed, [1 | 3 << 4, 2 | 12 << 4])


def test_typical_error_of_normal_rows(rng):
    rows = rng.standard_normal((2000, 1, 128))
    for bits, low, high in ((8, 0.005, 0.008), (4, 0.09, 0.14)):
        codec = IntCodec(bits, 128)
        back = codec.decode(codec.encode(rows), FLOAT64)
        relative = np.linalg.norm(back - rows) / np.linalg.norm(rows)
        assert low < relative < high


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_matrix_is_its_own_inverse(width):
    matrix = hadamard(width)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(width), atol=1e-12)


def test_rotation_spreads_a_large_channel(rng):
    rows = rng.standard_normal((50, 2, 64))
    rows[:, :, 5] = 40
    plain, rotated = IntCodec(4, 64), RotatedCodec(IntCodec(4, 64, fitted=True), 64)
    errors = [
        np.linalg.norm(codec.decode(codec.encode(rows), FLOAT64)[..., :5] - rows[..., :5])
        for codec in (plain, rotated)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_fitted_scale_never_increases_the_error(rng):
    rows = rng.standard_normal((200, 2, 32)) * rng.gamma(1, 2, (200, 2, 32))
    for bits in (4, 8):
        errors = []
        for fitted in (False, True):
            codec = IntCodec(bits, 32, fitted=fitted)
            back = codec.decode(codec.encode(rows), FLOAT64)
            errors.append(((back - rows) ** 2).sum(axis=-1))
        assert np.all(errors[1] <= errors[0] * (1 + 1e-12))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "paged", "rotate": True}, "takes no bits, rotation or calibration"),
        ({"kind": "dense", "bits": 8}, "takes no bits"),
        ({"kind": "quantized", "bits": 4, "rotate": True}, "power of 2, not 6"),
        ({"kind": "quantized", "bits": "int8"}, "bits must be 8, 4 or 'fp8'"),
    ],
)
def test_contradictory_options_raise(options, says):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 6, "block_size": 1, "num_blocks": 1}
    with pytest.raises((RangeError, ShapeError), match=says):
        KVCache(**options, **sizes)
