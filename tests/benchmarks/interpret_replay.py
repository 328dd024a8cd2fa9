"""Runs the benchmark's replay kernel in Triton's interpreter; test_dflash.py reads the result."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from dflash_replay import replay, replay_kernel

from trapline.gold.tree_decoding import reference

ROWS, DRAFTED, TILES, NOTHING = 3, 9, 2, 99


def main(folder: Path) -> None:
    torch.manual_seed(0)
    chain = torch.arange(DRAFTED).expand(ROWS, -1) - 1
    found = [replayed(parents) for parents in (chain, *(grown() for _ in range(4)))]
    (folder / "replay.json").write_text(json.dumps(found))


def grown() -> torch.Tensor:
    """Parents of random trees that end in padding below the root."""
    rows = [[int(torch.randint(-1, i, ())) for i in range(DRAFTED)] for _ in range(ROWS)]
    return torch.tensor(rows)


def replayed(parents) -> list[bool]:
    """For every wanted depth, three rounds in a row: as torch says; as many nodes are accepted."""
    tokens = torch.stack([torch.randperm(50)[:DRAFTED] for _ in range(ROWS)])
    tokens[1, -1] = parents[1, -1] = -1
    seen = reference.ancestors(parents)
    depths = reference.depths(seen)
    trees = SimpleNamespace(tokens=tokens, parents=parents, seen=seen, depths=depths)
    deepest = torch.where(tokens >= 0, depths[:, 1:], 0).amax(dim=1)
    lines, trace = ROWS * (DRAFTED + 1), torch.randint(0, DRAFTED + 2, (7,))
    best, place = torch.randn((TILES, lines)), torch.randint(0, 50, (TILES, lines))
    picks, turns, choices = torch.zeros((3, lines), dtype=torch.int64)
    good = []
    for turn in range(3):
        replay_kernel[(lines,)](
            *(best, place, picks, trace, turns, tokens, parents, depths.flatten()),
            *(seen.to(torch.int8), choices, TILES, lines, DRAFTED + 1, len(trace), NOTHING),
            BLOCK=2,
            BLOCK_M=16,
            PDL=False,
        )
        wanted = trace[(turn * ROWS + torch.arange(ROWS)) % len(trace)]
        said = choices.view(ROWS, -1)
        judged = reference.accepted_branch(tokens, parents, seen, said, DRAFTED)
        good += [
            torch.equal(said, replay(wanted, trees, nothing=NOTHING)),
            torch.equal(judged.length, torch.minimum(wanted, deepest)),
            torch.equal(picks, place.gather(0, best.argmax(dim=0)[None])[0]),
        ]
    return good


if __name__ == "__main__":
    main(Path(sys.argv[1]))
