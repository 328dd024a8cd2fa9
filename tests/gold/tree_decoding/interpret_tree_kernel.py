"""Runs the tree kernel in the interpreter; test_tree_kernel.py reads the result."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.tree_decoding import reference
from trapline.gold.tree_decoding.triton import tree


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        depths, vocabulary = int(rng.integers(0, 5)), int(rng.integers(1, 7))
        log_q = -rng.integers(0, int(rng.integers(2, 40)), (2, depths, vocabulary)) / 8.0
        log_q[rng.random(log_q.shape) < 0.2] = -np.inf
        question = torch.tensor(log_q), int(rng.integers(1, 20))
        answers = tree.heaviest_prefixes(*question), reference.heaviest_prefixes(*question)
        found.append([[part.tolist() for part in answer] for answer in answers])
    (folder / "trees.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
