"""Speculative decoding through `Decoder.generate` against our graphed autoregressive loops.

    PYTHONPATH=src python benchmarks/bench_dflash.py --pair FOLDER [--device cuda] [--quick]

1. *The trained pair* (made by `scripts/train_dflash_pair.py`) on held-out prompts, batch 1 and 8,
   temperature 0 and 1: chain, trees of several budgets, prompt lookup. Prompts that plain decoding
   answers by repeating itself are left out, since they flatter every drafter. Whole answers are
   timed through `Decoder.generate(speculate=…)`, prefill excluded, contenders in turn; the figure
   is committed tokens per second. The baseline is the faster of two graphed loops: the decoder's
   engine and rounds without a drafter. The cost of a round is shown by parts.
2. *A shape of 8 B parameters with random weights*, so that a pass costs what a real model's does:
   `dflash_shape.py`. It needs a GPU.
3. *Published results of DFlash and DDTree*, of other models on other machines, beside ours.
4. *In float32*, with `--identical N`: do N held-out prompts get the ids of plain decoding?

On a CPU the readable loop serves; it only shows that the benchmark runs.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_shape
import harness
import torch
from dflash_rounds import (
    PLAIN,
    engine_run,
    measured,
    parts,
    plain_rounds,
    rounds_run,
    show,
    speculation,
    speculative_run,
)

from trapline.gold.decoder.api import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding import checkpoint
from trapline.gold.tree_decoding.training import repeats

#: From the DDTree paper (arXiv 2604.12989), Qwen3-8B, temperature 0, drafters of block 16: speed-up
#: over autoregressive decoding and τ. Another model on another machine: for orientation only.
PUBLISHED = [
    {"task": "MATH-500", "DFlash": [5.56, 7.79], "DDTree": [7.52, 10.73]},
    {"task": "GSM8K", "DFlash": [4.78, 6.57], "DDTree": [6.75, 9.54]},
    {"task": "HumanEval", "DFlash": [4.84, 6.61], "DDTree": [6.90, 9.67]},
    {"task": "MT-Bench", "DFlash": [2.56, 4.28], "DDTree": [4.10, 6.58]},
    {"task": "Alpaca", "DFlash": [2.07, 3.12], "DDTree": [3.36, 5.09]},
]
#: Batches are measured on this many times the prompts of a single row.
MORE = 4
#: Contenders whose pass has more lines than this are left out.
MOST_LINES = 512


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    results: dict[str, Any] = {"published, other models and machines": PUBLISHED}
    results["seconds of each part"] = {}
    clock = Clock(options, results)
    pair = None
    if options.pair and {"greedy", "sampled"} & set(options.parts):
        facts = options.pair / "pair.json"
        results["pair"] = json.loads(facts.read_text()) if facts.is_file() else {}
        try:
            pair = Pair(options, results)
            clock.done("prompts")
        except RangeError as error:
            print(f"the pair is left out: {error}")
    if pair and "greedy" in options.parts:
        pair.measure(0.0, clock)
    if "shape" in options.parts and options.device != "cpu":
        name = "8B shape, random weights, replayed acceptance"
        results[name] = []
        for table in dflash_shape.big_shape(options, pair.traces() if pair else None):
            results[name].append(table)
            clock.done(f"shape, batch {table['batch']}")
    if pair and "sampled" in options.parts:
        pair.measure(1.0, clock)
    if options.pair and options.identical:
        results["identical in float32"] = identical(options)
        clock.done("identical")
    print(clock.keep())


class Clock:
    """Writes results as they come, with their seconds, so that an aborted run keeps its results."""

    def __init__(self, options, results) -> None:
        self._options, self._results, self._started = options, results, time.perf_counter()

    def done(self, part: str) -> None:
        now = time.perf_counter()
        self._results["seconds of each part"][part] = round(now - self._started, 1)
        self._started = now
        self.keep()

    def keep(self) -> Path:
        options = self._options
        return harness.write("dflash", options.device, self._results, folder=options.out)


class Pair:
    """A trained pair and the prompts it is measured on."""

    def __init__(self, options, results) -> None:
        self._options, self._tables = options, results.setdefault("trained pair", [])
        kind = torch.float32 if options.device == "cpu" else torch.bfloat16
        self._target, self._model = load(options, kind)
        mask_id = self._model.config.mask_id
        self._prompts = held_out_prompts(options, self._target, mask_id, results)
        self._lengths: dict[str, list[int]] = {}

    def measure(self, temperature: float, clock: Clock) -> None:
        """A table per batch size. A single row gets a part of the prompts, since it is slow."""
        for batch in self._options.batches:
            prompts = self._prompts[: self._options.prompts if batch == 1 else None]
            figures = one_setting(
                self._target, self._model, prompts, batch, temperature, self._options
            )
            for name, one in figures.items():
                lengths = one.pop("lengths", [])
                if temperature == 0.0:
                    self._lengths.setdefault(name, []).extend(lengths)
            table = {"batch": batch, "temperature": temperature, "prompts": len(prompts)}
            self._tables.append({**table, "contenders": figures})
            show(f"batch {batch}, temperature {temperature:g}", figures)
            clock.done(f"batch {batch}, temperature {temperature:g}")

    def traces(self) -> dflash_shape.Traces | None:
        """Accepted lengths at temperature 0, if that was measured."""
        if not self._lengths:
            return None
        return dflash_shape.Traces(self._lengths, self._model.config.block)


def load(options, kind):
    target = Decoder.from_pretrained(options.pair).to(options.device, kind).eval()
    target.requires_grad_(False)
    model = checkpoint.load(options.pair / "drafter", dtype=kind, device=options.device)
    return target, model.requires_grad_(False)


def all_prompts(options, mask_id) -> list[list[int]]:
    """Pieces of the held-out documents that begin with a line, shuffled."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.pair / "tokenizer.json"))
    text = (options.pair / "held_out.txt").read_text(encoding="utf-8")
    width, luck, pieces = options.prompt, random.Random(0), []
    wanted = max(32 * options.prompts, 2 * options.identical)
    for document in text.split("\f"):
        for _ in range(int(2 * wanted * len(document) / len(text) + luck.random())):
            at = luck.randrange(max(1, len(document) - 8 * width))
            begin = document.find("\n", at) + 1
            pieces.append(document[begin : begin + 8 * width])
    luck.shuffle(pieces)
    some = [one.ids[:width] for one in tokenizer.encode_batch(pieces[:wanted])]
    usable = (tuple(ids) for ids in some if len(ids) == width and mask_id not in ids)
    return [list(ids) for ids in dict.fromkeys(usable)]


