"""The small language model of the task: forward, loss, and a backward written by hand.

Shapes: B documents, T tokens of each, D width, H heads, W = D / H, V vocabulary. Rows of a batch
are padded at the end; causal attention keeps padding from reaching any real position, so only the
loss has to know about it: the target of a padded position is negative.
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
    back = np.arange(length)[:, None] - np.arange(length)
    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)
    return bias.astype(np.float32)


def loss_and_gradients(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, config: Config
) -> tuple[float, Weights]:
    """Mean cross-entropy, and the gradient of the sum for every tensor.

    tokens, targets (B, T); a negative target does not count.
    """
    logits, tape = _forward(weights, tokens, config)
    loss, dlogits = _cross_entropy(logits, targets)
    return loss, _backward(weights, tokens, dlogits, tape, config)


def loss_only(weights: Weights, tokens: np.ndarray, targets: np.ndarray, config: Config) -> float:
    """The same loss without its gradients."""
    logits, _ = _forward(weights, tokens, config)
    loss, _ = _cross_entropy(logits, targets)
    return loss


def _forward(weights: Weights, tokens: np.ndarray, config: Config) -> tuple[np.ndarray, list[Any]]:
    """Logits (B, T, V), and what the backward pass needs of every layer and of the last norm."""
    x = weights["embedding"][tokens]
    bias = attention_bias(config["heads"], tokens.shape[1])
    tape = []
    for layer in range(config["layers"]):
        name = f"layers.{layer}."
        x, attention_tape = _attention(weights, name, x, bias)
        x, mlp_tape = _mlp(weights, name, x)
        tape.append((attention_tape, mlp_tape))
    normed, inverse = _normalise(x)
    return normed @ weights["head"].T, [*tape, (normed, inverse)]


def _backward(
    weights: Weights, tokens: np.ndarray, dlogits: np.ndarray, tape: Any, config: Config
) -> Weights:
    """Gradients of all tensors from the gradient of the logits."""
    *layers, (normed, inverse) = tape
    gradients = {"head": _outer(dlogits, normed)}
    dx = _normalise_backward(dlogits @ weights["head"], normed, inverse)
    for layer in reversed(range(config["layers"])):
        name = f"layers.{layer}."
        attention_tape, mlp_tape = layers[layer]
        dx = _mlp_backward(weights, name, dx, mlp_tape, gradients)
        dx = _attention_backward(weights, name, dx, attention_tape, gradients)
    gradients["embedding"] = np.zeros_like(weights["embedding"])
    np.add.at(gradients["embedding"], tokens, dx)
    return gradients


def _normalise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x over its root mean square, and the factor that did it."""
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return x * inverse, inverse


def _normalise_backward(dy: np.ndarray, y: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Through y = x · inverse; y itself is all that is needed of x."""
    return inverse * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    """Logarithms of the shares along the last axis."""
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def _outer(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Gradient of a weight (out, in) of y = x Wᵀ, summed over batch and time."""
    return np.tensordot(dy, x, ((0, 1), (0, 1)))


def _turned(x: np.ndarray) -> np.ndarray:
    """(B, H, T, n) -> (B, H, n, T)."""
    return x.transpose(0, 1, 3, 2)


def _split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, D) -> (B, H, T, W)."""
    rows, length, dim = x.shape
    return x.reshape(rows, length, heads, dim // heads).transpose(0, 2, 1, 3)


def _join_heads(x: np.ndarray) -> np.ndarray:
    """(B, H, T, W) -> (B, T, D)."""
    rows, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * width)


def _attention(
    weights: Weights, name: str, x: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """x plus attention over the normalised x."""
    normed, inverse = _normalise(x)
    q, k, v = (_split_heads(normed @ weights[f"{name}{part}"].T, len(bias)) for part in "qkv")
    *_, width = q.shape
    q = q / np.float32(np.sqrt(width))
    probs = np.exp(_log_softmax(q @ _turned(k) + bias))
    mixed = _join_heads(probs @ v)
    return x + mixed @ weights[f"{name}o"].T, (normed, inverse, q, k, v, probs, mixed)


def _attention_backward(
    weights: Weights, name: str, dx: np.ndarray, tape: Any, gradients: Weights
) -> np.ndarray:
    """Gradient of x; those of the four projections are added to `gradients`."""
    normed, inverse, q, k, v, probs, mixed = tape
    _, heads, _, width = q.shape
    gradients[f"{name}o"] = _outer(dx, mixed)
    dmixed = _split_heads(dx @ weights[f"{name}o"], heads)
    dprobs = dmixed @ _turned(v)
    dscores = probs * (dprobs - np.sum(dprobs * probs, axis=-1, keepdims=True))
    pieces = {
        "q": dscores @ k / np.float32(np.sqrt(width)),
        "k": _turned(dscores) @ q,
        "v": _turned(probs) @ dmixed,
    }
    dnormed = np.zeros_like(dx)
    for part, piece in pieces.items():
        gradients[f"{name}{part}"] = _outer(_join_heads(piece), normed)
        dnormed += _join_heads(piece) @ weights[f"{name}{part}"]
    return dx + _normalise_backward(dnormed, normed, inverse)


def _mlp(weights: Weights, name: str, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """x plus the two-layer network of the normalised x."""
    normed, inverse = _normalise(x)
    hidden = np.maximum(normed @ weights[f"{name}up"].T, 0.0)
    return x + hidden @ weights[f"{name}down"].T, (normed, inverse, hidden)


def _mlp_backward(
    weights: Weights, name: str, dx: np.ndarray, tape: Any, gradients: Weights
) -> np.ndarray:
    """Gradient of x; those of `up` and `down` are added to `gradients`."""
    normed, inverse, hidden = tape
    gradients[f"{name}down"] = _outer(dx, hidden)
    dhidden = (dx @ weights[f"{name}down"]) * (hidden > 0)
    gradients[f"{name}up"] = _outer(dhidden, normed)
    return dx + _normalise_backward(dhidden @ weights[f"{name}up"], normed, inverse)


def _cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean over the targets that count, and the gradient of the sum for the logits."""
    real = targets >= 0
    log_probs, wanted = _log_softmax(logits[real]), targets[real]
    rows = np.arange(len(wanted))
    shares = np.exp(log_probs)
    shares[rows, wanted] -= 1.0
    dlogits = np.zeros_like(logits)
    dlogits[real] = shares
    return -float(np.mean(log_probs[rows, wanted])), dlogits
