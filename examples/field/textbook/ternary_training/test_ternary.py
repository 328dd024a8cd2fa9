import numpy as np
import pytest
from solution import dequantize, pack, split, ternarize, train, unpack

rng = np.random.default_rng(0)


@pytest.mark.parametrize("n", [1, 100, 128, 300])
def test_round_trip(n):
    w = rng.normal(size=(3, n))
    codes, scales = ternarize(w)
    values = dequantize(codes, scales)
    codes2, scales2 = ternarize(values)
    assert np.array_equal(codes, codes2)
    assert np.array_equal(scales, scales2)
    assert np.array_equal(unpack(pack(codes), codes.shape), codes)


def test_error():
    w = rng.normal(size=(16, 512))
    error = np.sum((w - dequantize(*ternarize(w))) ** 2) / np.sum(w**2)
    assert error < 0.23


def test_zero_group():
    codes, scales = ternarize(np.zeros((2, 130)))
    assert not codes.any()
    assert np.all(scales == 0)


def test_pack_example():
    assert pack(np.array([-1, 0, 1, 1, -1], dtype=np.int8)).tolist() == [0b10100100, 0b01010100]


def test_split():
    docs = [[i, i + 1, 5] for i in range(200)]
    train_ids, valid_ids = split(docs, 0.25)
    assert sorted(train_ids + valid_ids) == list(range(200))
    assert 20 < len(valid_ids) < 80
    assert split(docs + docs, 0.25)[1] == valid_ids + [200 + i for i in valid_ids]


def test_bad_input():
    with pytest.raises(ValueError):
        ternarize(np.array([np.nan]))
    with pytest.raises(TypeError):
        ternarize(np.array([1]))
    with pytest.raises(ValueError):
        pack(np.array([2], dtype=np.int8))
    with pytest.raises(ValueError):
        split([[1]], 2)


def test_train_names():
    config = dict(vocab=9, dim=8, layers=1, heads=2, context=8, seconds=0, seed=1)
    result = train([[1, 2, 3], [4, 5]], config)
    assert len(result) == 8
    assert result["layers.0.down"][0].shape == (8, 32)
