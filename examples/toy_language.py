"""A word model for examples that need no checkpoint: it counts which word follows which."""

import numpy as np

TEXT = """
the cache grows . the kernel waits . the target answers . the drafter guesses . the beam forks .
the page moves . every token needs a page . every token needs a page . every token needs a key .
every token needs a page .
"""
WORDS = sorted({*TEXT.split()})
STOP = WORDS.index(".")


def follow_probabilities(smoothing: float = 0.005) -> np.ndarray:
    """P[a, b] (V, V): how likely word b follows word a."""
    ids = [WORDS.index(word) for word in TEXT.split()]
    counts = np.full((len(WORDS), len(WORDS)), smoothing)
    np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    return counts / counts.sum(axis=1, keepdims=True)


def spelt(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)
