"""Rounds to be timed: compact ones on a GPU, static ones on a CPU; the engine; whole answers."""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from trapline.gold.decoder.capture import captured
from trapline.gold.tree_decoding.drafter_static import StaticDFlash, StaticLookup
from trapline.gold.tree_decoding.generate_graphs import StaticGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig
from trapline.gold.tree_decoding.tree_pass import Trees

PLAIN = "round without a drafter"


def generator(target, model, kind, rows, temperature, options, budget=0) -> Any:
    """Plain rounds, prompt lookup, a chain or a tree of `budget` nodes."""
    room = options.prompt + options.tokens + 2 * max(budget, 16) + 2
    config = StaticConfig(rows, min(-(-room // 64) * 64, target.config.context), temperature)
    if target.device.type != "cpu":
        from trapline.gold.tree_decoding.fast_drafters import FusedDFlash, FusedLookup
        from trapline.gold.tree_decoding.fast_generate import FastGenerator

        drafter: Any = None
        if kind == "lookup":
            drafter = FusedLookup(block=budget)
        elif kind is not None:
            drafter = FusedDFlash(
                model, target, rows, config.room, budget=budget, chain=kind == "chain"
            )
        return FastGenerator(target, drafter, config)
    if kind == "lookup":
        drafter = StaticLookup(rows, config.room, block=budget, device=target.device)
    elif kind is not None:
        chain = kind == "chain"
        drafter = StaticDFlash(model, target, rows, config.room, budget=budget, chain=chain)
    else:
        drafter = None
    return StaticGenerator(target, drafter, config)


def parts(one, prompts, times) -> dict[str, float]:
    """Microseconds of a round's parts and of all of it, each as a graph; rows rest meanwhile."""
    rounds = one.rounds
    rounds.open([list(prompt) for prompt in prompts], 0)
    state, proposal = rounds.state, rounds.proposal
    trees = Trees(state.lengths, proposal.depths, proposal.seen)
    found = {}
    if rounds.drafter is not None:
        found["draft and tree"] = replayed(lambda: rounds.drafter.propose(state, proposal), times)
        if not rounds.drafter.prepared:
            found["masks"] = replayed(rounds.prepare, times)
    tiles = rounds.verifier.run(proposal.ids, trees)
    found["target's pass"] = replayed(lambda: rounds.verifier.run(proposal.ids, trees), times)
    found["picks"] = replayed(lambda: rounds.choose(tiles), times)
    found["verdict and commit"] = replayed(rounds.commit, times)
    found["round"] = replayed(rounds.round, times)
    return found


@torch.no_grad()
def replayed(work: Callable[[], object], times: int) -> float:
    """Microseconds of a graph's replay, best of three bursts: launches are in it."""
    graph = captured(work, ())
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / times)
    return min(found) * 1e6


def static_run(one, prompts, batch, options, most=None):
    def run(batches=None) -> dict:
        tokens = passes = 0
        busy = [0.0, 0.0, 0]  # tokens, seconds and passes while all rows are at work
        seconds = 0.0
        lengths: list[int] = []
        # Compact rounds fill a row that is done with the next prompt; static ones cannot.
        step = batch if batches or options.device == "cpu" else len(prompts) // batch * batch
        for at in range(0, len(prompts) - step + 1, step)[:batches]:
            some = prompts[at : at + step]
            done = one.generate(some, max_new_tokens=most or options.tokens)
            tokens += done.statistics.tokens
            passes += done.statistics.passes
            seconds += done.statistics.seconds["rounds"]
            busy[0] += done.statistics.busy_tokens
            busy[1] += done.statistics.busy_seconds
            busy[2] += done.statistics.busy_passes
            lengths += done.statistics.accepted_lengths.elements()
        whole = tokens / seconds
        rate = busy[0] / busy[1] if busy[1] else whole
        return {
            "tokens_per_s": rate,
            "tokens_per_s_to_the_end": whole,
            "tau": tokens / passes,
            # A rate belongs to the τ of its own time: at the end, answers cut more rounds short.
            "busy_tau": busy[0] / busy[2] if busy[2] else tokens / passes,
            "lengths": lengths,
        }

    return run


def engine_run(target, prompts, batch, options, most=None):
    """The decoder's own continuous batching: time from the first token of a batch to its last."""
    from trapline.gold.decoder.generate import stream

    def run(batches=None) -> dict:
        tokens, seconds = 0, 0.0
        for at in range(0, len(prompts) - batch + 1, batch)[:batches]:
            some = prompts[at : at + batch]
            coming = stream(target, some, max_new_tokens=most or options.tokens, batch=batch)
            for _ in some:
                next(coming)
            started = time.perf_counter()
            tokens += sum(1 for _ in coming)
            seconds += time.perf_counter() - started
        return {"tokens_per_s": tokens / seconds, "tau": 1.0}

    return run


def measured(runs: dict[str, Callable], rounds: int) -> dict[str, dict]:
    """Every contender's first batch for warmth, then all in turn; medians of tokens a second."""
    for run in runs.values():
        run(1)
    found: dict[str, list[dict]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(runs), len(runs)):
            found[name].append(runs[name]())
    figures = {}
    for name, ones in found.items():
        rates = [one["tokens_per_s"] for one in ones]
        figures[name] = {**ones[-1], "tokens_per_s": median(rates), "raw": rates}
    return figures


def show(title: str, figures: dict[str, dict]) -> None:
    print(f"\n{title}")
    for name, one in figures.items():
        share = one["speed_up"] / one.get("busy_tau", one["tau"])
        split = "  ".join(f"{part} {us:.0f}" for part, us in one.get("microseconds", {}).items())
        print(
            f"  {name:26} {one['tokens_per_s']:10.1f} tokens/s   τ {one['tau']:5.2f}"
            f"   {one['speed_up']:5.2f}×   {share:5.2f} of τ   {split}",
            flush=True,
        )
