"""A shape of 8 B parameters with random weights: what speculation costs a real model.

Which tokens such a model accepts means nothing, so the accepted lengths of the trained pair are
replayed: every part of a round runs, only its verdict is written over. Speed-up over τ is the
share of the gain that survives the cost of drafting, tree and wider pass.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from dflash_rounds import PLAIN, engine_run, parts, show, static_run

from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.model import Decoder
from trapline.gold.tree_decoding.drafter import DFlash, drafter_config
from trapline.gold.tree_decoding.drafter_static import StaticDFlash
from trapline.gold.tree_decoding.generate_graphs import StaticGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig, StaticRounds


class Traces(NamedTuple):
    """Accepted lengths of each contender, one a pass; slots of the drafter's blocks."""

    lengths: dict[str, list[int]]
    block: int


class ReplayedDFlash(StaticDFlash):
    """Drafts in earnest, then proposes the tree of a fixed, typical draft."""

    profile: torch.Tensor

    def block(self, roots, lengths):
        super().block(roots, lengths)
        return self.profile.expand(len(roots), -1, -1)


class ReplayedRounds(StaticRounds):
    """Judges in earnest, then accepts as many nodes as the trace says."""

    trace: torch.Tensor

    def choices(self, logits, trees):
        super().choices(logits, trees)
        if trees.tokens.shape[1] == 0:
            return logits.argmax(dim=-1)
        return replay(
            self.trace[self._made * 7919 % len(self.trace)], trees, nothing=logits.shape[-1] - 1
        )


def replay(wanted, trees, *, nothing) -> torch.Tensor:
    """Choices (R, N + 1) by which as many nodes are accepted as `wanted` (R,).

    Nobody drafts `nothing`: where the branch ends, so does the walk.
    """
    # The heaviest node of the wanted depth, or of the deepest there is; its branch is right.
    deepest = torch.where(trees.tokens >= 0, trees.depths[:, 1:], 0).amax(dim=1, keepdim=True)
    goal = torch.minimum(wanted[:, None], deepest)
    node = (trees.depths == goal).int().argmax(dim=1)
    branch = trees.seen.gather(1, node[:, None, None].expand(-1, 1, trees.seen.shape[2]))[:, 0]
    choices = torch.full_like(trees.depths, nothing)
    said = torch.where(branch[:, 1:], trees.tokens, nothing)
    above = torch.where(branch[:, 1:], trees.parents + 1, trees.depths.shape[1])
    wide = torch.cat((choices, choices[:, :1]), dim=1).scatter(1, above, said)
    return wide[:, :-1]


def compact_replay(trace, profile):
    """Compact rounds and drafter that do all of the work and then follow trace and profile."""
    from trapline.gold.tree_decoding.drafter_compact import CompactDFlash
    from trapline.gold.tree_decoding.generate_rounds import CompactRounds
    from trapline.gold.tree_decoding.generate_static import Proposed

    turn = torch.zeros((), dtype=torch.int64, device=trace.device)

    class Drafter(CompactDFlash):
        best: Any = None

        def ranking(self):
            values, candidates = super().ranking()
            if self.best is None:  # before a graph is captured: it is no part of a round
                self.best = profile[:, : values.shape[1]].topk(values.shape[2], dim=-1)
            values.copy_(self.best.values.expand_as(values))
            candidates.copy_(self.best.indices.expand_as(candidates))
            return values, candidates

    class Rounds(CompactRounds):
        def choose(self, tiles):
            super().choose(tiles)
            if self.drafter is None:
                return
            state, made, shape = self.state, self.proposal, (self.state.rows, self.nodes)
            trees = Proposed(made.tokens, made.parents, made.seen != 0, made.depths.view(shape))
            mine = torch.arange(state.rows, device=trace.device)
            wanted = trace[(turn * state.rows + mine) % len(trace)]
            turn.add_(1)
            nothing = self.target.config.vocab - 1
            self.choices.copy_(replay(wanted, trees, nothing=nothing).flatten())

    return Drafter, Rounds


def big_shape(options, traces: Traces | None) -> Iterator[dict]:
    """One table a batch."""
    if traces is None:
        trees = {f"tree of {budget}": geometric(0.85, 15) for budget in options.shape_budgets}
        traces = Traces({"chain": geometric(0.75, 15), **trees}, 16)
    target, model = random_models(options, traces.block)
    for batch in options.batches:
        figures = {}
        for name, kind, budget in (
            (PLAIN, None, 0),
            ("chain", "chain", model.config.block - 1),
            *((f"tree of {budget}", "tree", budget) for budget in options.shape_budgets),
        ):
            trace = traces.lengths.get(name, [0])  # plain rounds accept nothing
            figures[name] = replayed_run(target, model, kind, budget, batch, trace, options)
        figures["decoder's engine"] = engine_figures(target, batch, options)
        base = max(figures[name]["tokens_per_s"] for name in (PLAIN, "decoder's engine"))
        for one in figures.values():
            one["speed_up"] = one["tokens_per_s"] / base
            one["speed_up_over_tau"] = one["speed_up"] / one["tau"]
        show(f"{shape_name(options)}, batch {batch}", figures)
        yield {"batch": batch, "block": model.config.block, "contenders": figures}


