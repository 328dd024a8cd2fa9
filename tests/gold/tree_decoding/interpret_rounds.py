"""Runs the kernels of fast rounds in the interpreter; test_fast_rounds.py reads the result."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.sampling import uniforms
from trapline.gold.tree_decoding import reference
from trapline.gold.tree_decoding.drafter import drafter_config, turned
from trapline.gold.tree_decoding.fast_drafters import FusedDFlash, FusedLookup, Proposal, RoundState
from trapline.gold.tree_decoding.fast_generate import FastGenerator
from trapline.gold.tree_decoding.fast_rounds import RoundsConfig
from trapline.gold.tree_decoding.hopper.linear_many_rows import ManyRowLinear
from trapline.gold.tree_decoding.prompt_lookup import lookup
from trapline.gold.tree_decoding.training import fresh
from trapline.gold.tree_decoding.tree_pass import Body, NewContext, TreePass, TreePositions
from trapline.gold.tree_decoding.triton.round import (
    choose_kernel,
    draw_kernel,
    move_kernel,
    prepare_kernel,
    verdict_kernel,
)
from trapline.gold.tree_decoding.triton.tree import Layout, best_first

ROWS, NODES, ROOM = 2, 6, 24
CPU = torch.device("cpu")


def main(folder: Path) -> None:
    torch.manual_seed(0)
    found = {
        "prepare": prepared(),
        "verdict": verdicts(),
        "nothing": nothing_to_pick(),
        "move": moved(),
        "draw": drawn(greedy=False) and drawn(greedy=True),
        "lookup": looked_up(),
        "attend": [attended(fresh, further) for fresh in (False, True) for further in (0, 130)],
        "begin": begun(),
        "answers": [answered(kind) for kind in ("chain", "tree", "lookup")],
        "large": max(multiplied(ROWS * NODES), multiplied(70)),
    }
    (folder / "rounds.json").write_text(json.dumps(found))


def random_trees(rows, drafted):
    tokens = torch.randint(0, 4, (rows, drafted))
    parents = torch.stack(
        [torch.tensor([int(torch.randint(-1, i, ())) for i in range(drafted)]) for _ in range(rows)]
    )
    # Siblings differ, as those of every drafter do.
    for row in range(rows):
        for node in range(drafted):
            elder = [
                int(tokens[row, i]) for i in range(node) if parents[row, i] == parents[row, node]
            ]
            tokens[row, node] = next(t for t in range(9) if t not in elder)
    return tokens, parents


def prepared() -> bool:
    tokens, parents = random_trees(ROWS, NODES - 1)
    tokens[1, -1], parents[1, -1] = -1, -1
    seen = torch.zeros((ROWS, NODES, NODES), dtype=torch.int8)
    ids, depths = torch.zeros((2, ROWS * NODES), dtype=torch.int64)
    roots = torch.tensor([7, 8])
    prepare_kernel[(ROWS,)](
        *(tokens, parents, roots, ids, depths, seen, NODES), BLOCK=16, ROUNDS=3, PDL=False
    )
    return laid_out(tokens, parents, Layout(roots, ids, depths, seen)) and grown()


def grown() -> bool:
    """Trees of the tree kernel come laid out, those with fewer nodes than asked for too."""
    good = True
    for nodes, choices in ((NODES - 1, 4), (20, 3)):
        values = torch.randn((ROWS, 3, choices)).sort(dim=-1, descending=True).values.double()
        values[1, :, 2:] = -torch.inf
        candidates = torch.stack([torch.randperm(9)[:choices] for _ in range(ROWS * 3)])
        tokens, parents = torch.zeros((2, ROWS, nodes), dtype=torch.int64)
        ids, depths = torch.zeros((2, ROWS * (nodes + 1)), dtype=torch.int64)
        seen = torch.zeros((ROWS, nodes + 1, nodes + 1), dtype=torch.int8)
        layout = Layout(torch.tensor([7, 8]), ids, depths, seen)
        best_first(values, candidates.view(ROWS, 3, -1), tokens, parents, layout=layout)
        good = good and laid_out(tokens, parents, layout)
    return good and bool((tokens[1] == -1).any())


def laid_out(tokens, parents, found: Layout) -> bool:
    wanted = reference.ancestors(parents)
    ids = torch.cat((found.roots[:, None], tokens.clamp(min=0)), dim=1)
    return (
        torch.equal(found.seen != 0, wanted)
        and torch.equal(found.depths.view(ROWS, -1), reference.depths(wanted))
        and torch.equal(found.ids.view(ROWS, -1), ids)
    )


def verdicts() -> list[bool]:
    """Random picks; of two rows the second has said all it may in every other case."""
    good = []
    for case in range(12):
        tokens, parents = random_trees(ROWS, NODES - 1)
        choices = torch.randint(0, 3, (ROWS, NODES))
        seen = reference.ancestors(parents)
        deepest = NODES - 1
        state = RoundState(ROWS, ROOM, CPU)
        state.lengths.copy_(torch.tensor([3, 5]))
        state.limits.copy_(torch.tensor([9, 9 * (case % 2)]))
        path = torch.zeros((ROWS, deepest + 1), dtype=torch.int64)
        anchors = torch.full((ROWS * 4,), 99)
        verdict_kernel[(ROWS,)](
            *(tokens, parents, seen.to(torch.int8), reference.depths(seen).flatten(), choices),
            *(path, state.roots, state.lengths, state.known, state.made, state.limits),
            *(state.text, state.log, state.rounds, state.kept, anchors, 4),
            *(NODES, deepest, ROOM),
            BLOCK=16,
            PDL=False,
        )
        want = reference.accepted_branch(tokens, parents, seen, choices, deepest)
        for row, start in ((0, 3), (1, 5)):
            count = int(want.length[row]) + 1 if row == 0 or case % 2 else 0
            nodes = want.path[row, : max(count - 1, 0)]
            said = [*tokens[row, nodes].tolist(), int(want.bonus[row])] if count else []
            good.append(
                state.kept[row] == count
                and state.lengths[row] == start + count
                and state.known[row] == start
                and state.text[row, start + 1 : start + 1 + count].tolist() == said
                and path[row, 1:count].tolist() == (nodes + 1).tolist()
                and state.log[row, 0] == count
                and state.rounds[row] == (count > 0)
                and (not count or state.roots[row] == anchors[row * 4] == said[-1])
            )
    return [bool(one) for one in good]


def nothing_to_pick() -> bool:
    """Logits without a softmax give −1: no missing node is accepted, the next root is a token."""
    tokens, parents = torch.full((2, 1, NODES - 1), -1)
    logits, choices = torch.full((NODES, 23), torch.nan), torch.zeros((1, NODES), dtype=torch.int64)
    depths = torch.tensor([0] + [1] * (NODES - 1))
    same = {"BLOCK": 32, "PDL": False}
    draw_kernel[(NODES,)](
        *(logits, torch.tensor([5]), torch.tensor([0]), depths, choices, 23, NODES, torch.ones(1)),
        **same,
    )
    best, greedy = torch.tensor([torch.inf, torch.nan]), torch.zeros(2, dtype=torch.int64)
    choose_kernel[(2,)](best, torch.zeros(2, dtype=torch.int64), greedy, 1, 2, **same)
    state, path = RoundState(1, ROOM, CPU), torch.zeros((1, NODES), dtype=torch.int64)
    state.limits.fill_(9)
    verdict_kernel[(1,)](
        *(tokens, parents, reference.ancestors(parents).to(torch.int8), depths, choices, path),
        *(state.roots, state.lengths, state.known, state.made, state.limits, state.text),
        *(state.log, state.rounds, state.kept, None, 4, NODES, 1, ROOM),
        **same,
    )
    seen = [choices.max(), greedy.max(), state.kept[0], state.text[0, 1], state.roots[0]]
    return [int(one) for one in seen] == [-1, -1, 1, -1, 0]


def moved() -> bool:
    """A path whose goals are others' sources."""
    keys, values = torch.randn((2, 2, ROWS * ROOM, 20))
    features, fresh = torch.randn((ROWS * NODES, 39)), torch.zeros((ROWS * 4, 39))
    path = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 0]])
    known, kept = torch.tensor([3, 9]), torch.tensor([4, 3])
    wanted_k, wanted_v, wanted_f = keys.clone(), values.clone(), fresh.clone()
    for row in range(ROWS):
        for j in range(int(kept[row])):
            at = row * ROOM + int(known[row])
            wanted_k[:, at + j] = keys[:, at + int(path[row, j])]
            wanted_v[:, at + j] = values[:, at + int(path[row, j])]
            wanted_f[row * 4 + j] = features[row * NODES + int(path[row, j])]
    move_kernel[(ROWS, 2 * 2 + 3)](
        *(keys, values, features, fresh, path, known, kept, NODES, 3, ROOM, ROWS, 2, 2, 20, 39),
        BLOCK_L=4,
        BLOCK=16,
        PDL=False,
    )
    return all(
        torch.equal(a, b) for a, b in ((keys, wanted_k), (values, wanted_v), (fresh, wanted_f))
    )


