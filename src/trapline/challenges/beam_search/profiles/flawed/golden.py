"""Golden test of `beam_search`: a model of four tokens and what must come out."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

END, A, B = 0, 1, 2
PROMPT = [9, 8]
Rows = dict[tuple[int, ...], tuple[float, float, float]]
#: Generated tokens → log-probabilities of END, A and B; token 3 never comes.
LATE: Rows = {(): (-4.0, -1.0, -2.0), (A,): (-1.0, -3.0, -5.0), (B,): (-0.5, -6.0, -6.0)}
EARLY: Rows = {(): (-1.5, -1.0, -2.0), (A,): (-3.0, -3.0, -5.0), (B,): (-0.25, -6.0, -6.0)}
RARE = (-7.0, -8.0, -9.0)
#: model, beam_width, length_penalty, the answer
SEARCHES = (
    (LATE, 1, 0.0, [([A, END], -2.0)]),
    (LATE, 2, 0.0, [([A, END], -2.0), ([B, END], -2.5)]),
    (LATE, 2, 1.0, [([A, END], -1.0), ([B, END], -1.25)]),
    (EARLY, 2, 0.0, [([END], -1.5), ([B, END], -2.25)]),
)


class Model:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def log_probs(self, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        rows = [self.rows.get(tuple(prefix[len(PROMPT) :]), RARE) for prefix in prefixes]
        return np.array([(*row, -np.inf) for row in rows])


def check(solution: Any) -> None:
    for rows, width, penalty, expected in SEARCHES:
        (got,) = solution.beam_search(
            Model(rows),
            [list(PROMPT)],
            beam_width=width,
            max_new_tokens=3,
            eos_id=END,
            length_penalty=penalty,
        )
        found = [
            ([int(token) for token in tokens], round(float(score), 9)) for tokens, score in got
        ]
        if found != expected:
            raise AssertionError(
                f"beam_width={width}, length_penalty={penalty}: {found} is not {expected}"
            )


if __name__ == "__main__":
    check(importlib.import_module("solution"))
    print("the golden test passes")
