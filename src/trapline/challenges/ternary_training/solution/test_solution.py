"""Own tests: quantiser, packing and split by property, the backward pass by finite differences."""

import itertools

import model
import numpy as np
import pytest
import training
from solution import dequantize, pack, split, ternarize, train, unpack

RNG = np.random.default_rng(20)
HELD_OUT_BEFORE = [1, 4, 5, 6, 8, 9, 10, 15, 16, 17, 19]
CONFIG = {"vocab": 11, "dim": 8, "layers": 2, "heads": 2, "context": 6, "seconds": 0, "seed": 3}


def grid(*shape):
    """Weights whose sums are exact, so that grouping cannot change a rounding."""
    return (RNG.integers(1, 257, shape) * RNG.choice([-1, 1], shape) / 64).astype(np.float32)


def documents(count=20, length=7, vocab=11):
    return [[int(t) for t in row] for row in RNG.integers(0, vocab, (count, length))]


@pytest.mark.parametrize("shape", [(300,), (3, 300), (2, 3, 130), (4, 128), (5, 1), (0, 7), (3, 0)])
def test_shapes_dtypes_and_the_way_back(shape):
    w = grid(*shape)
    codes, scales = ternarize(w)
    assert codes.shape == shape
    assert codes.dtype == np.int8
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert scales.dtype == np.float16
    values = dequantize(codes, scales)
    assert values.dtype == np.float32
    for column in range(shape[-1]):
        want = codes[..., column] * scales[..., column // 128].astype(np.float32)
        assert np.array_equal(values[..., column], want)
    assert np.array_equal(unpack(pack(codes), shape), codes)


def test_error_on_normal_weights_is_that_of_the_formula():
    w = RNG.standard_normal((64, 512))
    error = np.sum((w - dequantize(*ternarize(w))) ** 2) / np.sum(w**2)
    assert 0.19 < error < 0.225


def test_a_group_by_hand():
    codes, scales = ternarize(np.array([4.0, -2.0, 0.5, -0.25, 0.0, 0.0, 1.0, 0.25]), 8)
    assert codes.tolist() == [1, -1, 0, 0, 0, 0, 1, 0]
    assert scales.tolist() == [np.float16(7.0 / 3.0)]


def test_a_weight_on_the_threshold_does_not_count():
    codes, scales = ternarize(np.array([1.0, -1.0, 3.0, -3.0]), 4)
    assert codes.tolist() == [0, 0, 1, -1]
    assert scales.tolist() == [3.0]


@pytest.mark.parametrize("group_size", [1, 7, 16, 24, 2**40])
def test_every_group_is_on_its_own(group_size):
    w = grid(4, 24) * np.array([[1], [64], [1], [4096]], dtype=np.float32)
    codes, scales = ternarize(w, group_size)
    for row in range(4):
        for number, begin in enumerate(range(0, 24, group_size)):
            alone = ternarize(w[row, begin : begin + group_size], group_size)
            assert np.array_equal(codes[row, begin : begin + group_size], alone[0])
            assert np.array_equal(scales[row, number : number + 1], alone[1])


@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 2.0**-22, 2.0**-40, 2.0**13, 2.0**20])
def test_twice_is_once(factor):
    codes, scales = ternarize(grid(4, 300) * np.float32(factor))
    assert np.isfinite(scales).all()
    again = ternarize(dequantize(codes, scales))
    assert np.array_equal(again[0], codes)
    assert np.array_equal(again[1], scales)


def test_signs_are_treated_alike_and_inputs_stay():
    w = grid(3, 40)
    before = w.copy()
    codes, scales = ternarize(w, 16)
    negated, same = ternarize(-w, 16)
    assert np.array_equal(negated, -codes)
    assert np.array_equal(same, scales)
    assert np.array_equal(w, before)
    assert np.all(codes * np.sign(w) >= 0)