def drawn(*, greedy: bool) -> bool:
    """The same tokens as inverting the softmax, in blocks of the vocabulary and in one.

    Rows have temperatures of their own; the second row may be greedy (heat 0).
    """
    vocabulary, lines = 23, ROWS * NODES
    logits = torch.randn((lines, vocabulary)) * 2
    logits[:, 3] = -torch.inf
    seeds, made = torch.tensor([5, 6]), torch.tensor([0, 11])
    depths = torch.arange(NODES).repeat(ROWS)
    numbers = uniforms(seeds[:, None], made[:, None] + depths.view(ROWS, -1))
    temperatures = torch.tensor([0.8, torch.inf if greedy else 1.7])
    heat = temperatures.repeat_interleave(NODES)[:, None]
    law = torch.softmax(logits.double() / heat.double(), dim=-1)
    wanted = reference.inverted(law, numbers.flatten())
    if greedy:
        logits[NODES:, 7] = logits[NODES:, 2] = 9.0  # a tie goes to the lower token
        wanted[NODES:] = 2
    good = True
    for block in (8, 32):
        choices = torch.zeros(lines, dtype=torch.int64)
        draw_kernel[(lines,)](
            *(logits, seeds, made, depths, choices, vocabulary, NODES),
            1.4426950408889634 / temperatures,
            BLOCK=block,
            PDL=False,
        )
        good = good and torch.equal(choices, wanted)
    return good


