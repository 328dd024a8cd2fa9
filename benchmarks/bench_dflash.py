"""Speculative decoding against our own graphed autoregressive loop, never an eager one.

    PYTHONPATH=src python benchmarks/bench_dflash.py --pair FOLDER [--device cuda] [--quick]

1. *The trained pair* (made by `scripts/train_dflash_pair.py`) on held-out prompts, batch 1 and 8,
   temperature 0 and 1: chain, trees of several budgets, prompt lookup. Prompts to which plain
   decoding answers by repeating itself are left out: they flatter every drafter. Whole answers are
   timed, prefill excluded, contenders in turn; the figure is committed tokens a second. The
   baseline is the faster of two graphed loops: the decoder's engine and a static round without a
   drafter.
2. *A shape of 8 B parameters with random weights*, so that a pass costs what a real model's does.
   Which tokens such a model accepts means nothing, so the accepted lengths of the trained pair are
   replayed: every part of a round runs, only its verdict is written over. Speed-up over τ is the
   share of the gain that survives the cost of drafting, tree and wider pass.
3. *Published results of DFlash and DDTree*, of other models on other machines, beside ours.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.model import Decoder
from trapline.gold.tree_decoding import drafter_checkpoint
from trapline.gold.tree_decoding.drafter import DFlash, drafter_config
from trapline.gold.tree_decoding.drafter_static import StaticDFlash, StaticLookup
from trapline.gold.tree_decoding.generate_graphs import StaticGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig, StaticRounds

#: From the DDTree paper (arXiv 2604.12989), Qwen3-8B, temperature 0, drafters of block 16: speed-up
#: over autoregressive decoding and τ. Another model on another machine: for orientation only.
PUBLISHED = [
    {"task": "MATH-500", "DFlash": [5.56, 7.79], "DDTree": [7.52, 10.73]},
    {"task": "GSM8K", "DFlash": [4.78, 6.57], "DDTree": [6.75, 9.54]},
    {"task": "HumanEval", "DFlash": [4.84, 6.61], "DDTree": [6.90, 9.67]},
    {"task": "MT-Bench", "DFlash": [2.56, 4.28], "DDTree": [4.10, 6.58]},
    {"task": "Alpaca", "DFlash": [2.07, 3.12], "DDTree": [3.36, 5.09]},
]
PROMPT = 32


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    results: dict[str, Any] = {"published, other models and machines": PUBLISHED}
    lengths = None
    if options.pair:
        results["trained pair"], lengths = trained_pair(options)
    if not options.no_shape:
        results[f"{shape_name(options)}, random weights, replayed acceptance"] = big_shape(
            options, lengths
        )
    print(harness.write("dflash", options.device, results, folder=options.out))


# --- 1. the trained pair -------------------------------------------------------------


def trained_pair(options) -> tuple[list[dict], dict[str, list[int]]]:
    kind = torch.float32 if options.device == "cpu" else torch.bfloat16
    target = Decoder.from_pretrained(options.pair).to(options.device, kind).eval()
    target.requires_grad_(False)
    model = drafter_checkpoint.load(options.pair / "drafter", dtype=kind, device=options.device)
    prompts = held_out_prompts(options, target, model.config.mask_id)
    tables, lengths = [], {"chain": [], "tree": []}
    for batch in options.batches:
        for temperature in (0.0, 1.0):
            figures, seen = one_setting(target, model, prompts, batch, temperature, options)
            tables.append({"batch": batch, "temperature": temperature, "contenders": figures})
            if temperature == 0.0:
                for mode, found in seen.items():
                    lengths[mode] += found
            show(f"batch {batch}, temperature {temperature:g}", figures)
    return tables, lengths


def held_out_prompts(options, target, mask_id) -> list[list[int]]:
    """Prompts of the held-out text to which plain decoding gives an answer that is no loop."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.pair / "tokenizer.json"))
    prompts = []
    text = (options.pair / "held_out.txt").read_text(encoding="utf-8")
    for document in text.split("\f"):
        ids = tokenizer.encode(document).ids
        prompts += [ids[at : at + PROMPT] for at in range(0, len(ids) - PROMPT, 4 * PROMPT)]
    random.Random(0).shuffle(prompts)
    prompts = [prompt for prompt in prompts if mask_id not in prompt][: 4 * options.prompts]
    rows = 8
    plain = static(target, None, None, rows, 0.0, options)
    kept = []
    for at in range(0, len(prompts) - rows + 1, rows):
        some = prompts[at : at + rows]
        answers = plain.generate(some, max_new_tokens=options.tokens).tokens
        kept += [p for p, answer in zip(some, answers, strict=True) if not repeats(answer)]
    if len(kept) < rows:
        raise SystemExit(f"only {len(kept)} of {len(prompts)} answers do not repeat themselves")
    print(f"{len(kept)} of {len(prompts)} prompts have answers that do not repeat themselves")
    return kept[: options.prompts]


