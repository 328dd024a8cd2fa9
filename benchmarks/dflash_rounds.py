"""Contenders of the DFlash benchmark: speculation through `Decoder.generate`, and plain loops."""

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from trapline.gold import Speculation
from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.tree_decoding.statistics import Statistics

PLAIN = "round without a drafter"


def speculation(model, kind: str, budget: int) -> Speculation:
    """Prompt lookup, a chain or a tree of `budget` tokens."""
    mode = "tree" if kind == "tree" else "chain"
    return Speculation("lookup" if kind == "lookup" else model, mode=mode, budget=budget)


def plain_rounds(target, rows: int, options, *, sampled: bool = False):
    """Fast rounds without a drafter: the graphed plain loop, on a GPU."""
    from trapline.gold.tree_decoding.fast_generate import FastGenerator
    from trapline.gold.tree_decoding.fast_rounds import RoundsConfig

    room = -(-(options.prompt + options.tokens + 34) // 64) * 64
    config = RoundsConfig(rows, min(room, target.config.context), sampled)
    return FastGenerator(target, None, config)


def samplings(count: int, temperature: float) -> list[Sampling]:
    return [Sampling(temperature=temperature, seed=seed) for seed in range(count)]


def speculative_run(target, one: Speculation, prompts, batch, temperature, options):
    """Times `Decoder.generate`, prefill excluded."""

    def run(batches=None) -> dict:
        some = whole_batches(prompts, batch, batches)
        started = time.perf_counter()
        target.generate(
            some,
            max_new_tokens=options.tokens,
            sampling=samplings(len(some), temperature),
            speculate=one,
            stop_ids=[],
            batch=batch,
        )
        seconds = time.perf_counter() - started - one.statistics.seconds["prefill"]
        return rates(one.statistics, seconds)

    return run


def rounds_run(one, prompts, batch, temperature, most):
    """Times a `FastGenerator`, prefill excluded."""

    def run(batches=None) -> dict:
        some = whole_batches(prompts, batch, batches)
        ways = samplings(len(some), temperature)
        done = one.generate(some, max_new_tokens=most, sampling=ways).statistics
        return rates(done, done.seconds["rounds"])

    return run


def whole_batches(prompts: Sequence, batch: int, batches: int | None) -> Sequence:
    return prompts[: batch * (batches or len(prompts) // batch)]


def rates(done: Statistics, seconds: float) -> dict:
    """Tokens per second while all rows are busy, and to the end; τ of either time."""
    busy = done.busy_seconds > 0.0
    return {
        "tokens_per_s": done.busy_tokens / done.busy_seconds if busy else done.tokens / seconds,
        "tokens_per_s_to_the_end": done.tokens / seconds,
        "tau": done.tau,
        # A rate belongs to the τ of its own time: at the end, answers cut more rounds short.
        "busy_tau": done.busy_tokens / done.busy_passes if busy else done.tau,
        "lengths": list(done.accepted_lengths.elements()),
        "served_by": done.served_by,
    }


def parts(one, prompts, times) -> dict[str, float]:
    """Microseconds of a round's parts and of a whole round, each as a graph; rows are idle."""
    from trapline.gold.tree_decoding.tree_pass import TreePositions

    rounds = one.rounds
    rounds.open([list(prompt) for prompt in prompts], 0)
    state, proposal = rounds.state, rounds.proposal
    trees = TreePositions(state.lengths, proposal.depths, proposal.seen)
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
    """Microseconds of a graph's replay with its launch, best of four bursts."""
    graph = captured(work, (), torch.device("cuda", torch.cuda.current_device()))
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / times)
    return min(found) * 1e6


def engine_run(target, prompts, batch, options, most=None):
    """The decoder's continuous batching, from the first token of a batch to its last."""
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
    """Warm up every contender with one batch, then time all in turn; medians of tokens/s."""
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
