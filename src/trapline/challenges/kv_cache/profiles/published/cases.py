"""A cache of any form, judged by what it is for: decoding equals causal recomputation.

The judge brings the weights of attention layers (y = x @ w) and runs them one after another with
residual connections. `make_cache(weights, batch, num_heads, max_len)` gives a cache.
`prefill(cache, layer, x, lengths)` takes the prompts of a batch in one layer, padded behind, and
`step(cache, layer, x)` one more position of every sequence; both give the layer's output. A cache
may keep float16.
"""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import case
from trapline.arena.process.proxy import Submission

Rng = np.random.Generator
HEADS, WIDTH = 2, 8
#: Relative error: what float16 storage may cost in two layers, with room.
TOLERANCE = 0.02


def draw_weights(rng: Rng, layers: int) -> list[dict[str, np.ndarray]]:
    """Queries and keys with weights that make the softmax selective."""
    scale = {"q": 1.2, "k": 1.2, "v": 1.0, "o": 1.0}
    return [
        {name: by * rng.standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5 for name, by in scale.items()}
        for _ in range(layers)
    ]


def recomputed(weights: list[dict[str, np.ndarray]], x: np.ndarray) -> np.ndarray:
    """All layers over one whole sequence x (n, d), causal."""
    n = len(x)
    for w in weights:
        q, k, v = ((x @ w[name]).reshape(n, HEADS, -1) for name in "qkv")
        scores = np.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
        scores[:, np.arange(n) > np.arange(n)[:, None]] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", shares, v).reshape(n, WIDTH) @ w["o"]
    return x


class Decoded:
    """A batch that goes through the submission's cache, layer by layer."""

    def __init__(self, submission: Submission, rng: Rng, layers: int, batch: int) -> None:
        self.submission, self.rng = submission, rng
        self.weights = draw_weights(rng, layers)
        self.cache = submission.make_cache(self.weights, batch, HEADS, 24)
        self.history: list[np.ndarray] = [np.zeros((0, WIDTH))] * batch

    def prefill(self, lengths: list[int]) -> None:
        """Runs prompts of these lengths and checks every position of theirs."""
        x = np.zeros((len(lengths), max(lengths), WIDTH))
        for b, length in enumerate(lengths):
            x[b, :length] = self.rng.standard_normal((length, WIDTH))
            self.history[b] = x[b, :length].copy()
        for layer in range(len(self.weights)):
            out = self.submission.prefill(self.cache, layer, x, lengths)
            x = x + _floats(out, x.shape, f"layer {layer} of the prompts")
            for b, length in enumerate(lengths):
                x[b, length:] = 0.0
        for b, length in enumerate(lengths):
            self._same(x[b, :length], recomputed(self.weights, self.history[b]), f"prompt {b}")

    def step(self) -> None:
        """Decodes one more position of every sequence and checks it."""
        x = self.rng.standard_normal((len(self.history), WIDTH))
        self.history = [np.vstack([h, row]) for h, row in zip(self.history, x, strict=True)]
        for layer in range(len(self.weights)):
            out = self.submission.step(self.cache, layer, x)
            x = x + _floats(out, x.shape, f"layer {layer} of a step")
        for b, (row, past) in enumerate(zip(x, self.history, strict=True)):
            want = recomputed(self.weights, past)[-1]
            self._same(row, want, f"sequence {b} at position {len(past) - 1}")

    def _same(self, got: np.ndarray, want: np.ndarray, where: str) -> None:
        error = float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
        expect.that(
            error <= TOLERANCE,
            f"{where} differs from recomputation by {error:.2g} of its largest value",
        )


def _floats(out: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    return expect.array(out, shape=shape, dtype=getattr(out, "dtype", None), what=what).astype(
        np.float64
    )


def judged(entry: str, answer: Any) -> Any:
    """What two answers are compared by, in the digits that float32 keeps; not a cache's form."""
    if entry == "make_cache":
        return None
    is_floats = isinstance(answer, np.ndarray) and answer.dtype.kind == "f"
    return answer.astype(np.float32) if is_floats else answer


def run(submission: Submission, rng: Rng, layers: int, lengths: list[int], steps: int) -> None:
    decoded = Decoded(submission, rng, layers, len(lengths))
    if max(lengths):
        decoded.prefill(lengths)
    for _ in range(steps):
        decoded.step()


@case
def decoding_from_nothing(submission: Submission, rng: Rng) -> None:
    """One layer, one position at a time."""
    run(submission, rng, 1, [0, 0], 5)


@case
def a_prompt_then_decoding(submission: Submission, rng: Rng) -> None:
    """One layer; prompts of equal length in one call."""
    run(submission, rng, 1, [4, 4], 4)


@case
def two_layers(submission: Submission, rng: Rng) -> None:
    """What the second layer keeps depends on what the first one answered."""
    run(submission, rng, 2, [5, 5], 4)


@case
def two_layers_from_nothing(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 2, [0, 0], 5)


@case
def prompts_of_unequal_lengths(submission: Submission, rng: Rng) -> None:
    """Each sequence goes on from its own length."""
    run(submission, rng, 1, [5, 2, 3], 4)


@case
def unequal_lengths_over_two_layers(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 2, [2, 6], 3)


@case
def caches_are_independent(submission: Submission, rng: Rng) -> None:
    """A second cache starts empty."""
    for _ in range(2):
        run(submission, rng, 1, [3], 2)
