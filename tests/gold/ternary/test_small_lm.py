"""The judge's model: causal, and by hand where a hand can follow."""

import numpy as np

from trapline.gold.ternary import small_lm
from trapline.gold.ternary.api import ternarize

CONFIG = {"vocab": 9, "dim": 8, "layers": 2, "heads": 2}
RNG = np.random.default_rng(9)


def weights() -> dict[str, np.ndarray]:
    tensors = {
        name: ternarize(RNG.standard_normal(shape))
        for name, shape in small_lm.tensor_shapes(CONFIG).items()
    }
    return small_lm.dense(tensors)


def test_attention_is_causal() -> None:
    model = weights()
    first = small_lm.logits(model, [1, 2, 3, 4], CONFIG)
    second = small_lm.logits(model, [1, 2, 8, 8], CONFIG)
    assert np.array_equal(first[:2], second[:2])
    assert not np.allclose(first[2:], second[2:])
    peeking = small_lm.logits(model, [1, 2, 8, 8], CONFIG, causal=False)
    assert not np.allclose(first[:2], peeking[:2])


def test_zero_weights_give_uniform_predictions() -> None:
    silent = {name: np.zeros(shape) for name, shape in small_lm.tensor_shapes(CONFIG).items()}
    assert np.isclose(small_lm.perplexity(silent, [[1, 2, 3], [4, 5]], CONFIG), CONFIG["vocab"])


def test_logits_without_layers() -> None:
    config = {**CONFIG, "layers": 0}
    model = weights()
    row = model["embedding"][5]
    want = model["head"] @ (row / np.sqrt(np.mean(row**2) + 1e-6))
    assert np.allclose(small_lm.logits(model, [5], config)[0], want)


def test_attention_decays_with_distance() -> None:
    """Equal keys: head 0 weighs tokens by 2^(−4 · distance) in base e."""
    config = {"vocab": 3, "dim": 2, "layers": 1, "heads": 2}
    shapes = small_lm.tensor_shapes(config)
    model = {name: np.zeros(shape) for name, shape in shapes.items()}
    model["embedding"] = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
    model["layers.0.v"] = model["layers.0.o"] = model["head"] = np.eye(2)
    model["head"] = np.vstack([np.eye(2), np.zeros((1, 2))])
    got = small_lm.logits(model, [2, 0], config)[1]
    near = np.exp(0.0) / (1.0 + np.exp(-(2.0**-4)))
    first = 1.0 + near - (1.0 - near)
    row = np.array([first, 2.0])
    assert np.allclose(got[:2], row / np.sqrt(np.mean(row**2) + 1e-6), atol=1e-5)