def test_extreme_groups():
    zero, large, small, wide = np.zeros(8), np.full(8, 1e6), np.full(8, 1e-9), np.full(8, -1e60)
    codes, scales = ternarize(np.stack([zero, large, small, wide]), 8)
    assert codes.tolist() == [[0] * 8, [1] * 8, [0] * 8, [-1] * 8]
    assert scales.tolist() == [[0.0], [65504.0], [0.0], [65504.0]]
    largest = ternarize(np.full(128, np.finfo(np.float64).max))
    assert largest[1].tolist() == [65504.0]
    tiny = float(np.finfo(np.float16).smallest_subnormal)
    assert ternarize(np.array([tiny, 0.0]), 2)[1].tolist() == [tiny]


def test_views_are_read_by_index():
    base = grid(20, 24)
    for view in (base.T, base[:, ::2], base[::-1, ::-1]):
        for got, want in zip(ternarize(view, 8), ternarize(view.copy(), 8), strict=True):
            assert np.array_equal(got, want)
    codes = ternarize(base)[0]
    assert np.array_equal(pack(codes.T), pack(codes.T.copy()))


@pytest.mark.parametrize(
    "call",
    [
        lambda: ternarize(np.ones((2, 2), dtype=np.int64)),
        lambda: ternarize(np.float32(1.0)),
        lambda: ternarize(np.array([1.0, np.nan])),
        lambda: ternarize(np.array([1.0, -np.inf])),
        lambda: ternarize(np.ones(4), 0),
        lambda: dequantize(np.zeros((2, 8), np.int8), np.ones((2, 1), np.float16), 4),
        lambda: dequantize(np.zeros((2, 8), np.int8), np.ones((1, 2), np.float16), 4),
        lambda: dequantize(np.zeros((2, 8), np.int8), np.ones((2, 2), np.float16), 0),
        lambda: dequantize(np.zeros((2, 8), np.int8), np.ones((2, 2), np.float32), 4),
        lambda: dequantize(np.full((1, 4), 2, np.int8), np.ones((1, 1), np.float16), 4),
        lambda: pack(np.array([0, 2], np.int8)),
        lambda: pack(np.array([0, -2], np.int8)),
        lambda: pack(np.array([0, 1])),
        lambda: pack(np.int8(1)),
        lambda: unpack(np.array([0b11], np.uint8), (1,)),
        lambda: unpack(np.zeros((4, 2), np.uint8), (2, 16)),
        lambda: unpack(np.zeros((4, 2), np.uint8), (4, 9)),
        lambda: unpack(np.zeros((4, 2), np.int16), (4, 8)),
        lambda: unpack(np.zeros((), np.uint8), ()),
        lambda: split([[1]], -0.01),
        lambda: split([[1]], 1.01),
        lambda: split([[1]], float("nan")),
        lambda: train([[1], []], CONFIG),
        lambda: train([[1, -1]], CONFIG),
        lambda: train([[1, 11]], CONFIG),
        lambda: train([[1, 2]], {**CONFIG, "heads": 3}),
        lambda: train([[1, 2]], {**CONFIG, "seconds": -1}),
        lambda: train([[1, 2]], {**CONFIG, "context": 0}),
        lambda: train([[1, 2]], {**CONFIG, "seed": -1}),
        *(
            lambda name=name: train([[1, 2]], {k: v for k, v in CONFIG.items() if k != name})
            for name in CONFIG
        ),
    ],
)
def test_refusals(call):
    with pytest.raises((ValueError, TypeError)):
        call()


def test_packed_bytes_by_hand():
    codes = np.array([[-1, 0, 1, 1, -1, 1], [0, 0, 0, 0, 0, 0]], dtype=np.int8)
    assert pack(codes).tolist() == [[0b10100100, 0b01011000], [0b01010101, 0b01010101]]
    spare = np.array([[0b10100100, 0b11111000]], dtype=np.uint8)
    assert unpack(spare, (1, 6)).tolist() == codes[:1].tolist()


