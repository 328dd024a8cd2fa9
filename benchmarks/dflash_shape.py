"""A shape of 8 B parameters with random weights: what speculation costs a real model.

The tokens that such a model accepts are meaningless, so the accepted lengths of the trained pair
are replayed (`dflash_replay`): every part of a round runs, only its choices differ. Speed-up over τ
is the share of the gain that remains after the cost of drafting, tree and wider pass. The rounds
are captured on a GPU, so this part needs one.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from dflash_replay import ReplayedDFlash, replayed_rounds
from dflash_rounds import PLAIN, engine_run, parts, rounds_run, show

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.tree_decoding.drafter import DFlash, drafter_config
from trapline.gold.tree_decoding.fast_generate import FastGenerator
from trapline.gold.tree_decoding.fast_rounds import RoundsConfig


class Traces(NamedTuple):
    """Accepted lengths of each contender, one a pass; slots of the drafter's blocks."""

    lengths: dict[str, list[int]]
    block: int


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
        show(f"8B shape, batch {batch}", figures)
        yield {"batch": batch, "block": model.config.block, "contenders": figures}


def random_models(options, block) -> tuple[Decoder, DFlash]:
    """Qwen3-8B's shape and a drafter of five layers, weights N(0, 0.02)."""
    config = DecoderConfig(
        family="qwen3",
        vocab=151_936,
        dim=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=12_288,
        context=4096,
        norm_eps=1e-6,
        tied=False,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
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
    device = target.device
    drafter = None
    if kind is not None:
        drafter = ReplayedDFlash(model, target, batch, room, budget=budget, chain=kind == "chain")
        drafter.profile = typical_draft(model.config.block - 1, target.config.vocab).to(device)
    rounds = replayed_rounds(torch.tensor(shuffled(trace), device=device))
    one = FastGenerator(target, drafter, RoundsConfig(batch, room), rounds=rounds)
    # In batches some prompts wait for a free row, as in real use.
    prompts = [[7] * options.prompt for _ in range(batch if batch == 1 else 3 * batch)]
    run = rounds_run(one, prompts, batch, 0.0, options.shape_tokens)
    run(1)
    ones = [run() for _ in range(options.shape_rounds)]
    # The trace goes on from run to run, so a run's rate belongs to its own τ.
    raw = [[one["tokens_per_s"], one["busy_tau"]] for one in ones]
    rate, tau = sorted(raw, key=lambda one: one[0] / one[1])[len(raw) // 2]
    microseconds = parts(one, prompts[:batch], 5)
    return {"tokens_per_s": rate, "tau": tau, "raw": raw, "microseconds": microseconds}


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
