"""A DFlash round, drawn: draft a block, build a tree, verify it in one pass of the target.

A block drafter proposes every depth at once: row d of its draft is the distribution of the word
d + 1 steps ahead, whatever stands between. The tree holds the heaviest combinations, the target
draws its word after every node, and the path where both agree is accepted, plus one word more.

    python examples/draft_tree.py
"""

import numpy as np
from toy_language import STOP, WORDS, follow_probabilities, spelt

from trapline.gold import build_tree, tree_mask, verify_tree

DEPTH, BUDGET, ROUNDS = 4, 14, 300
P = follow_probabilities()


def draft(root: int) -> np.ndarray:
    """Log-distributions (DEPTH, V) of the next words: what a trained drafter approximates."""
    rows = [P[root]]
    for _ in range(DEPTH - 1):
        rows.append(rows[-1] @ P)
    return np.log(np.stack(rows))


def drawn(tokens: np.ndarray, parents: np.ndarray, path: list[int], at: int, bar: str = "") -> None:
    children = [node for node in range(len(tokens)) if parents[node] == at]
    for node in children:
        corner, below = ("└─ ", "   ") if node == children[-1] else ("├─ ", "│  ")
        print(bar + corner + WORDS[tokens[node]] + (" ✓" if node in path else ""))
        drawn(tokens, parents, path, node, bar + below)


def words_per_pass(budget: int, *, show: bool = False) -> float:
    rng, root, said = np.random.default_rng(6), STOP, []
    for turn in range(ROUNDS):
        tokens, parents = build_tree(draft(root), budget)
        # Row 0 belongs to the root. A transformer computes all rows in one pass with `tree_mask`.
        choices = np.array([rng.choice(len(WORDS), p=P[word]) for word in (root, *tokens)])
        path, bonus = verify_tree(tokens, parents, choices)
        said += [*tokens[path], bonus]
        if show and turn < 2:
            rows, columns = tree_mask(parents, prefix_len=0).shape
            print(f"{WORDS[root]}    (mask of {rows} × {columns})")
            drawn(tokens, parents, path, -1)
            print(f"accepted: {spelt([*tokens[path]])} + {WORDS[bonus]}\n")
        root = int(bonus)
    return len(said) / ROUNDS


if __name__ == "__main__":
    words_per_pass(BUDGET, show=True)
    print("nodes  words per pass of the target")
    for budget in (1, 4, BUDGET, 32):
        print(f"{budget:5}  {words_per_pass(budget):.2f}")