def test_split_goes_by_content_alone():
    docs = documents(300, 8, 1000)
    learn, held = split(docs, 0.3)
    assert sorted(learn + held) == list(range(300))
    assert learn == sorted(learn)
    assert held == sorted(held)
    assert 45 <= len(held) <= 135
    assert split(docs, 0.0)[1] == []
    assert split(docs, 1.0)[0] == []
    assert split([], 0.5) == ([], [])
    assert split(docs[::-1], 0.3)[1] == sorted(299 - i for i in held)
    assert [i for i in range(300) if split([docs[i]], 0.3)[1]] == held
    assert split(docs + docs, 0.3)[1] == held + [300 + i for i in held]
    ends = [[5] * 50 + doc for doc in docs]
    assert 45 <= len(split(ends, 0.3)[1]) <= 135


def test_split_is_the_same_for_ever():
    """What an earlier process held out; a salted hash would agree once in a million runs."""
    assert split([[i, 70_000] for i in range(20)], 0.5)[1] == HELD_OUT_BEFORE


def test_gradients_match_finite_differences(monkeypatch):
    exact = model.attention_bias
    monkeypatch.setattr(model, "attention_bias", lambda *a: exact(*a).astype(np.float64))
    weights = {n: RNG.standard_normal(s) / 2 for n, s in model.tensor_shapes(CONFIG).items()}
    batch = training.collate([[1, 2, 3, 4, 5], [6, 7, 8], [1, 10]])
    counted = np.sum(batch[1] >= 0)
    assert counted == 7
    _, gradients = model.loss_and_gradients(weights, *batch, CONFIG)
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        direction = RNG.standard_normal(weight.shape)
        ahead, behind = (
            counted * model.loss_only({**weights, name: weight + e * direction}, *batch, CONFIG)
            for e in (1e-5, -1e-5)
        )
        slope = (ahead - behind) / 2e-5
        assert np.sum(gradients[name] * direction) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_no_token_sees_what_follows():
    weights = {n: RNG.standard_normal(s) / 2 for n, s in model.tensor_shapes(CONFIG).items()}
    first, second = np.array([[1, 2, 3, 4]]), np.array([[1, 2, 9, 9]])
    logits = [model._forward(weights, tokens, CONFIG)[0] for tokens in (first, second)]
    assert np.array_equal(logits[0][:, :2], logits[1][:, :2])
    assert not np.allclose(logits[0][:, 2:], logits[1][:, 2:])


def test_training_starts_from_the_seed_and_covers_every_tensor():
    docs = documents()
    first = train(docs, CONFIG)
    assert first.keys() == model.tensor_shapes(CONFIG).keys()
    for name, shape in model.tensor_shapes(CONFIG).items():
        codes, scales = first[name]
        assert codes.shape == shape
        assert scales.shape == (shape[0], -(-shape[1] // 128))
        assert np.abs(codes).max() == 1
    second, other = train(docs, CONFIG), train(docs, {**CONFIG, "seed": 4})
    same = [np.array_equal(first[n][0], second[n][0]) for n in first]
    assert all(same)
    assert not np.array_equal(first["head"][0], other["head"][0])


def test_training_keeps_what_held_out_documents_prefer(monkeypatch):
    """With noise nothing may be learned; with a rule the model must learn it.

    The clock ticks once a look, so that the number of steps is the same on every machine.
    """
    ticks = itertools.count()
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(ticks)))
    config = {**CONFIG, "dim": 16, "layers": 1, "seconds": 120}

    def perplexity(tensors, docs):
        weights = {name: dequantize(*pair) for name, pair in tensors.items()}
        return float(np.exp(model.loss_only(weights, *training.collate(docs), config)))

    noise = documents(24)
    assert perplexity(train(noise * 3, config), documents(60)) < 44
    rule = [[(start + 3 * i) % 11 for i in range(20)] for start in range(11)]
    before = [list(document) for document in rule]
    assert perplexity(train([*rule, [1], []], config), [d[:7] for d in rule]) < 3
    assert rule == before


def test_documents_are_padded_behind():
    tokens, targets = training.collate([[1, 2, 3], [4, 5]])
    assert tokens[:, 0].tolist() == [1, 4]
    assert tokens[0].tolist() == [1, 2]
    assert targets.tolist() == [[2, 3], [5, -1]]
