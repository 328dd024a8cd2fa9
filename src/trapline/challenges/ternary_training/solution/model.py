"""The small language model of the task: forward, loss, and a backward written by hand.

Shapes: B documents, T tokens of each, D width, H heads, V vocabulary. Rows of a batch are padded at
the end; causal attention keeps padding from reaching any real position, so only the loss needs a
mask.
"""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]
Config = dict[str, Any]
EPS = 1e-6


def tensor_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Every tensor of the model, name -> (rows, columns)."""
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim)}
    for layer in range(config["layers"]):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.{name}"] = (dim, dim)
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    return shapes


def attention_bias(heads: int, length: int) -> np.ndarray:
    """(H, T, T): minus slope times distance back, and minus infinity ahead."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    back = np.arange(length)[:, None] - np.arange(length)[None, :]
    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)
    return bias.astype(np.float32)


def loss_and_gradients(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, weight: np.ndarray, config: Config
) -> tuple[float, Weights]:
    """Mean cross-entropy over the positions that count, and its gradient for every tensor.

    tokens, targets (B, T); weight (B, T) is 1 where a target counts and 0 at padding.
    """
    logits, tape = _forward(weights, tokens, config)
    loss, dlogits = _cross_entropy(logits, targets, weight)
    return loss, _backward(weights, tokens, dlogits, tape, config)


def loss_only(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, weight: np.ndarray, config: Config
) -> float:
    """The same loss without its gradients."""
    logits, _ = _forward(weights, tokens, config)
    return _cross_entropy(logits, targets, weight)[0]


def _forward(weights: Weights, tokens: np.ndarray, config: Config) -> tuple[np.ndarray, list[Any]]:
    """Logits (B, T, V), and what the backward pass needs of every layer."""
    x = weights["embedding"][tokens]
    bias = attention_bias(config["heads"], tokens.shape[1])
    tape = []
    for layer in range(config["layers"]):
        name = f"layers.{layer}."
        x, attention_tape = _attention(weights, name, x, bias, config["heads"])
        x, mlp_tape = _mlp(weights, name, x)
        tape.append((attention_tape, mlp_tape))
    normed, inverse = _normalise(x)
    tape.append((normed, inverse))
    return normed @ weights["head"].T, tape


def _backward(
    weights: Weights, tokens: np.ndarray, dlogits: np.ndarray, tape: Any, config: Config
) -> Weights:
    """Gradients of all tensors from the gradient of the logits."""
    normed, inverse = tape[-1]
    gradients = {"head": _outer(dlogits, normed)}
    dx = _normalise_backward(dlogits @ weights["head"], normed, inverse)
    for layer in reversed(range(config["layers"])):
        name = f"layers.{layer}."
        attention_tape, mlp_tape = tape[layer]
        dx = _mlp_backward(weights, name, dx, mlp_tape, gradients)
        dx = _attention_backward(weights, name, dx, attention_tape, gradients)
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, tokens, dx)
    gradients["embedding"] = embedding
    return gradients


def _normalise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x over its root mean square, and the factor that did it."""
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return x * inverse, inverse


def _normalise_backward(dy: np.ndarray, y: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Through y = x · inverse; y itself is all that is needed of x."""
    return inverse * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))


def _outer(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Gradient of a weight (out, in) of y = x Wᵀ, summed over batch and time."""
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def _split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, D) -> (B, H, T, D / H)."""
    rows, length, dim = x.shape
    return x.reshape(rows, length, heads, dim // heads).transpose(0, 2, 1, 3)


def _join_heads(x: np.ndarray) -> np.ndarray:
    """(B, H, T, D / H) -> (B, T, D)."""
    rows, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * width)


def _attention(
    weights: Weights, name: str, x: np.ndarray, bias: np.ndarray, heads: int
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """x plus attention over the normalised x."""
    normed, inverse = _normalise(x)
    q, k, v = (_split_heads(normed @ weights[name + part].T, heads) for part in "qkv")
    scores = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5) + bias
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    mixed = _join_heads(probs @ v)
    return x + mixed @ weights[name + "o"].T, (normed, inverse, q, k, v, probs, mixed)


def _attention_backward(
    weights: Weights, name: str, dx: np.ndarray, tape: Any, gradients: Weights
) -> np.ndarray:
    """Gradient of x; those of the four projections are added to `gradients`."""
    normed, inverse, q, k, v, probs, mixed = tape
    gradients[name + "o"] = _outer(dx, mixed)
    dmixed = _split_heads(dx @ weights[name + "o"], q.shape[1])
    dprobs = dmixed @ v.swapaxes(-1, -2)
    dscores = probs * (dprobs - np.sum(dprobs * probs, axis=-1, keepdims=True))
    dscores *= np.float32(q.shape[-1] ** -0.5)
    pieces = {
        "q": dscores @ k,
        "k": dscores.swapaxes(-1, -2) @ q,
        "v": probs.swapaxes(-1, -2) @ dmixed,
    }
    dnormed = 0.0
    for part, gradient in pieces.items():
        joined = _join_heads(gradient)
        gradients[name + part] = _outer(joined, normed)
        dnormed = dnormed + joined @ weights[name + part]
    return dx + _normalise_backward(dnormed, normed, inverse)


def _mlp(weights: Weights, name: str, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """x plus the two-layer network of the normalised x."""
    normed, inverse = _normalise(x)
    hidden = np.maximum(normed @ weights[name + "up"].T, 0.0)
    return x + hidden @ weights[name + "down"].T, (normed, inverse, hidden)


def _mlp_backward(
    weights: Weights, name: str, dx: np.ndarray, tape: Any, gradients: Weights
) -> np.ndarray:
    """Gradient of x; those of `up` and `down` are added to `gradients`."""
    normed, inverse, hidden = tape
    gradients[name + "down"] = _outer(dx, hidden)
    dhidden = (dx @ weights[name + "down"]) * (hidden > 0)
    gradients[name + "up"] = _outer(dhidden, normed)
    return dx + _normalise_backward(dhidden @ weights[name + "up"], normed, inverse)


def _cross_entropy(
    logits: np.ndarray, targets: np.ndarray, weight: np.ndarray
) -> tuple[float, np.ndarray]:
    """Mean over the positions that count, and its gradient for the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=-1, keepdims=True)
    rows = np.arange(targets.size)
    picked = shifted.reshape(rows.size, -1)[rows, targets.ravel()].reshape(targets.shape)
    count = weight.sum()
    loss = float(np.sum((np.log(totals[..., 0]) - picked) * weight) / count)
    dlogits = exponentials / totals
    dlogits.reshape(rows.size, -1)[rows, targets.ravel()] -= 1.0
    return loss, dlogits * (weight / count)[..., None]