def looked_up() -> bool:
    """The same tokens as `prompt_lookup.lookup`, padded with −1."""
    text, drafter, good = torch.randint(0, 3, (ROWS, ROOM)), FusedLookup(block=5), True
    for lengths in ([0, 1], [2, 9], [23, 17], [12, 5]):
        state, into = RoundState(ROWS, ROOM, CPU), Proposal(ROWS, 6, CPU)
        state.text.copy_(text)
        state.lengths.copy_(torch.tensor(lengths))
        drafter.propose(state, into)
        for row, length in enumerate(lengths):
            wanted = lookup(text[row, : length + 1].tolist(), 5, 3)
            good = good and into.tokens[row].tolist() == wanted + [-1] * (5 - len(wanted))
    return good


def small_pass(layer, store, angles, *, nodes, taps=()) -> TreePass:
    config = DecoderConfig(
        family="qwen3",
        vocab=8,
        dim=32,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=8,
        context=ROOM,
        norm_eps=1e-6,
        tied=True,
        rope=RopeConfig(),
        qk_norm=True,
    )
    norm = type("N", (), {"weight": torch.ones(32)})()
    table = type("T", (), {"weight": torch.randn((8, 32))})()
    return TreePass(
        Body(config, table, norm, table), [SimpleNamespace(weights=lambda: layer)], angles, store,
        rows=ROWS, nodes=nodes, taps=taps,
    )  # fmt: skip


def begun() -> float:
    """The stream, its first projections and those of new context: the largest difference."""
    qkv, gain = torch.randn((128, 32)), torch.rand(32)
    layer = type("L", (), {"qkv": qkv, "up": torch.zeros(2), "norms": (torch.rand(32), None)})()
    one = small_pass(layer, torch.zeros((2, 1, ROWS, ROOM, 2, 16)), (None, None), nodes=NODES)
    lines, fused = ROWS * 4, torch.randn((32, 96))
    new = NewContext(
        *(torch.randn((lines, 96)), fused, gain, torch.randn((64, 32))),
        *(torch.empty((lines, 32)), torch.empty((4, lines)), torch.empty((lines, 64))),
    )
    ids = torch.randint(0, 8, (ROWS * NODES,))
    trees = TreePositions(*(torch.zeros(1),) * 3)
    fresh = one._begin(ids, trees, new).fresh

    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    stream = one._embedding[ids]
    pairs = (
        (one._x, stream),
        (one._qkv, normed(stream, layer.norms[0]) @ qkv.T),
        (fresh, normed(new.features @ fused.T, gain) @ new.context_weight.T),
    )
    return max(float((a - b).abs().max()) for a, b in pairs)


def multiplied(lines: int) -> float:
    """Large products: one in planes, the last of them shorter, and a gated one. Their gap."""
    dim, hidden, gain = 40, 2100, torch.rand(40)
    weights = {"out": (dim, dim), "up": (2 * hidden, dim), "down": (dim, hidden)}
    layer = type("L", (), {name: torch.randn(shape) for name, shape in weights.items()})()
    large = ManyRowLinear(layer, lines)
    stream, inner = torch.randn((lines, dim)), torch.randn((lines, hidden))
    y, squares = torch.empty((lines, dim)), torch.empty((8, lines))
    wanted = stream + inner @ layer.down.T
    count = large.add(inner, layer.down, stream, gain, y, squares)
    sums = squares.view(-1)[: count * lines].view(count, lines)
    pairs = [(stream, wanted), (y, wanted * gain), (sums.sum(dim=0), wanted.square().sum(dim=1))]
    out = torch.empty((lines, hidden))
    large.gate(y, layer.up, squares, out, count, 1e-6)
    factor = torch.rsqrt(wanted.square().mean(dim=1, keepdim=True) + 1e-6)
    gate, up = (y @ layer.up.T * factor).chunk(2, dim=1)
    pairs.append((out, torch.nn.functional.silu(gate) * up))
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)


