"""Speculative decoding against our own graphed autoregressive loop, never an eager one.

    PYTHONPATH=src python benchmarks/bench_dflash.py --pair FOLDER [--device cuda] [--quick]

1. *The trained pair* (made by `scripts/train_dflash_pair.py`) on held-out prompts, batch 1 and 8,
   temperature 0 and 1: chain, trees of several budgets, prompt lookup. Prompts to which plain
   decoding answers by repeating itself are left out: they flatter every drafter. Whole answers are
   timed, prefill excluded, contenders in turn; the figure is committed tokens a second. The
   baseline is the faster of two graphed loops: the decoder's engine and a round without a drafter.
   Beside them what a round costs by parts, from graphs of these parts.
2. *A shape of 8 B parameters with random weights*, so that a pass costs what a real model's does:
   `dflash_shape.py`.
3. *Published results of DFlash and DDTree*, of other models on other machines, beside ours.
4. *In float32*, with `--identical N`: are the ids those of plain decoding for N held-out prompts?

On a GPU rounds are compact (`CompactGenerator`), on a CPU static: a CPU only shows that it runs.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_shape
import harness
import torch
from dflash_rounds import PLAIN, engine_run, generator, measured, parts, show, static_run

from trapline.gold.decoder.model import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding import drafter_checkpoint
from trapline.gold.tree_decoding.drafter_training import repeats

#: From the DDTree paper (arXiv 2604.12989), Qwen3-8B, temperature 0, drafters of block 16: speed-up
#: over autoregressive decoding and τ. Another model on another machine: for orientation only.
PUBLISHED = [
    {"task": "MATH-500", "DFlash": [5.56, 7.79], "DDTree": [7.52, 10.73]},
    {"task": "GSM8K", "DFlash": [4.78, 6.57], "DDTree": [6.75, 9.54]},
    {"task": "HumanEval", "DFlash": [4.84, 6.61], "DDTree": [6.90, 9.67]},
    {"task": "MT-Bench", "DFlash": [2.56, 4.28], "DDTree": [4.10, 6.58]},
    {"task": "Alpaca", "DFlash": [2.07, 3.12], "DDTree": [3.36, 5.09]},
]


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    results: dict[str, Any] = {"published, other models and machines": PUBLISHED}
    traces = None
    if options.pair:
        facts = options.pair / "pair.json"
        results["pair"] = json.loads(facts.read_text()) if facts.is_file() else {}
        try:
            traces = trained_pair(options, results)
        except RangeError as error:
            print(f"the pair is left out: {error}")
    if options.pair and options.identical:
        results["identical in float32"] = identical(options)
        keep(options, results)
    if not options.no_shape:
        name = f"{dflash_shape.shape_name(options)}, random weights, replayed acceptance"
        results[name] = []
        for table in dflash_shape.big_shape(options, traces):
            results[name].append(table)
            keep(options, results)
    print(keep(options, results))


def keep(options, results) -> Path:
    """Written as it goes: a run that is cut off leaves what it has."""
    return harness.write("dflash", options.device, results, folder=options.out)


def trained_pair(options, results) -> dflash_shape.Traces:
    """Fills `results`; the accepted lengths at temperature 0."""
    target, model = load(options, torch.float32 if options.device == "cpu" else torch.bfloat16)
    prompts = held_out_prompts(options, target, model.config.mask_id, results)
    traces = dflash_shape.Traces([], [], model.config.block)
    tables = results["trained pair"] = []
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            figures, seen = one_setting(target, model, prompts, batch, temperature, options)
            tables.append({"batch": batch, "temperature": temperature, "contenders": figures})
            if temperature == 0.0:
                traces.chain.extend(seen["chain"])
                traces.tree.extend(seen["tree"])
            show(f"batch {batch}, temperature {temperature:g}", figures)
            keep(options, results)
    return traces


def load(options, kind):
    target = Decoder.from_pretrained(options.pair).to(options.device, kind).eval()
    target.requires_grad_(False)
    model = drafter_checkpoint.load(options.pair / "drafter", dtype=kind, device=options.device)
    return target, model.requires_grad_(False)


def all_prompts(options, mask_id) -> list[list[int]]:
    """Pieces of the held-out documents that begin with a line, in an order of their own."""
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
    """Prompts to which plain decoding gives an answer that is no loop."""
    prompts = all_prompts(options, mask_id)
    rows = min(32, len(prompts))
    plain = generator(target, None, None, rows, 0.0, options)
    kept: list[list[int]] = []
    looked = 0
    for at in range(0, len(prompts) - rows + 1, rows):
        some = prompts[at : at + rows]
        answers = plain.generate(some, max_new_tokens=options.tokens).tokens
        kept += [p for p, answer in zip(some, answers, strict=True) if not repeats(answer)]
        looked += rows
        if len(kept) >= options.prompts:
            break
    if len(kept) < max(options.batches):
        raise RangeError(f"only {len(kept)} of {looked} answers do not repeat themselves")
    results["prompts"] = {"looked_at": looked, "do_not_repeat": len(kept)}
    print(f"{len(kept)} of {looked} prompts have answers that do not repeat themselves")
    return kept[: options.prompts]


def one_setting(target, model, prompts, batch, temperature, options):
    """All contenders over the same prompts, in turn."""
    depth = model.config.block - 1
    made = {
        PLAIN: generator(target, None, None, batch, temperature, options),
        "prompt lookup": generator(target, model, "lookup", batch, temperature, options, depth),
        "chain": generator(target, model, "chain", batch, temperature, options, depth),
    }
    for budget in options.budgets:
        made[f"tree of {budget}"] = generator(
            target, model, "tree", batch, temperature, options, budget
        )
    runs: dict[str, Callable] = {
        name: static_run(one, prompts, batch, options) for name, one in made.items()
    }
    if temperature == 0.0:
        runs["decoder's engine"] = engine_run(target, prompts, batch, options)
    figures = measured(runs, options.rounds)
    base = max(
        figures[name]["tokens_per_s"] for name in (PLAIN, "decoder's engine") if name in runs
    )
    for name, one in figures.items():
        one["speed_up"] = one["tokens_per_s"] / base
        if name in made and options.device != "cpu" and temperature == 0.0:
            one["microseconds"] = parts(made[name], prompts[:batch], 50)
    best = max(made, key=lambda name: figures[name]["speed_up"] if "tree" in name else 0.0)
    seen = {mode: figures[name]["lengths"] for mode, name in (("chain", "chain"), ("tree", best))}
    for one in figures.values():
        one.pop("lengths", None)
    return figures, seen


def identical(options) -> dict[str, Any]:
    """Greedy ids of chain and tree against plain decoding by the engine, all in float32."""
    from trapline.gold.decoder.generate import generate

    target, model = load(options, torch.float32)
    prompts = all_prompts(options, model.config.mask_id)[: options.identical]
    rows = min(50, len(prompts))
    prompts = prompts[: len(prompts) // rows * rows]
    wanted = generate(target, prompts, max_new_tokens=options.tokens, batch=rows)
    found: dict[str, Any] = {"prompts": len(prompts), "tokens_each": options.tokens}
    for kind, budget in (("chain", model.config.block - 1), ("tree", options.budgets[0])):
        one = generator(target, model, kind, rows, 0.0, options, budget)
        said = [
            answer
            for at in range(0, len(prompts), rows)
            for answer in one.generate(
                prompts[at : at + rows], max_new_tokens=options.tokens
            ).tokens
        ]
        found[kind] = sum(a == b for a, b in zip(said, wanted, strict=True))
        print(f"float32, {kind}: {found[kind]} of {len(prompts)} answers are plain decoding's")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, help="folder of a trained pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 31])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--identical", type=int, default=0, help="prompts to compare in float32")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape-budgets", type=int, nargs="+", default=[8, 15])
    parser.add_argument("--shape-tokens", type=int, default=96, help="of an answer of the 8B shape")
    parser.add_argument("--shape-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of results")
    parser.add_argument("--no-shape", action="store_true", help="only the trained pair")
    parser.add_argument("--quick", action="store_true", help="small numbers: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 8, 24, 1
        options.budgets, options.prompt = [16], 32
        options.shape_budgets, options.shape_tokens, options.shape_rounds = [16], 24, 1
    return options


if __name__ == "__main__":
    main()
