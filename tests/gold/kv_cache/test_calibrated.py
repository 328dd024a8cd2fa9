"""Codes of several widths in a model's own basis: levels, planes, positions, what is refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.errors import RangeError, ShapeError, UnsupportedError
from trapline.gold.kv_cache.api import KVCache, chunked_prefill
from trapline.gold.kv_cache.calibrate import NEAR, _metric, calibrate, water_filled
from trapline.gold.kv_cache.calibrated_codec import (
    MOST_BITS,
    BasisCodec,
    NumpyArithmetic,
    distortion,
    levels,
)
from trapline.gold.kv_cache.torch_backend import TensorArithmetic

LAYERS, HEADS, WIDTH = 2, 2, 32
SIZES = {
    "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "block_size": 4,
    "num_blocks": 64,
}  # fmt: skip
TURNS = 100.0 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
WAYS = {"arrays": np.asarray, "tensors": torch.from_numpy}


def turned(rows, positions):
    """Written out with complex numbers, element d with d + D/2."""
    half = rows.shape[-1] // 2
    wave = np.exp(1j * np.asarray(positions)[:, None, None] * TURNS)
    out = (rows[..., :half] + 1j * rows[..., half:]) * wave
    return np.concatenate([out.real, out.imag], axis=-1)


@pytest.fixture
def draw(rng):
    """Rows before they are turned: the same steep spectrum in every head, around a mean."""
    mix = rng.standard_normal((3, HEADS, WIDTH, WIDTH)) * 0.8 ** np.arange(WIDTH)[:, None]
    means = rng.standard_normal((3, HEADS, WIDTH))

    def rows(n):
        drawn = rng.standard_normal((3, HEADS, n, WIDTH)) @ mix
        return [part.transpose(1, 0, 2) + mean for part, mean in zip(drawn, means, strict=True)]

    return rows


@pytest.fixture
def calibration(draw):
    q, k, v = ([part] * LAYERS for part in draw(2000))
    return calibrate(q, k, v, turns=TURNS)


def cache_of(calibration, kind="paged_quantized", **options):
    return KVCache(kind, bits=4, calibration=calibration, **{**SIZES, **options})


def relative(got, want):
    return np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)


def test_levels_are_lloyd_max():
    np.testing.assert_allclose(levels(0), [0])
    np.testing.assert_allclose(levels(1), [-0.7979, 0.7979], atol=1e-4)
    np.testing.assert_allclose(levels(2), [-1.510, -0.4528, 0.4528, 1.510], atol=1e-3)
    for bits, known in enumerate([1, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499]):
        assert distortion(bits) == pytest.approx(known, rel=4e-3)


def test_bits_follow_the_variances():
    assert water_filled(np.ones(6), 24) == (4,) * 6
    assert water_filled(np.array([16.0, 1.0]), 8) == (5, 3)
    assert water_filled(np.array([1e9, 1.0, 1e-9]), 8) == (MOST_BITS, 1, 0)


@pytest.mark.parametrize("width", [2, 5, 32])
@pytest.mark.parametrize("way", WAYS)
def test_bit_planes_round_trip_every_code(rng, way, width):
    x = [rng.standard_normal((100, 1, width)) * 0.7 ** np.arange(width)]
    basis = calibrate(x, x, x).keys
    math = NumpyArithmetic() if way == "arrays" else TensorArithmetic(torch.device("cpu"))
    codec = BasisCodec(basis, math)
    codes = rng.integers(0, 2 ** np.array(basis.widths), (50, 1, width)).astype(np.uint8)
    packed = codec._packed(WAYS[way](codes))
    assert packed.shape == (50, 1, sum(basis.widths) // 8)
    np.testing.assert_array_equal(codec._unpacked(packed), codes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["quantized", "paged_quantized"])
def test_calibration_halves_the_error_of_rotation(draw, calibration, kind, way):
    _, k, v = draw(200)
    keys = turned(k, np.arange(200))
    errors = []
    for options in ({"calibration": calibration}, {"rotate": True}):
        cache = KVCache(kind, bits=4, **SIZES, **options)
        seq = cache.add()
        cache.append(seq, 1, *map(WAYS[way], (keys, v)))
        errors.append(
            [relative(got, want) for got, want in zip(cache.view(seq, 1), (keys, v), strict=True)]
        )
        assert isinstance(cache.view(seq, 1)[0], type(WAYS[way](keys)))
    assert errors[0][0] < 0.5 * errors[1][0]
    assert errors[0][1] < 0.5 * errors[1][1]
    widths = calibration.keys.widths + calibration.values.widths
    assert sum(widths) == 2 * 4 * WIDTH


def test_rotary_keys_are_rotated_back_first(draw, calibration):
    """With turns that are not theirs keys lose what the basis knows."""
    _, k, v = draw(200)
    keys = turned(k, np.arange(200))
    errors = []
    for one in (calibration, replace(calibration, turns=None)):
        cache = cache_of(one)
        cache.append(seq := cache.add(), 0, keys, v)
        errors.append(relative(cache.view(seq, 0)[0], keys))
    assert errors[0] < 0.3 * errors[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["quantized", "paged_quantized"])
def test_moved_rows_decode_unchanged(draw, calibration, kind, way):
    """A row is turned by the position at which it came, wherever it lies now."""
    _, k, v = draw(20)
    cache = cache_of(calibration, kind)
    seq = cache.add()
    for layer in range(LAYERS):
        cache.append(seq, layer, *map(WAYS[way], (turned(k, np.arange(20)), v)))
    before = [np.asarray(part) for part in cache.view(seq, 1)]
    child = cache.fork(seq)
    order = [0, 1, 2, 9, 7, 19, 3]
    cache.keep(seq, order)
    for got, want in zip(cache.view(seq, 1), before, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want[order])
    np.testing.assert_array_equal(np.asarray(cache.view(child, 1)[0]), before[0])


@pytest.mark.parametrize("way", WAYS)
def test_chunk_size_does_not_change_the_result(draw, calibration, way):
    q, k, v = draw(37)
    rows = [WAYS[way](x) for x in (turned(q, np.arange(37)), turned(k, np.arange(37)), v)]
    outs = []
    for chunk in (37, 1, 5, 16, 36):
        cache = cache_of(calibration)
        outs.append(np.asarray(chunked_prefill(cache, cache.add(), 0, *rows, chunk)))
        assert np.abs(outs[-1] - outs[0]).max() <= 1e-5


def test_tensors_and_arrays_give_equal_codes(draw, calibration):
    _, k, v = draw(100)
    views = []
    for way in WAYS.values():
        cache = cache_of(calibration)
        cache.append(seq := cache.add(), 1, way(k), way(v))
        views.append([np.asarray(part) for part in cache.view(seq, 1)])
    for a, b in zip(*views, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def with_silent_directions(calibration):
    """The last eight directions of keys have no bits."""
    widths = (MOST_BITS,) * 16 + (1,) * 8 + (0,) * 8
    return replace(calibration, keys=replace(calibration.keys, widths=widths))


@pytest.mark.parametrize("way", WAYS)
def test_directions_without_bits_decode_to_the_mean(draw, calibration, way):
    silent = replace(with_silent_directions(calibration), turns=None)
    _, k, v = draw(100)
    cache = cache_of(silent)
    cache.append(seq := cache.add(), 0, WAYS[way](k), WAYS[way](v))
    keys = np.asarray(cache.view(seq, 0)[0])
    apart = (keys - silent.keys.center[0]).swapaxes(0, 1) @ silent.keys.into[0].astype(float)
    assert np.abs(apart[..., :24]).min() > 0
    assert np.abs(apart[..., 24:]).max() < 0.05  # as far as the maps undo each other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_encoded_in_float32(draw, calibration, dtype):
    _, k, v = (torch.from_numpy(x).to(dtype) for x in draw(50))
    cache, same = cache_of(calibration), cache_of(calibration)
    cache.append(seq := cache.add(), 0, k, v)
    same.append(twin := same.add(), 0, k.float(), v.float())
    for got, want in zip(cache.view(seq, 0), same.view(twin, 0), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


def test_structured_keys_leave_bits_to_values(rng):
    white = rng.standard_normal((2000, 1, 64))
    steep = white * 0.9 ** np.arange(64)
    for k, v, few, many in ((white, white, 32, 33), (steep, white, 15, 25), (white, steep, 40, 50)):
        found = calibrate([white], [k], [v])
        of_keys, of_values = (sum(basis.widths) / 8 for basis in (found.keys, found.values))
        assert of_keys + of_values == 65
        assert few <= of_keys <= many


@pytest.mark.parametrize("width", [2, 3, 4, 10, 33])
def test_no_direction_gets_more_bits_than_there_are(rng, width):
    """Of heads whose directions fill no whole bytes, one side wants all it can have."""
    q, steep, white = (rng.standard_normal((600, 1, width)) for _ in range(3))
    steep *= 0.3 ** np.arange(width)
    found = calibrate([q * np.arange(1, width + 1) ** 6.0], [steep], [white])
    swapped = calibrate([q], [white], [steep])
    for one in (found, swapped):
        widths = [basis.widths for basis in (one.keys, one.values)]
        assert sum(map(sum, widths)) == 8 * 2 * -(-width // 2)
        assert max(map(max, widths)) <= MOST_BITS


def test_constants_and_positions_are_counted(calibration):
    cache = cache_of(calibration, like=np.zeros(1))
    rows = 64 * 4 * LAYERS * (HEADS * (WIDTH + 4) + 4)
    maps = 4 * LAYERS * HEADS * WIDTH**2 * 2
    assert cache.nbytes() >= rows + maps
    assert cache.nbytes() == pytest.approx(rows + maps, rel=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_scale_is_refused_and_nothing_changed(draw, calibration, way, bad):
    _, k, v = draw(3)
    cache = cache_of(calibration)
    seq = cache.add()
    for k_bad, v_bad in ((k * bad, v), (k, v * bad)):
        with pytest.raises(RangeError, match="finite"):
            cache.append(seq, 0, WAYS[way](k_bad), WAYS[way](v_bad))
    assert len(cache.view(seq, 0)[0]) == 0


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_another_model_are_refused(draw, calibration, way):
    small = calibrate(*([1e-3 * part] * LAYERS for part in draw(100)))
    cache = cache_of(small)
    with pytest.raises(RangeError, match="too far from those"):
        cache.append(cache.add(), 0, *[WAYS[way](1e3 * part) for part in draw(3)[1:]])


def test_keys_are_exact_where_queries_look(rng):
    """Of equal keys more bits go to the elements that queries multiply."""
    q, k, v = (rng.standard_normal((2000, 1, WIDTH)) for _ in range(3))
    looking = q * np.where(np.arange(WIDTH) < 4, 1, 0.1)
    errors = []
    for queries in (looking, q):
        cache = KVCache(
            "quantized", bits=4, calibration=calibrate([queries], [k], [v]),
            **{**SIZES, "num_layers": 1, "num_kv_heads": 1},
        )  # fmt: skip
        cache.append(seq := cache.add(), 0, k[:200], v[:200])
        missed = cache.view(seq, 0)[0] - k[:200]
        errors.append(np.linalg.norm(looking[:, 0] @ missed[:, 0].T))
    assert errors[0] < 0.75 * errors[1]


def test_queries_count_as_they_meet_keys_behind_them(rng):
    """The metric of turned queries, against queries that are turned by every distance."""
    q = rng.standard_normal((300, 1, WIDTH)) * np.arange(WIDTH)
    weights = 1 / (1 + np.arange(NEAR))
    want = np.zeros((WIDTH, WIDTH))
    for distance, weight in enumerate(weights):
        met = turned(q, np.full(300, distance))[:, 0]
        want += weight / weights.sum() * met.T @ met / 300
    np.testing.assert_allclose(_metric(q, 1, TURNS)[0], want, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 8}, "for bits=4"),
        ({"rotate": True}, "no rotation"),
        ({"num_layers": 3}, r"of \(2, 2, 32\), the cache of \(3, 2, 32\)"),
        ({"kind": "paged", "bits": None}, "takes no bits, rotation or calibration"),
    ],
)
def test_cache_options_that_contradict_the_calibration_raise(calibration, options, says):
    with pytest.raises((RangeError, ShapeError), match=says):
        KVCache(**{"kind": "quantized", "bits": 4, "calibration": calibration, **SIZES, **options})


def test_calibrated_pages_are_not_available_to_kernels(calibration):
    cache = cache_of(calibration, like=np.zeros(1))
    with pytest.raises(UnsupportedError, match="calibrated"):
        cache.pages(0)
    with pytest.raises(UnsupportedError, match="calibrated"):
        cache.extend(cache.add(), 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda b: {"back": b.back * np.float16(2)}, "singular"),
        (lambda b: {"into": b.into * np.float16(0)}, "singular"),
        (lambda b: {"center": b.center * np.float16(np.nan)}, "center must be finite"),
        (lambda b: {"into": b.into[:1]}, "into must be"),
        (lambda b: {"back": b.back.astype(np.float32)}, "float16"),
        (lambda b: {"center": b.center[0]}, "layers, G, D"),
        (lambda b: {"widths": b.widths[::-1]}, "falling"),
        (lambda b: {"widths": b.widths[:-1]}, "32 falling"),
        (lambda b: {"widths": (9, *b.widths[1:])}, "0 … 7"),
        (lambda b: {"widths": (MOST_BITS,) + (0,) * (WIDTH - 1)}, "fill bytes"),
    ],
)
def test_invalid_basis_raises(calibration, changed, says):
    with pytest.raises((RangeError, ShapeError), match=says):
        replace(calibration.keys, **changed(calibration.keys))


def test_calibration_with_mismatched_shapes_raises(calibration):
    v = calibration.values
    fewer = replace(v, center=v.center[:1], into=v.into[:1], back=v.back[:1])
    with pytest.raises(ShapeError, match="but values"):
        replace(calibration, values=fewer)


BAD_TURNS = [TURNS[1:], TURNS * np.nan, TURNS[:, None] * np.ones(3), TURNS[0]]


@pytest.mark.parametrize("bad", [*BAD_TURNS, TURNS.astype(np.float32)])
def test_invalid_turns_raise(calibration, bad):
    with pytest.raises((RangeError, ShapeError), match="turns"):
        replace(calibration, turns=bad)


@pytest.mark.parametrize("bad", BAD_TURNS)
def test_calibrate_rejects_invalid_turns(draw, bad):
    with pytest.raises((RangeError, ShapeError), match="turns"):
        calibrate(*([part] for part in draw(100)), turns=bad)


def test_calibration_can_be_pickled(draw, calibration):
    again = pickle.loads(pickle.dumps(calibration))
    assert again != calibration  # compared as one thing: arrays have no truth value
    _, k, v = draw(10)
    views = []
    for one in (calibration, again):
        cache = cache_of(one)
        cache.append(seq := cache.add(), 0, k, v)
        views.append(cache.view(seq, 0))
    np.testing.assert_array_equal(*views)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda q, k, v: (q, k[:1], v), "layers"),
        (lambda q, k, v: ([], [], []), "layers"),
        (lambda q, k, v: (q, [k[0], k[1][:, :1]], v), "layers must be alike"),
        (lambda q, k, v: (q, k, [x[:, :1] for x in v]), r"needs \(n, G, D\)"),
        (lambda q, k, v: ([x[:, :1] for x in q], k, v), "queries of layer 0"),
        (lambda q, k, v: tuple([x[:, :0] for x in part] for part in (q, k, v)), "queries of layer"),
        (lambda q, k, v: ([x[:32] for x in q], [x[:32] for x in k], [x[:32] for x in v]), "few"),
        (lambda q, k, v: (q, [x * np.nan for x in k], v), "keys of layer 0 are not finite"),
        (lambda q, k, v: (q, k, [x * 0 for x in v]), "do not vary"),
        (lambda q, k, v: tuple([x[..., :1] for x in part] for part in (q, k, v)), "one element"),
    ],
)
def test_calibrate_rejects_invalid_rows(draw, spoil, says):
    q, k, v = ([part] * LAYERS for part in draw(100))
    with pytest.raises((RangeError, ShapeError), match=says):
        calibrate(*spoil(q, k, v))


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["quantized", "paged_quantized"])
def test_gpu_codes_match_the_cpu(draw, calibration, kind):
    """In float64, where no sum comes near enough to an edge to fall on its other side."""
    _, k, v = (torch.from_numpy(part) for part in draw(100))
    views = []
    for device in ("cpu", "cuda"):
        cache = cache_of(with_silent_directions(calibration), kind)
        seq = cache.add()
        for layer in range(LAYERS):
            cache.append(seq, layer, k.to(device), v.to(device))
        cache.keep(seq, [*range(50), *range(60, 100)])
        views.append([part.cpu() for part in cache.view(seq, 1)])
        assert cache.view(seq, 1)[0].device.type == device
    for a, b in zip(*views, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
