"""Calls `build_tree_mask` and `verify_and_accept` with the judge's model.

The folder holds two answers, and one is another entrant's file, byte for byte: this is the other.
"""

import numpy as np
from dflash_verify import build_tree_mask as own_mask
from dflash_verify import verify_and_accept


class Model:
    """`forward` takes tokens and the answer's own mask; without one it is causal."""

    def __init__(self, lm):
        self._lm = lm

    def forward(self, tokens, mask=None):
        """Logits at each position."""
        tokens = [int(t) for t in tokens]
        visible = np.tri(len(tokens), dtype=bool) if mask is None else np.asarray(mask) == 0
        return np.asarray(self._lm.logits(tokens, visible))


def build_tree_mask(prompt_len, tree_parents):
    """The answer's mask as booleans."""
    mask = own_mask(prompt_len, tree_parents)
    return np.asarray(mask) == 0


def verify(lm, prompt, tree_tokens, tree_parents):
    """The tokens that a cycle appends."""
    return list(verify_and_accept(prompt, tree_tokens, tree_parents, Model(lm)))