def shape_name(options) -> str:
    """A CPU only shows that the benchmark runs."""
    return "toy shape" if options.device == "cpu" else "8B shape"


def random_models(options, block) -> tuple[Decoder, DFlash]:
    """Qwen3-8B's shape and a drafter of five layers, weights N(0, 0.02)."""
    tiny = options.device == "cpu"
    config = DecoderConfig(
        family="qwen3",
        vocab=512 if tiny else 151_936,
        dim=64 if tiny else 4096,
        layers=2 if tiny else 36,
        heads=4 if tiny else 32,
        kv_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        hidden=128 if tiny else 12_288,
        context=4096,
        norm_eps=1e-6,
        tied=tiny,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    )
    kind = torch.float32 if tiny else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device(options.device):
            target = Decoder(config)
            model = DFlash(drafter_config(config, layers=5, block=block, mask_id=config.vocab - 1))
    finally:
        torch.set_default_dtype(before)
    for one in (target, model):
        for parameter in one.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        one.eval().requires_grad_(False)
    return target, model


def replayed_run(target, model, kind, budget, batch, trace, options) -> dict:
    room = options.prompt + options.shape_tokens + 2 * max(budget, 16) + 2
    room = min(-(-room // 64) * 64, target.config.context)
    config, device = StaticConfig(batch, room), target.device
    profile = typical_draft(model.config.block - 1, target.config.vocab).to(device)
    trace = torch.tensor(shuffled(trace), device=device)
    drafter: Any = None
    if device.type == "cpu":
        if kind is not None:
            drafter = ReplayedDFlash(
                model, target, batch, room, budget=budget, chain=kind == "chain"
            )
            drafter.profile = profile
        ReplayedRounds.trace = trace
        one: Any = StaticGenerator(target, drafter, config, rounds=ReplayedRounds)
    else:
        from trapline.gold.tree_decoding.generate_compact import CompactGenerator

        kinds = compact_replay(trace, profile)
        if kind is not None:
            drafter = kinds[0](model, target, batch, room, budget=budget, chain=kind == "chain")
        one = CompactGenerator(target, drafter, config, rounds=kinds[1])
    # In batches some prompts wait for a free row, as they would in earnest.
    prompts = [[7] * options.prompt for _ in range(batch if batch == 1 else 3 * batch)]
    run = static_run(one, prompts, batch, options, options.shape_tokens)
    run(1)
    ones = [run() for _ in range(options.shape_rounds)]
    # The trace goes on from run to run, so a run's rate belongs to its own τ.
    middle = sorted(ones, key=lambda one: one["tokens_per_s"])[len(ones) // 2]
    found = {name: middle[name] for name in ("tokens_per_s", "tau")}
    found["raw"] = [[one["tokens_per_s"], one["tau"]] for one in ones]
    if device.type != "cpu":
        found["microseconds"] = parts(one, prompts[:batch], 5)
    return found


def engine_figures(target, batch, options) -> dict:
    prompts = [[7] * options.prompt for _ in range(batch)]
    run = engine_run(target, prompts, batch, options, options.shape_tokens)
    run()
    return run()


def typical_draft(depths: int, vocab: int) -> torch.Tensor:
    """(1, L, V): four candidates a depth, the first at 0.85 and falling by depth."""
    log_q = torch.full((1, depths, vocab), -30.0)
    for depth in range(depths):
        best = 0.85 * 0.97**depth
        for rank, token in enumerate((1, 2, 3, 4)):
            share = best if rank == 0 else (1 - best) * 0.5**rank
            log_q[0, depth, token] = float(torch.log(torch.tensor(share)))
    return log_q


def geometric(rate: float, longest: int) -> list[int]:
    """Accepted lengths of a drafter that is right with this chance at every depth."""
    lengths, draw = [], random.Random(0)
    for _ in range(1024):
        length = 0
        while length < longest and draw.random() < rate:
            length += 1
        lengths.append(length)
    return lengths


def shuffled(trace: list[int]) -> list[int]:
    return random.Random(0).sample(trace, len(trace))
