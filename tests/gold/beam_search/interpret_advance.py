"""Runs the search kernel in the interpreter; test_batched_search.py reads what it finds.

Random steps of both boards on the same candidates; every tensor must come out equal.
"""

import json
import random
import sys
from pathlib import Path

import torch

from trapline.gold.beam_search.batched_search import BatchedSearch, Offered
from trapline.gold.beam_search.policy import Rules, named
from trapline.gold.beam_search.triton import advance
from trapline.gold.softmax_topk.api import softmax_topk

POLICIES = [("canonical", None), ("vllm", None), ("hf", False), ("hf", True), ("hf", "never")]
STATE = ("length", "sums", "parents", "tokens", "scores", "totals")


def main(folder: Path) -> None:
    rng = random.Random(3)
    found = [compare(rng, number) for number in range(12)]
    (folder / "boards.json").write_text(json.dumps(found))


def compare(rng: random.Random, number: int) -> dict[str, object]:
    policy, early_stopping = POLICIES[number % len(POLICIES)]
    vocabulary, width, steps, count = rng.choice([5, 9, 40]), rng.randint(1, 4), 4, 2
    ends = tuple(sorted(rng.sample(range(vocabulary), rng.choice([1, 2]))))
    penalty = rng.choice([-1.0, 0.0, 0.6, 2.0])
    rules = Rules(width, steps, ends, penalty, named(policy, early_stopping))
    kept = min((1 + len(ends)) * width, vocabulary)
    boards = [BatchedSearch(rules, [3, 7], torch.device("cpu")) for _ in range(2)]
    assert advance.fits(boards[0], kept)
    seed = torch.Generator().manual_seed(number)
    rows = count * width
    own = torch.randperm(rows * steps, generator=seed).view(rows, steps).int()
    places = [[torch.zeros(rows).long(), torch.arange(rows), own.clone()] for _ in range(2)]
    broken, wrong = torch.zeros(1, dtype=torch.int32), []
    for step in range(steps):
        logits = torch.randn(rows, vocabulary, generator=seed) * rng.choice([0.3, 3])
        logits = logits.round() if number % 3 == 0 else logits
        top = softmax_topk(logits, kept, log_probs=True)
        at_ends = logits[:, list(ends)] - top.lse[:, None]
        follow(boards[0], Offered(top.values, top.indices, at_ends), places[0], own)
        state = (broken, *places[1], own)
        advance.advance(boards[1], logits, top.lse, top.values, top.indices, *state)
        wrong += [f"{name} after {step}" for name in differing(boards, places)]
    return {"rules": str(rules), "wrong": wrong, "broken": int(broken)}


def follow(board, offered, places, own) -> None:
    """What the kernel does to the rows, in torch."""
    ids, positions, tails = places
    parents, tokens = board.advance(offered)
    flat = (torch.arange(len(parents))[:, None] * parents.shape[1] + parents).flatten()
    column = torch.arange(own.shape[1])
    tails.copy_(torch.where(column < board.length[0] - 1, tails[flat], own))
    ids.copy_(tokens.flatten())
    positions.add_(1)


def differing(boards, places) -> list[str]:
    """Live beams' tokens count, dead ones' do not; pools count as far as they are filled."""
    pairs = {name: [getattr(board, name) for board in boards] for name in STATE}
    alive = boards[0].scores > -torch.inf
    pairs["totals"] = [board.totals[alive] for board in boards]
    pairs["nodes"] = [board.nodes[alive] for board in boards]
    pairs |= {f"places {i}": list(pair) for i, pair in enumerate(zip(*places, strict=True))}
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
