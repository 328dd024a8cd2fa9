"""The small ternary language model in float64, computed from codes and scales.

Shapes: T tokens, D width, H heads, V vocabulary. Norms have no weights and positions enter as a
distance penalty on the attention scores, so all tensors are ternary:
embedding (V, D); layers.i.{q, k, v, o} (D, D); layers.i.up (4D, D); layers.i.down (D, 4D);
head (V, D).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trapline.gold.ternary.oracle import dequantize

GROUP = 128
EPS = 1e-6
Ternaries = Mapping[str, tuple[np.ndarray, np.ndarray]]


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim), "head": (vocab, dim)}
    for layer in range(config["layers"]):
        shapes |= {f"layers.{layer}.{name}": (dim, dim) for name in "qkvo"}
        shapes |= {f"layers.{layer}.up": (4 * dim, dim), f"layers.{layer}.down": (dim, 4 * dim)}
    return shapes


def dense(tensors: Ternaries) -> dict[str, np.ndarray]:
    """The dequantised weights, float64."""
    return {
        name: dequantize(codes, scales, GROUP).astype(np.float64)
        for name, (codes, scales) in tensors.items()
    }


def logits(
    weights: Mapping[str, np.ndarray],
    tokens: Sequence[int],
    config: Mapping[str, Any],
    *,
    causal: bool = True,
) -> np.ndarray:
    """(T, V): row t scores the token after tokens[: t + 1]."""
    x = weights["embedding"][np.asarray(tokens, dtype=int)]
    for layer in range(config["layers"]):
        part = {name: weights[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "o")}
        x = x + _attention(_rms(x), part, config["heads"], causal)
        hidden = np.maximum(_rms(x) @ weights[f"layers.{layer}.up"].T, 0.0)
        x = x + hidden @ weights[f"layers.{layer}.down"].T
    scores: np.ndarray = _rms(x) @ weights["head"].T
    return scores


def log_probs(
    weights: Mapping[str, np.ndarray],
    document: Sequence[int],
    config: Mapping[str, Any],
    *,
    causal: bool = True,
) -> np.ndarray:
    """(T − 1, V): the log-probabilities of what comes after each token but the last."""
    scores = logits(weights, document[:-1], config, causal=causal)
    scores = scores - scores.max(axis=-1, keepdims=True)
    table: np.ndarray = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    return table


def perplexity(
    weights: Mapping[str, np.ndarray],
    documents: Sequence[Sequence[int]],
    config: Mapping[str, Any],
    *,
    causal: bool = True,
) -> float:
    """exp of the mean negative log-probability of every token but each document's first."""
    found = [
        log_probs(weights, document, config, causal=causal)[
            np.arange(len(document) - 1), np.asarray(document[1:], dtype=int)
        ]
        for document in documents
    ]
    return float(np.exp(-np.mean(np.concatenate(found))))


def _rms(x: np.ndarray) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return normed


def _attention(
    x: np.ndarray, part: Mapping[str, np.ndarray], heads: int, causal: bool
) -> np.ndarray:
    length, dim = x.shape
    width = dim // heads
    back = np.arange(length)[:, None] - np.arange(length)[None, :]
    mixed = np.zeros_like(x)
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        q, k, v = (x @ part[name][own].T for name in "qkv")
        scores = q @ k.T / np.sqrt(width) - 2.0 ** (-8.0 * (head + 1) / heads) * np.abs(back)
        if causal:
            scores = np.where(back >= 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[:, own] = shares / shares.sum(axis=-1, keepdims=True) @ v
    joined: np.ndarray = mixed @ part["o"].T
    return joined