def attended(fresh: bool, further: int) -> float:
    """One layer's attention against torch: the largest difference, of stored keys too.

    Positions are one tile, and some of a second where all of them stand 130 further.
    """
    wide, narrow = 64, 32
    weights = [torch.rand(16) + 0.5 for _ in range(2)]
    layer = type("L", (), {"q_norm": weights[0], "k_norm": weights[1], "up": torch.zeros(2)})()
    store = torch.randn((2, 1, ROWS, ROOM + further, 2, 16))
    turns = torch.arange(ROOM + further)[:, None] * torch.rand(8)
    angles = turns.cos(), turns.sin()
    one = small_pass(layer, store, angles, nodes=NODES, taps=(-1,))
    lengths, known = torch.tensor([9, 4]) + further, torch.tensor([6, 4]) + further
    _, parents = random_trees(ROWS, NODES - 1)
    seen = reference.ancestors(parents)
    depths = reference.depths(seen).flatten()
    qkv, stream = torch.randn((ROWS * NODES, wide + 2 * narrow)), torch.randn((ROWS * NODES, 32))
    rows = torch.randn((ROWS * 4, 2 * narrow)) if fresh else None
    before = store.clone()
    trees = TreePositions(lengths, depths, seen.to(torch.int8), known if fresh else None, rows)
    one._tree_attend(trees, 0, layer, qkv, stream)

    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    def at(places):
        return angles[0][places][:, None], angles[1][places][:, None]

    worst = float((one.features - stream).abs().max())
    for row in range(ROWS):
        lines = qkv[row * NODES : (row + 1) * NODES]
        places = int(lengths[row]) + depths[row * NODES : (row + 1) * NODES]
        q, k, v = (part.view(NODES, -1, 16) for part in lines.split([wide, narrow, narrow], dim=1))
        q, k = (turned(normed(x, w), at(places)) for x, w in zip((q, k), weights, strict=True))
        past_k, past_v = before[:, 0, row, : int(lengths[row])]
        if rows is not None:
            new = slice(int(known[row]), int(lengths[row]))
            some = rows[row * 4 : row * 4 + new.stop - new.start]
            new_k, new_v = (part.view(-1, 2, 16) for part in some.split([narrow, narrow], dim=1))
            past_k[new] = turned(normed(new_k, weights[1]), at(torch.arange(new.start, new.stop)))
            past_v[new] = new_v
            for kept, past in zip(store, (past_k, past_v), strict=True):
                gap = (kept[0, row, new] - past[new]).abs()
                worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
        else:
            behind = slice(int(lengths[row]), int(lengths[row]) + NODES)
            worst = max(worst, float((store[0, 0, row, behind] - k).abs().max()))
        mask = torch.cat((torch.ones((NODES, len(past_k)), dtype=torch.bool), seen[row]), dim=1)
        q, k, v = (
            part.transpose(0, 1) for part in (q, torch.cat((past_k, k)), torch.cat((past_v, v)))
        )
        attended = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        want = attended.transpose(0, 1)
        got = one._seen[row * NODES : (row + 1) * NODES].view(NODES, 4, 16)
        worst = max(worst, float((got - want).abs().max()))
    return worst


def answered(kind: str) -> bool:
    """Whole answers of three prompts in two rows, against plain decoding on the CPU."""
    config = DecoderConfig(
        family="qwen3", vocab=16, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32,
        context=64, norm_eps=1e-6, tied=True, rope=RopeConfig(), qk_norm=True,
    )  # fmt: skip
    target = Decoder(config).eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    model = fresh(drafter_config(config, layers=1, block=4, mask_id=15), 0).requires_grad_(False)
    drafter = FusedLookup(block=3)
    if kind != "lookup":
        drafter = FusedDFlash(
            model, target, 2, 32, budget=2 if kind == "chain" else 5, chain=kind == "chain"
        )
    prompts, options = [[1, 2, 1, 2], [3], [4, 5, 4]], {"max_new_tokens": 6, "stop_ids": [7]}
    host = FastGenerator(target, drafter, RoundsConfig(2, 32))
    return host.generate(prompts, **options).tokens == generate(target, prompts, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
