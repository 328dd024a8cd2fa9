"""Golden test of `verify_tree`: trees, the target's picks, and what must come out."""

import importlib
from typing import Any

import numpy as np

#: tokens, parents, choices (root first), path, bonus
TREES: tuple[tuple[list[int], list[int], list[int], list[int], int], ...] = (
    ([4, 7, 9], [-1, -1, 0], [4, 9, 2, 5], [0, 2], 5),
    ([4, 7, 9, 6], [-1, -1, 0, 2], [4, 9, 2, 6, 1], [0, 2, 3], 1),
    ([4, 7, 9], [-1, -1, 1], [7, 3, 8, 2], [1], 8),
    ([4, 7], [-1, 0], [1, 4, 7], [], 1),
)


def check(solution: Any) -> None:
    for tokens, parents, choices, path, bonus in TREES:
        arrays = [np.array(values, dtype=np.int64) for values in (tokens, parents, choices)]
        got_path, got_bonus = solution.verify_tree(*arrays)
        got = [int(node) for node in got_path], int(got_bonus)
        if got != (path, bonus):
            raise AssertionError(f"{tokens}, {parents}, {choices}: {got} is not {(path, bonus)}")


if __name__ == "__main__":
    check(importlib.import_module("solution"))
    print("the golden test passes")
