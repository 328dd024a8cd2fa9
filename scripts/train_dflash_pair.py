"""Makes a small target and its DFlash drafter from scratch: text, tokeniser, both models, a check.

    python scripts/train_dflash_pair.py --out pair --size tiny                  # minutes on a CPU
    python scripts/train_dflash_pair.py --out pair --size small --device cuda \\
        --installed torch transformers sympy numpy                              # at most 30 M each

The text is Python source: the standard library of the Python that runs this; with
`--installed torch sympy …`, the modules of packages that are installed beside it; with
`--packages django …`, those of wheels that pip downloads. `--corpus FILE` takes a text that was
collected before (documents parted by form feeds). Names, versions and licences of the packages are
written down. A tenth of the documents is held out; prompts for the check at the end are cut from
it.

`--seconds TARGET DRAFTER` trains by the clock instead of by steps, for a machine whose speed is not
known: the rates fall to their ends when the time is over. With `--until SECONDS` the drafter has
what is left then, counted from the start.

The folder gets `corpus.txt`, `held_out.txt`, the target as a Hugging Face checkpoint with its
tokeniser, `answers.npz` with what it said, `drafter/`, and `pair.json` with all settings and what
was measured. `--again` makes another drafter for the folder's target, and goes on from the
folder's drafter with `--continue`.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from dflash_pair_sizes import SIZES, Size
from dflash_pair_text import collect, pieces_of, some_of

from trapline.gold.decoder.api import Decoder
from trapline.gold.ternary.training.data import cut, read_documents, split_documents
from trapline.gold.ternary.training.model import decoder_config, initialise
from trapline.gold.ternary.training.tokenizer import encode, load_tokenizer, train_tokenizer
from trapline.gold.ternary.training.trainer import DecoderLM, Recipe, Shape, Trainer
from trapline.gold.tree_decoding import checkpoint
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.drafter import DFlashDrafter, drafter_config
from trapline.gold.tree_decoding.generate import generate
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup
from trapline.gold.tree_decoding.training import (
    Text,
    TrainingConfig,
    before_loops,
    fresh,
    regenerate_in_bulk,
    train,
)

#: Tokens that no text has; the last one is the drafter's mask.
SPARE = 1
#: How much of the held-out text judges the target while it learns.
HELD_OUT_WINDOWS = 256
#: Steps of a run by the clock before anything is measured.
WARM_STEPS = 10
#: Million characters from which the tokeniser is made: more changes little and takes long.
TOKENIZER_MEGABYTES = 12.0
#: Seconds after which a drafter in training is written down: a run that is cut off leaves one.
KEEP_EVERY = 30.0
#: Tokens of an answer that, said again, are a loop; and how much of an answer must come before it.
LOOP, BEFORE_LOOP = 16, 0.3
#: Million characters from which prompts are cut for a target that is there.
PROMPT_MEGABYTES = 20.0


def main() -> None:
    options = arguments()
    options.started = started = time.perf_counter()
    size = chosen_size(options)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    sources: list[dict] = []
    corpus = options.corpus or collect(out / "corpus.txt", options, size.megabytes, sources)
    split = split_documents(read_documents([corpus]), 0.1)
    (out / "held_out.txt").write_text("\f".join(split.valid), encoding="utf-8")
    if options.again:
        tokenizer = load_tokenizer(out)
    else:
        tokenizer = train_tokenizer(some_of(split.train, TOKENIZER_MEGABYTES), size.vocab - SPARE)
        tokenizer.save(str(out / "tokenizer.json"))
    say(f"text and tokeniser after {time.perf_counter() - started:.0f} s")
    # A target that is there needs text for prompts only.
    learned = some_of(split.train, PROMPT_MEGABYTES) if options.again else split.train
    train_windows, valid_windows = (
        cut(encode(tokenizer, side), size.window) for side in (learned, split.valid)
    )
    target, target_facts = the_target(size, train_windows, valid_windows, options)
    model, drafter_facts = make_drafter(target, size, train_windows, options)
    checkpoint.save(model, out / "drafter", dtype=target.norm.weight.dtype)
    facts = {
        "sources": sources,
        "size": asdict(size),
        "target": target_facts,
        "drafter": drafter_facts,
        "seconds": time.perf_counter() - started,
    }
    (out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")
    if options.check:
        held_out = pieces_of(valid_windows, options.check, size.prompt, options.seed + 2)
        model = checkpoint.load(out / "drafter", device=options.device)
        facts["held_out"] = check(target.float(), model, held_out, size)
        (out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")


def chosen_size(options) -> Size:
    """The size that was named, with what was asked for in its place."""
    other = {name: value for name, value in vars(options).items() if name in OVER and value}
    return replace(SIZES[options.size], **other)


#: What of a size can be said on the command line.
OVER = ("vocab", "layers", "steps", "prompts", "drafter_layers", "drafter_rate", "soft", "rate")


def the_target(
    size: Size, train_windows: np.ndarray, valid: np.ndarray, options
) -> tuple[Decoder, dict]:
    """The folder's target, or a new one that is then the folder's."""
    facts_file = options.out / "target.json"
    if options.again:
        kept = Decoder.from_pretrained(options.out, device=options.device)
        return kept.eval().requires_grad_(False), json.loads(facts_file.read_text())
    target, facts = make_target(size, train_windows, valid, options)
    # What runs on a GPU is what is kept, taught from and measured: 16 bits.
    target = target.bfloat16() if options.device.startswith("cuda") else target
    target.save_pretrained(options.out)
    facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    return target, facts


def make_target(size: Size, text: np.ndarray, valid: np.ndarray, options) -> tuple[Decoder, dict]:
    """A dense decoder, trained as `trapline train --dense --optimiser muon` trains one."""
    on_gpu = options.device.startswith("cuda")
    shape = Shape(size.vocab, size.dim, size.layers, size.heads, size.window)
    decoder = Decoder(decoder_config(shape, kv_heads=size.kv_heads, hidden=size.hidden))
    initialise(decoder, options.seed)
    recipe = Recipe(
        steps=size.steps,
        batch=size.batch,
        optimiser="muon",
        peak_rate=size.rate,
        final_rate=size.rate / 100,
        schedule="linear",
        warm_up=max(1, size.steps // 25),
        weight_decay=0.05,
        evaluate_every=max(1, size.steps // 10),
        seed=options.seed,
        precision="bf16" if on_gpu else "fp32",
        compile=on_gpu and not options.eager,
        capture=on_gpu and not options.eager,
        patience=None,
    )
    trainer = Trainer(
        DecoderLM(decoder),
        recipe,
        text,
        valid[:HELD_OUT_WINDOWS],
        device=options.device,
    )
    say(f"target: {text.size / 1e6:.1f} million tokens")
    started = time.perf_counter()
    best = train_target(trainer, options.seconds[0] if options.seconds else None)
    facts = {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "seconds": time.perf_counter() - started,
        "steps": trainer.progress.step,
        "tokens": trainer.progress.step * trainer.tokens_a_step,
        "tokens_of_text": int(text.size),
        "held_out_loss": trainer.progress.best_loss,
        "skipped": trainer.progress.skipped,
    }
    return lengthened(best.decoder, size.context).eval().requires_grad_(False), facts


def train_target(trainer: Trainer, seconds: float | None) -> DecoderLM:
    """All steps of the recipe, or as many as fit: then the recipe's end follows the clock."""

    def report(row) -> None:
        gone = time.perf_counter() - started
        say(f"target: step {row.step}, {gone:.0f} s, held-out loss {row.valid_loss:.3f}")

    started = time.perf_counter()
    if seconds is None:
        return trainer.run(report)
    trainer.run(report, stop_at=WARM_STEPS)  # compiles, so its speed is not measured
    recipe, before, begun = trainer.recipe, trainer.progress.step, time.perf_counter()
    while (gone := time.perf_counter() - started) < seconds:
        made = trainer.progress.step - before
        a_step = (time.perf_counter() - begun) / made if made else seconds / recipe.steps
        left = max(1, int((seconds - gone) / a_step))
        trainer.recipe = replace(recipe, steps=trainer.progress.step + left)
        trainer.run(report, stop_at=trainer.progress.step + max(1, min(50, left // 2)))
    trainer.recipe = replace(recipe, steps=trainer.progress.step + 1)
    return trainer.run(report)  # the last step is always judged


def lengthened(decoder: Decoder, context: int) -> Decoder:
    """The same weights with room for longer texts than it was trained on."""
    longer = Decoder(replace(decoder.config, context=context))
    longer.load_state_dict(decoder.state_dict())
    return longer.to(decoder.device)


def make_drafter(target: Decoder, size: Size, windows: np.ndarray, options):
    texts, facts = answers(target, size, windows, options)
    started = time.perf_counter()
    how = TrainingConfig(
        steps=size.drafter_steps,
        batch=size.drafter_batch,
        anchors=size.anchors,
        learning_rate=size.drafter_rate,
        optimiser="muon",
        decay=7.0 if size.block >= 16 else 4.0,
        soft=size.soft,
        seed=options.seed,
        seconds=seconds_left(options),
        compile=not options.eager,
        capture=not options.eager,
        look=max(1, size.drafter_steps // 200),
    )
    model = first_drafter(target, size, options)

    kept = started

    def report(step, loss):
        nonlocal kept
        gone = time.perf_counter() - started
        if step // how.look % 5 == 0:
            say(f"drafter: step {step} of {how.steps}, {gone:.0f} s, loss {loss:.3f}")
        if time.perf_counter() - kept > KEEP_EVERY:
            checkpoint.save(model, options.out / "drafter", dtype=target.norm.weight.dtype)
            kept = time.perf_counter()

    losses = train(model, target, texts, how, report)
    facts |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.perf_counter() - started,
        "steps": len(losses) * how.look,
        "loss": sum(losses[-5:]) / len(losses[-5:]),
        "losses": [round(loss, 3) for loss in losses],
    }
    return model, facts


def seconds_left(options) -> float | None:
    if options.until is not None:
        return max(1.0, options.until - (time.perf_counter() - options.started))
    return options.seconds[1] if options.seconds else None


def first_drafter(target: Decoder, size: Size, options):
    """Untrained, or the folder's."""
    if options.go_on:
        return checkpoint.load(options.out / "drafter", device=options.device)
    shape = drafter_config(
        target.config,
        layers=size.drafter_layers,
        block=size.block,
        mask_id=size.vocab - 1,
        seen=size.seen,
        hidden=size.drafter_hidden,
    )
    return fresh(shape, options.seed).to(options.device)


def answers(target: Decoder, size: Size, windows: np.ndarray, options) -> tuple[list[Text], dict]:
    """What the target says to pieces of the text, up to where it begins to repeat itself."""
    started = time.perf_counter()
    file = options.out / "answers.npz"
    if options.same_answers:
        kept = np.load(file)
        said = [Text(tokens, size.prompt) for tokens in kept["tokens"].tolist()]
    else:
        said = regenerate_in_bulk(
            target,
            pieces_of(windows, size.prompts, size.prompt, options.seed + 1),
            max_new_tokens=size.answer,
            temperatures=options.temperatures,
            seed=options.seed,
            batch=4096 if options.device.startswith("cuda") else 64,
        )
        np.savez(file, tokens=np.array([one.tokens for one in said], dtype=np.uint16))
    answered = time.perf_counter() - started
    cut_off = [before_loops(text, LOOP) for text in said]
    loops = sum(a != b for a, b in zip(said, cut_off, strict=True))
    least = size.prompt + BEFORE_LOOP * size.answer
    texts = [text for text in cut_off if len(text.tokens) >= least]
    whole, kept_tokens = (
        sum(len(text.tokens) - text.start for text in side) for side in (said, texts)
    )
    say(f"{len(said)} answers in {answered:.0f} s, {loops} end in a loop;")
    say(f"{kept_tokens} of {whole} tokens, in {len(texts)} answers, are learned from")
    facts = {
        "answers": len(said),
        "answers_that_loop": loops,
        "answers_learned_from": len(texts),
        "tokens": whole,
        "tokens_learned_from": kept_tokens,
        "seconds_answering": answered,
    }
    return texts, facts


def check(target, model, prompts, size) -> dict:
    """Tokens a pass on held-out prompts, greedy and sampled, and whether all agree."""
    from trapline.gold.decoder.sampling import Sampling

    drafter = DFlashDrafter(model, target)
    lookup = PromptLookup(target.config.vocab, block=size.block - 1, device=target.device)
    facts = {}
    for temperature in (0.0, 1.0):
        answers = []
        for name, who, mode in (
            ("lookup", lookup, "chain"),
            ("chain", drafter, "chain"),
            ("tree", drafter, "tree"),
        ):
            done = generate(
                DecoderTarget(target, who.target_layers),
                who,
                prompts,
                max_new_tokens=size.answer,
                sampling=[Sampling(temperature=temperature, seed=i) for i in range(len(prompts))],
                mode=mode,
                budget=64,
            )
            answers.append(done.tokens)
            facts[f"{name} at {temperature:g}"] = done.statistics.as_dict()
            say(f"temperature {temperature:g}, {name}: {done.statistics.tau:.2f} tokens a pass")
        facts[f"same answers at {temperature:g}"] = all(one == answers[0] for one in answers)
    return facts


def say(sentence: str) -> None:
    print(sentence, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--packages", nargs="*", default=[], help="wheels to take source from")
    parser.add_argument("--installed", nargs="*", default=[], help="installed packages likewise")
    parser.add_argument("--corpus", type=Path, help="a text collected before")
    parser.add_argument("--vocab", type=int, help="tokens, if not the size's; the same below")
    parser.add_argument("--layers", type=int, help="of the target")
    parser.add_argument("--steps", type=int, help="of the target's training")
    parser.add_argument("--rate", type=float, help="of the target's training")
    parser.add_argument("--prompts", type=int, help="that the target answers")
    parser.add_argument("--drafter-layers", type=int)
    parser.add_argument("--drafter-rate", type=float)
    parser.add_argument("--soft", type=float, help="share of the target's whole law in the loss")
    parser.add_argument(
        "--seconds", type=float, nargs=2, metavar=("TARGET", "DRAFTER"), help="train by the clock"
    )
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.0, 1.0],
        help="of the answers that the drafter learns from, equally many of each",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="keep the folder's target and tokeniser, make another drafter",
    )
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="train the folder's drafter on"
    )
    parser.add_argument(
        "--same-answers", action="store_true", help="learn from the folder's answers.npz"
    )
    parser.add_argument("--until", type=float, help="seconds from the start to a trained drafter")
    parser.add_argument(
        "--eager", action="store_true", help="no torch.compile and no graphs on a GPU"
    )
    parser.add_argument("--check", type=int, default=32, help="held-out prompts to check with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
