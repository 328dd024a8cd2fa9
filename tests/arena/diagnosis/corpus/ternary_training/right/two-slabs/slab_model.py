"""The judge's transformer with its gradient, in NumPy. Weights are a dict of float32 matrices by name."""

import numpy as np

EPSILON = np.float32(1e-6)


def loss_and_gradients(weights, shape, tokens, lengths, smoothing):
    """The mean loss of a batch (B, T+1) of padded pieces, and the gradient of every weight.

    `shape` is (layers, heads). Targets are one-hot, mixed with `smoothing` of the uniform law.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, tape = _forward(weights, shape, inputs)
    log_probs = _log_softmax(logits)
    vocab = logits.shape[-1]
    counted = (np.arange(targets.shape[1]) < lengths[:, None] - 1).astype(np.float32)
    share = counted / counted.sum()
    picked = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    loss = -float((share * ((1 - smoothing) * picked + smoothing * log_probs.mean(axis=-1))).sum())
    gradient = np.exp(log_probs) - np.float32(smoothing / vocab)
    rows, columns = np.indices(targets.shape)
    gradient[rows, columns, targets] -= np.float32(1 - smoothing)
    return loss, _backward(weights, shape, inputs, tape, gradient * share[..., None])


def token_logits(weights, shape, inputs):
    """The logits (B, T, vocab) of a batch of inputs (B, T)."""
    return _forward(weights, shape, inputs)[0]


def _log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _forward(weights, shape, inputs):
    layers, heads = shape
    x = weights["embedding"][inputs]
    bias = _distance_bias(inputs.shape[1], heads)
    tape = []
    for i in range(layers):
        x, attention_tape = _attention(_layer(weights, i), heads, bias, x)
        x, mlp_tape = _mlp(_layer(weights, i), x)
        tape.append((attention_tape, mlp_tape))
    normed, inverse = _norm(x)
    tape.append((normed, inverse))
    return normed @ weights["head"].T, tape


def _backward(weights, shape, inputs, tape, d_logits):
    layers, heads = shape
    gradients = {}
    normed, inverse = tape[-1]
    gradients["head"] = _outer(d_logits, normed)
    dx = _norm_back(d_logits @ weights["head"], normed, inverse)
    for i in reversed(range(layers)):
        attention_tape, mlp_tape = tape[i]
        dx, found = _mlp_back(_layer(weights, i), mlp_tape, dx)
        dx, more = _attention_back(_layer(weights, i), heads, attention_tape, dx)
        gradients.update({f"layers.{i}.{name}": value for name, value in {**found, **more}.items()})
    one_hot = np.zeros((len(weights["embedding"]), inputs.size), np.float32)
    one_hot[inputs.ravel(), np.arange(inputs.size)] = 1
    gradients["embedding"] = one_hot @ dx.reshape(inputs.size, -1)
    return gradients


def _layer(weights, i):
    return {name: weights[f"layers.{i}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}


def _distance_bias(length, heads):
    """What is added to the scores (H, T, T): a slope per head times the distance, -inf for the future."""
    place = np.arange(length, dtype=np.float32)
    distance = place[:, None] - place[None, :]
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    bias = -slopes[:, None, None].astype(np.float32) * distance
    return np.where(distance >= 0, bias, np.float32(-np.inf))


def _row_dot(x, y):
    """The scalar products of the rows, as a last axis of length 1; faster than a sum over short rows."""
    return np.einsum("...d,...d->...", x, y)[..., None]


def _norm(x):
    inverse = 1 / np.sqrt(_row_dot(x, x) / np.float32(x.shape[-1]) + EPSILON)
    return x * inverse, inverse


def _norm_back(dy, normed, inverse):
    return inverse * (dy - normed * (_row_dot(dy, normed) / np.float32(dy.shape[-1])))


def _outer(d_out, into):
    """The gradient of a matrix m in out = into @ m.T."""
    return d_out.reshape(-1, d_out.shape[-1]).T @ into.reshape(-1, into.shape[-1])


def _split_heads(x, heads):
    batch, length, dim = x.shape
    return x.reshape(batch, length, heads, dim // heads).transpose(0, 2, 1, 3)


def _join_heads(x):
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def _attention(w, heads, bias, x):
    normed, inverse = _norm(x)
    q, k, v = (_split_heads(normed @ w[name].T, heads) for name in "qkv")
    root = np.float32(1 / np.sqrt(q.shape[-1]))
    scores = (q @ k.swapaxes(-1, -2)) * root + bias
    scores -= scores.max(axis=-1, keepdims=True)
    weight = np.exp(scores, out=scores)
    weight /= weight @ np.ones((weight.shape[-1], 1), np.float32)
    mixed = _join_heads(weight @ v)
    return x + mixed @ w["o"].T, (normed, inverse, q, k, v, root, weight, mixed)


def _attention_back(w, heads, tape, dx):
    normed, inverse, q, k, v, root, weight, mixed = tape
    d_mixed = _split_heads(dx @ w["o"], heads)
    d_weight = d_mixed @ v.swapaxes(-1, -2)
    d_scores = d_weight
    d_scores -= _row_dot(weight, d_weight)
    d_scores *= weight
    d_scores *= root
    parts = {
        "q": _join_heads(d_scores @ k),
        "k": _join_heads(d_scores.swapaxes(-1, -2) @ q),
        "v": _join_heads(weight.swapaxes(-1, -2) @ d_mixed),
    }
    gradients = {name: _outer(part, normed) for name, part in parts.items()}
    gradients["o"] = _outer(dx, mixed)
    d_normed = sum(part @ w[name] for name, part in parts.items())
    return dx + _norm_back(d_normed, normed, inverse), gradients


def _mlp(w, x):
    normed, inverse = _norm(x)
    hidden = np.maximum(normed @ w["up"].T, 0)
    return x + hidden @ w["down"].T, (normed, inverse, hidden)


def _mlp_back(w, tape, dx):
    normed, inverse, hidden = tape
    d_hidden = (dx @ w["down"]) * (hidden > 0)
    gradients = {"down": _outer(dx, hidden), "up": _outer(d_hidden, normed)}
    return dx + _norm_back(d_hidden @ w["up"], normed, inverse), gradients
