"""Trains a drafter for a checkpoint: `python -m trapline.gold.tree_decoding.train --help`.

    python -m trapline.gold.tree_decoding.train --target ./model --text ./prompts --out ./drafter

The target answers prompts taken from the text, and the drafter learns from these answers. A tiny
model takes less than a minute on a CPU, one of 30 M parameters some minutes on one GPU.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after printing one sentence about the error."""
    options = _parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Loads the target, generates answers, trains, saves; prints its progress."""
    from trapline.gold.decoder.api import Decoder
    from trapline.gold.tree_decoding import checkpoint, training
    from trapline.gold.tree_decoding.drafter import drafter_config

    target = Decoder.from_pretrained(options.target).float().to(options.device).eval()
    shape = drafter_config(
        target.config,
        layers=options.layers,
        block=options.block,
        mask_id=target.config.vocab - 1 if options.mask_id is None else options.mask_id,
    )
    how = training.TrainingConfig(
        steps=options.steps,
        batch=options.batch,
        anchors=options.anchors,
        learning_rate=options.learning_rate,
        decay=options.decay,
        seed=options.seed,
    )
    prompts = _prompts(options, shape.mask_id)
    started = time.perf_counter()
    texts = training.regenerate(
        target,
        prompts,
        max_new_tokens=options.answer,
        temperatures=options.temperature,
        seed=options.seed,
    )
    said = sum(len(text.tokens) - text.start for text in texts)
    _say(f"the target generated {said} tokens in {time.perf_counter() - started:.1f} s")
    model = training.fresh(shape, options.seed).to(options.device)
    losses = training.train(model, target, texts, how, _progress(how.steps))
    checkpoint.save(model, options.out)
    seconds = time.perf_counter() - started
    _say(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, {seconds:.1f} s in all; saved in {options.out}")


def _prompts(options: argparse.Namespace, mask_id: int) -> list[list[int]]:
    """The first `--prompt` tokens of each document of the text."""
    from trapline.gold.errors import RangeError
    from trapline.gold.ternary.training.data import read_documents

    file = options.target / "tokenizer.json"
    if not file.is_file():
        raise RangeError(f"{options.target} has no tokenizer.json; --target must be a checkpoint")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    prompts = []
    for document in read_documents(options.text):
        ids = tokenizer.encode(document).ids[: options.prompt]
        if ids and mask_id not in ids:
            prompts.append(ids)
        if len(prompts) == options.prompts:
            break
    if not prompts:
        names = ", ".join(map(str, options.text))
        raise RangeError(
            f"no document of {names} gives a prompt without the mask id {mask_id}; "
            "give more text or another --mask-id"
        )
    return prompts


def _progress(steps: int) -> Any:
    def report(step: int, loss: float) -> None:
        if (step + 1) % max(1, steps // 10) == 0:
            _say(f"step {step + 1} of {steps}, loss {loss:.3f}")

    return report


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trapline.gold.tree_decoding.train", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="checkpoint folder, with tokenizer.json")
    add("--text", type=Path, nargs="+", required=True, help="text files or folders for prompts")
    add("--out", type=Path, required=True, help="folder for the drafter")
    add("--layers", type=int, default=2, help="layers of the drafter")
    add("--block", type=int, default=8, help="slots of a block, the anchor included")
    add("--mask-id", type=int, default=None, help="a token that no prompt has; default: the last")
    add("--prompts", type=int, default=256, help="number of answers to learn from")
    add("--prompt", type=int, default=16, help="tokens of a prompt")
    add("--answer", type=int, default=64, help="tokens of an answer")
    add("--temperature", type=float, nargs="+", default=[0.0], help="of the answers, in turn")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=8, help="texts per step")
    add("--anchors", type=int, default=16, help="blocks per text")
    add("--learning-rate", type=float, default=6e-4)
    add("--decay", type=float, default=4.0, help="γ: slot k has the weight exp(−(k − 1)/γ)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu or cuda")
    return parser


if __name__ == "__main__":
    sys.exit(main())
