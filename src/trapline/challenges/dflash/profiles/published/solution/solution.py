"""One cycle of verification of a draft tree at temperature 0."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def build_tree_mask(prompt_len: int, tree_parents: Sequence[int]) -> np.ndarray:
    """bool (P + N, P + N): who may attend to whom."""
    total = prompt_len + len(tree_parents)
    mask = np.zeros((total, total), bool)
    mask[:prompt_len, :prompt_len] = np.tri(prompt_len, dtype=bool)
    mask[prompt_len:, :prompt_len] = True
    for node, parent in enumerate(tree_parents):
        row = prompt_len + node
        if parent >= 0:
            mask[row] |= mask[prompt_len + parent]
        mask[row, row] = True
    return mask


def verify(
    lm: Any, prompt: Sequence[int], tree_tokens: Sequence[int], tree_parents: Sequence[int]
) -> list[int]:
    """The tokens to append: the accepted path of the tree, and the model's own next token."""
    tokens = [*prompt, *tree_tokens]
    logits = np.asarray(lm.logits(tokens, build_tree_mask(len(prompt), tree_parents)))
    accepted, last, row = [], -1, len(prompt) - 1
    for node, token in enumerate(tree_tokens):
        if tree_parents[node] != last:
            continue
        if token == int(logits[row].argmax()):
            accepted.append(token)
            last, row = node, len(prompt) + node
    return [*accepted, int(logits[row].argmax())]
