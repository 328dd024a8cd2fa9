"""The model's two passes.  Every kind of matrix is one array with a leading axis for the layers."""

import zlib

import numpy as np

EPSILON = 1e-6
PER_LAYER = ("q", "k", "v", "o", "up", "down")


def tensor_shapes(settings):
    """{name in the answer: shape}."""
    dim, vocab = settings["dim"], settings["vocab"]
    shapes = {"embedding": (vocab, dim)}
    for layer in range(settings["layers"]):
        shapes.update({f"layers.{layer}.{kind}": (dim, dim) for kind in "qkvo"})
        shapes[f"layers.{layer}.up"] = (4 * dim, dim)
        shapes[f"layers.{layer}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    return shapes


def starting_weights(settings):
    """Random weights under the names of the answer, from the seed alone."""
    weights = {}
    for name, shape in tensor_shapes(settings).items():
        stream = np.random.default_rng([settings["seed"], zlib.crc32(name.encode())])
        spread = 1.0 if name == "embedding" else shape[-1] ** -0.5
        weights[name] = (stream.standard_normal(shape) * spread).astype(np.float32)
    return weights


def stack(weights, layers):
    """Named tensors -> one array per kind."""
    stacked = {"embedding": weights["embedding"], "head": weights["head"]}
    for kind in PER_LAYER if layers else ():
        stacked[kind] = np.stack([weights[f"layers.{layer}.{kind}"] for layer in range(layers)])
    return stacked


def unstack(stacked, layers):
    """One array per kind -> named tensors."""
    named = {"embedding": stacked["embedding"], "head": stacked["head"]}
    for layer in range(layers):
        named.update({f"layers.{layer}.{kind}": stacked[kind][layer] for kind in PER_LAYER})
    return named


def norm(x):
    """x over its root mean square, and the factor that does it."""
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return x * factor, factor


def norm_back(grad, normed, factor):
    """Gradient of `norm` with respect to x."""
    return factor * (grad - normed * np.mean(grad * normed, axis=-1, keepdims=True))


def attention_bias(heads, length):
    """(heads, length, length): minus slope times distance, and -inf for what comes later."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.arange(length)[:, None] - np.arange(length)
    bias = np.where(distance >= 0, -slopes[:, None, None] * distance, -np.inf)
    return bias.astype(np.float32)


def softmax(scores):
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def to_heads(x, heads):
    """(B, T, dim) -> (B, heads, T, width)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def from_heads(x):
    """(B, heads, T, width) -> (B, T, dim)."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def forward(weights, tokens, heads):
    """Logits (B, T, vocab), and what the way back needs."""
    x = weights["embedding"][tokens]
    bias = attention_bias(heads, tokens.shape[1])
    root = np.float32((x.shape[-1] // heads) ** -0.5)
    saved = []
    for layer in range(len(weights.get("q", ()))):
        a, a_factor = norm(x)
        q, k, v = (to_heads(a @ weights[kind][layer].T, heads) for kind in "qkv")
        mix = softmax(q @ k.swapaxes(-1, -2) * root + bias)
        joined = from_heads(mix @ v)
        x = x + joined @ weights["o"][layer].T
        b, b_factor = norm(x)
        hidden = np.maximum(b @ weights["up"][layer].T, 0)
        x = x + hidden @ weights["down"][layer].T
        saved.append((a, a_factor, q, k, v, mix, joined, b, b_factor, hidden))
    out, factor = norm(x)
    return out @ weights["head"].T, (saved, out, factor, root)


def matrix_grad(grad_out, inputs):
    """Gradient of w in inputs @ w.T, summed over all rows."""
    return grad_out.reshape(-1, grad_out.shape[-1]).T @ inputs.reshape(-1, inputs.shape[-1])


def backward(weights, tokens, heads, grad_logits, state):
    """Gradients of all weights, stacked as they are."""
    saved, out, factor, root = state
    grads = {kind: np.zeros_like(array) for kind, array in weights.items()}
    grads["head"] = matrix_grad(grad_logits, out)
    grad = norm_back(grad_logits @ weights["head"], out, factor)
    for layer in reversed(range(len(saved))):
        a, a_factor, q, k, v, mix, joined, b, b_factor, hidden = saved[layer]
        grads["down"][layer] = matrix_grad(grad, hidden)
        grad_hidden = (grad @ weights["down"][layer]) * (hidden > 0)
        grads["up"][layer] = matrix_grad(grad_hidden, b)
        grad = grad + norm_back(grad_hidden @ weights["up"][layer], b, b_factor)

        grads["o"][layer] = matrix_grad(grad, joined)
        grad_heads = to_heads(grad @ weights["o"][layer], heads)
        grad_mix = grad_heads @ v.swapaxes(-1, -2)
        grad_scores = mix * (grad_mix - np.sum(grad_mix * mix, axis=-1, keepdims=True)) * root
        parts = {
            "q": grad_scores @ k,
            "k": grad_scores.swapaxes(-1, -2) @ q,
            "v": mix.swapaxes(-1, -2) @ grad_heads,
        }
        grad_a = np.zeros_like(a)
        for kind, part in parts.items():
            part = from_heads(part)
            grads[kind][layer] = matrix_grad(part, a)
            grad_a += part @ weights[kind][layer]
        grad = grad + norm_back(grad_a, a, a_factor)
    np.add.at(grads["embedding"], tokens.ravel(), grad.reshape(-1, grad.shape[-1]))
    return grads


def loss(logits, targets, smoothing):
    """Mean negative log-probability of the targets that are not -1, and its gradient.

    The gradient is that of targets which give `smoothing` of their weight to all words alike.
    """
    counted = targets >= 0
    total = max(int(counted.sum()), 1)
    probabilities = softmax(logits)
    picked = np.take_along_axis(probabilities, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    value = -np.log(np.maximum(picked, 1e-30))[counted].sum() / total
    grad = probabilities - np.float32(smoothing / logits.shape[-1])
    rows, places = np.nonzero(counted)
    grad[rows, places, targets[rows, places]] -= np.float32(1 - smoothing)
    grad *= (counted / np.float32(total))[..., None].astype(np.float32)
    return float(value), grad
