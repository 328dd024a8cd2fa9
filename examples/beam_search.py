"""Beam search against greedy: a less likely first word can begin the more likely sentence.

Greedy takes the most likely word at every step. A search of width W keeps W sentences alive, asks
the model once per step for all of them, and returns the best that ended.

    python examples/beam_search.py
"""

import math

import numpy as np
from toy_language import STOP, follow_probabilities, spelt

from trapline.gold import beam_search


class WordModel:
    """Log-probabilities of the next word; counts how often it is called."""

    def __init__(self) -> None:
        self.log_p = np.log(follow_probabilities())
        self.calls = 0

    def log_probs(self, prefixes: list[list[int]]) -> np.ndarray:
        self.calls += 1
        return self.log_p[[prefix[-1] for prefix in prefixes]]


def greedy() -> tuple[list[int], float]:
    model, tokens, total = WordModel(), [STOP], 0.0
    while len(tokens) == 1 or tokens[-1] != STOP:
        row = model.log_probs([tokens])[0]
        tokens.append(int(row.argmax()))
        total += float(row.max())
    return tokens[1:], total


def main() -> None:
    tokens, total = greedy()
    print(f"{'search':8}  {'p':>6}  {'calls':>5}  sentence")
    print(f"{'greedy':8}  {math.exp(total):6.3f}  {len(tokens):5}  {spelt(tokens)}")
    for width in (1, 2, 4, 8):
        model = WordModel()
        options = {"beam_width": width, "max_new_tokens": 8, "length_penalty": 0.0}
        (beams,) = beam_search(model, [[STOP]], eos_id=STOP, **options)
        for rank, beam in enumerate(beams[:2]):
            name, calls = ("", "") if rank else (f"width {width}", model.calls)
            text = spelt([*beam.tokens])
            print(f"{name:8}  {math.exp(beam.score):6.3f}  {calls:>5}  {text}")


if __name__ == "__main__":
    main()