def held_out_prompts(options, target, mask_id, results) -> list[list[int]]:
    """Prompts that plain decoding answers without repeating itself."""
    prompts = all_prompts(options, mask_id)
    rows = min(32, len(prompts))
    kept: list[list[int]] = []
    looked = 0
    for at in range(0, len(prompts) - rows + 1, rows):
        some = prompts[at : at + rows]
        answers = target.generate(some, max_new_tokens=options.tokens, stop_ids=[], batch=rows)
        kept += [
            prompt
            for prompt, answer in zip(some, answers, strict=True)
            if options.quick or not repeats(answer.tokens)
        ]
        looked += rows
        if len(kept) >= MORE * options.prompts:
            break
    if len(kept) < max(options.batches):
        raise RangeError(f"only {len(kept)} of {looked} answers do not repeat themselves")
    results["prompts"] = {"looked_at": looked, "do_not_repeat": len(kept)}
    print(f"{len(kept)} of {looked} prompts have answers that do not repeat themselves")
    return kept[: MORE * options.prompts]


def one_setting(target, model, prompts, batch, temperature, options):
    """All contenders over the same prompts, in turn."""
    depth = model.config.block - 1
    drafted = {"prompt lookup": ("lookup", depth), "chain": ("chain", depth)}
    for budget in options.budgets:
        if batch * (budget + 1) <= MOST_LINES:
            drafted[f"tree of {budget}"] = ("tree", budget)
    made = {name: speculation(model, *how) for name, how in drafted.items()}
    runs: dict[str, Callable] = {
        name: speculative_run(target, one, prompts, batch, temperature, options)
        for name, one in made.items()
    }
    plain = None
    if options.device != "cpu":
        plain = plain_rounds(target, batch, options, sampled=temperature > 0.0)
        runs[PLAIN] = rounds_run(plain, prompts, batch, temperature, options.tokens)
    figures = measured(runs, options.rounds)
    if temperature == 0.0 or plain is None:
        try:
            engine = engine_run(target, prompts[: 4 * batch], batch, options)
            engine(1)
            figures["decoder's engine"] = engine()
        except Exception as error:  # a peer that fails is left out, with a message
            print(f"the decoder's engine is left out: {error}")
    bases = [name for name in (PLAIN, "decoder's engine") if name in figures]
    base = max(figures[name]["tokens_per_s"] for name in bases)
    for name, one in figures.items():
        one["speed_up"] = one["tokens_per_s"] / base
        if plain is not None and temperature == 0.0 and name != "decoder's engine":
            rounds = plain if name == PLAIN else next(iter(made[name].captured.values()))
            one["microseconds"] = parts(rounds, prompts[:batch], 50)
    return figures


def identical(options) -> dict[str, Any]:
    """Greedy ids of chain and tree against plain decoding by the engine, in float32."""
    from trapline.gold.decoder.generate import generate

    target, model = load(options, torch.float32)
    prompts = all_prompts(options, model.config.mask_id)[: options.identical]
    rows = min(50, len(prompts))
    prompts = prompts[: len(prompts) // rows * rows]
    wanted = generate(target, prompts, max_new_tokens=options.tokens, batch=rows)
    found: dict[str, Any] = {"prompts": len(prompts), "tokens_each": options.tokens}
    for kind, budget in (("chain", model.config.block - 1), ("tree", options.budgets[0])):
        said = target.generate(
            prompts,
            max_new_tokens=options.tokens,
            speculate=speculation(model, kind, budget),
            stop_ids=[],
            batch=rows,
        )
        found[kind] = sum(a.tokens == b for a, b in zip(said, wanted, strict=True))
        print(f"float32, {kind}: {found[kind]} of {len(prompts)} answers equal plain decoding")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, help="folder of a trained pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 31])
    parser.add_argument("--prompts", type=int, default=16, help="for one row; batches get 4 times")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--identical", type=int, default=0, help="prompts to compare in float32")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape-budgets", type=int, nargs="+", default=[15])
    parser.add_argument("--shape-tokens", type=int, default=96, help="of an answer of the 8B shape")
    parser.add_argument("--shape-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of results")
    every = ["greedy", "shape", "sampled"]
    parser.add_argument("--parts", nargs="*", choices=every, default=every, help="what to measure")
    parser.add_argument("--quick", action="store_true", help="small numbers: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 8, 24, 1
        options.budgets, options.prompt = [16], 32
        options.shape_budgets, options.shape_tokens, options.shape_rounds = [16], 24, 1
    return options


if __name__ == "__main__":
    main()
