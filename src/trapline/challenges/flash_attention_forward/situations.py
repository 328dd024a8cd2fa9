"""Arguments that several traps of the forward pass are built from."""

from collections.abc import Callable

import numpy as np

from trapline.arena.judge import expect
from trapline.challenges.flash_attention_forward.cases import Arrays

#: Where a bug of the blind corpus was seen.
WRITTEN = "an answer written from this prompt alone"


def with_logits(rng: np.random.Generator, logits: np.ndarray, T: int, dtype: type) -> Arrays:
    """q, k, v (one head, width 4) whose scaled dot products are logits[s] for each query.

    The scale of width 4 is ½, and one coordinate carries the logit, so it is exact in any dtype.
    """
    S = len(logits)
    q: np.ndarray = np.zeros((1, 1, T, 4), dtype)
    k: np.ndarray = np.zeros((1, 1, S, 4), dtype)
    q[..., 0] = 2.0
    k[0, 0, :, 0] = logits
    return q, k, rng.standard_normal((1, 1, S, 4)).astype(dtype)


def holds_no_matrix(rise: int, pairs: int, what: str) -> None:
    """Memory rose by less than half of what a float32 for every pair of query and key takes."""
    expect.that(rise < 2 * pairs, f"memory rose by {rise >> 20} MiB, all {what} are {pairs >> 18}")


def holds_no_mask(rise: Callable[[bool], int], pairs: int) -> None:
    """With `causal`, memory does not rise by what a byte for every pair of query and key takes.

    `rise` tells the rise with and without `causal`: a matrix of scores is held without it, too,
    and `holds_no_matrix` judges that.
    """
    masked = rise(True)
    if masked >= pairs // 2:
        text = f"memory rose by {masked >> 20} MiB with causal=True, a mask has {pairs >> 20}"
        expect.that(rise(False) >= 2 * pairs, text)