def repeats(answer: list[int], width: int = 8) -> bool:
    """Whether less than seven tenths of its eight-grams are different."""
    grams = [tuple(answer[at : at + width]) for at in range(len(answer) - width + 1)]
    return bool(grams) and len(set(grams)) < 0.7 * len(grams)


def static(target, model, kind, rows, temperature, options, budget=0) -> StaticGenerator:
    depth = model.config.block if model is not None else 16
    room = PROMPT + options.tokens + depth + 1 + budget + 1
    room = min(-(-room // 64) * 64, target.config.context)
    drafter: Any = None
    if kind == "lookup":
        drafter = StaticLookup(rows, room, block=10, device=target.device)
    elif kind is not None:
        chain = kind == "chain"
        drafter = StaticDFlash(model, target, rows, room, budget=budget, chain=chain)
    return StaticGenerator(target, drafter, StaticConfig(rows, room, temperature))


def one_setting(target, model, prompts, batch, temperature, options):
    """All contenders over the same prompts, in turn; the first is the baseline."""
    depth = model.config.block - 1
    made = {
        "static round, no drafter": static(target, None, None, batch, temperature, options),
        "prompt lookup": static(target, model, "lookup", batch, temperature, options),
        "chain": static(target, model, "chain", batch, temperature, options, depth),
    }
    for budget in options.budgets:
        made[f"tree of {budget}"] = static(
            target, model, "tree", batch, temperature, options, budget
        )
    runs: dict[str, Callable] = {
        name: static_run(one, prompts, batch, options) for name, one in made.items()
    }
    if temperature == 0.0:
        runs["decoder's engine"] = engine_run(target, prompts, batch, options)
    figures = measured(runs, options.rounds)
    plain = ("static round, no drafter", "decoder's engine")
    base = max(figures[name]["tokens_per_s"] for name in plain if name in figures)
    for one in figures.values():
        one["speed_up"] = one["tokens_per_s"] / base
    seen = {
        "chain": figures["chain"].pop("lengths"),
        "tree": figures[f"tree of {options.budgets[-1]}"].pop("lengths"),
    }
    for one in figures.values():
        one.pop("lengths", None)
    return figures, seen


def static_run(generator, prompts, batch, options):
    def run() -> dict:
        tokens = passes = 0
        seconds = 0.0
        lengths: list[int] = []
        for at in range(0, len(prompts) - batch + 1, batch):
            done = generator.generate(prompts[at : at + batch], max_new_tokens=options.tokens)
            tokens += done.statistics.tokens
            passes += done.statistics.passes
            seconds += done.statistics.seconds["rounds"]
            lengths += done.statistics.accepted_lengths.elements()
        return {"tokens_per_s": tokens / seconds, "tau": tokens / passes, "lengths": lengths}

    return run


def engine_run(target, prompts, batch, options):
    """The decoder's own continuous batching: time from the first token of a batch to its last."""
    from trapline.gold.decoder.generate import stream

    def run() -> dict:
        tokens, seconds = 0, 0.0
        for at in range(0, len(prompts) - batch + 1, batch):
            some = prompts[at : at + batch]
            coming = stream(target, some, max_new_tokens=options.tokens, batch=batch)
            for _ in some:
                next(coming)
            started = time.perf_counter()
            tokens += sum(1 for _ in coming)
            seconds += time.perf_counter() - started
        return {"tokens_per_s": tokens / seconds, "tau": 1.0}

    return run


def measured(runs: dict[str, Callable], rounds: int) -> dict[str, dict]:
    """Every contender once for warmth, then all of them in turn; medians of tokens a second."""
    for run in runs.values():
        run()
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
        print(
            f"  {name:26} {one['tokens_per_s']:10.1f} tokens/s   τ {one['tau']:5.2f}"
            f"   {one['speed_up']:5.2f}×   {one['speed_up'] / one['tau']:5.2f} of τ"
        )


# --- 2. the cost of a real model -----------------------------------------------------


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
        wanted = self.trace[self._made % len(self.trace)][:, None]
        # The heaviest node of the wanted depth, or of the deepest there is; its branch is right.
        deepest = torch.where(trees.tokens >= 0, trees.depths[:, 1:], 0).amax(dim=1, keepdim=True)
        goal = torch.minimum(wanted, deepest)
        node = (trees.depths == goal).int().argmax(dim=1)
        branch = trees.seen.gather(1, node[:, None, None].expand(-1, 1, trees.seen.shape[2]))[:, 0]
        # Nobody drafts the last token of the vocabulary: where the branch ends, so does the walk.
        nothing = logits.shape[-1] - 1
        choices = torch.full_like(trees.depths, nothing)
        said = torch.where(branch[:, 1:], trees.tokens, nothing)
        above = torch.where(branch[:, 1:], trees.parents + 1, trees.depths.shape[1])
        wide = torch.cat((choices, choices[:, :1]), dim=1).scatter(1, above, said)
        return wide[:, :-1]


def big_shape(options, lengths) -> list[dict]:
    target, model = random_models(options)
    lengths = lengths or {"chain": geometric(0.75, 15), "tree": geometric(0.85, 15)}
    tables = []
    for batch in options.batches:
        figures = {}
        for name, kind, budget in (
            ("static round, no drafter", None, 0),
            ("chain", "chain", model.config.block - 1),
            *((f"tree of {budget}", "tree", budget) for budget in options.budgets),
        ):
            trace = lengths["chain" if kind == "chain" else "tree"]
            figures[name] = replayed(target, model, kind, budget, batch, trace, options)
        figures["decoder's engine"] = engine_figures(target, batch, options)
        plain = ("static round, no drafter", "decoder's engine")
        base = max(figures[name]["tokens_per_s"] for name in plain)
        for one in figures.values():
            one["speed_up"] = one["tokens_per_s"] / base
            one["speed_up_over_tau"] = one["speed_up"] / one["tau"]
        show(f"{shape_name(options)}, batch {batch}", figures)
        tables.append({"batch": batch, "contenders": figures})
    return tables


def shape_name(options) -> str:
    """A CPU only shows that the benchmark runs."""
    return "toy shape" if options.device == "cpu" else "8B shape"


def random_models(options) -> tuple[Decoder, DFlash]:
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
            model = DFlash(drafter_config(config, layers=5, block=16, mask_id=config.vocab - 1))
    finally:
        torch.set_default_dtype(before)
    for one in (target, model):
        for parameter in one.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        one.eval().requires_grad_(False)
    return target, model


def replayed(target, model, kind, budget, batch, trace, options) -> dict:
    room = min(-(-(PROMPT + options.tokens + budget + 40) // 64) * 64, target.config.context)
    config = StaticConfig(batch, room)
    drafter = None
    if kind is not None:
        drafter = ReplayedDFlash(model, target, batch, room, budget=budget, chain=kind == "chain")
        drafter.profile = typical_draft(model.config.block - 1, target.config.vocab).to(
            target.device
        )
    ReplayedRounds.trace = torch.tensor(shuffled(trace), device=target.device)
    generator = StaticGenerator(target, drafter, config, rounds=ReplayedRounds)
    prompts = [[7] * PROMPT for _ in range(batch)]
    run = static_run(generator, prompts, batch, options)
    run()
    ones = [run() for _ in range(options.rounds)]
    rates = [one["tokens_per_s"] for one in ones]
    return {"tokens_per_s": median(rates), "tau": ones[-1]["tau"], "raw": rates}


def engine_figures(target, batch, options) -> dict:
    run = engine_run(target, [[7] * PROMPT for _ in range(batch)], batch, options)
    run()
    rates = [run()["tokens_per_s"] for _ in range(options.rounds)]
    return {"tokens_per_s": median(rates), "tau": 1.0, "raw": rates}


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, help="folder of a trained pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of results")
    parser.add_argument("--no-shape", action="store_true", help="only the trained pair")
    parser.add_argument("--quick", action="store_true", help="small numbers: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 8, 24, 1
        options.budgets = [16]
    return options


if __name__ == "__main__":
    main()
