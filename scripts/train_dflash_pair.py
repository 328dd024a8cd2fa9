"""Makes a small target and its DFlash drafter from scratch: text, tokeniser, both models, a check.

    python scripts/train_dflash_pair.py --out pair --size tiny                  # minutes on a CPU
    python scripts/train_dflash_pair.py --out pair --size small --device cuda   # at most 30 M each

The text is Python source: the standard library of the Python that runs this, and, with
`--packages django sympy …`, the modules of wheels that pip downloads. `--corpus FILE` takes a text
that was collected before (documents parted by form feeds), for machines without a network. A tenth
of the documents is held out; prompts for the check at the end are cut from it.

The folder gets `corpus.txt`, `held_out.txt`, the target as a Hugging Face checkpoint with its
tokeniser, `drafter/`, and `pair.json` with all settings and what was measured.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from trapline.gold.decoder.model import Decoder
from trapline.gold.ternary.data import Split, cut, read_documents, split_documents
from trapline.gold.ternary.tokenizer import encode, train_tokenizer
from trapline.gold.ternary.train import DecoderLM, Recipe, Shape, Trainer
from trapline.gold.ternary.train_model import decoder_config, initialise
from trapline.gold.tree_decoding import drafter_checkpoint
from trapline.gold.tree_decoding.drafter import DFlashDrafter, drafter_config
from trapline.gold.tree_decoding.drafter_lookup import PromptLookup
from trapline.gold.tree_decoding.drafter_training import TrainingConfig, fresh, regenerate, train
from trapline.gold.tree_decoding.generate import generate
from trapline.gold.tree_decoding.generate_decoder import DecoderTarget

#: Tokens that no text has; the last one is the drafter's mask.
SPARE = 1
#: How much of the held-out text judges the target while it learns.
HELD_OUT_WINDOWS = 256


@dataclass(frozen=True)
class Size:
    """Shapes and lengths of training."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    window: int
    steps: int
    batch: int
    rate: float
    megabytes: float
    drafter_layers: int
    block: int
    prompts: int
    answer: int
    drafter_steps: int
    drafter_batch: int
    anchors: int


SIZES = {
    # Learns nothing: shows in seconds that everything fits together.
    "toy": Size(300, 32, 2, 4, 2, 48, 256, 32, 4, 4, 0.05, 0.05, 1, 6, 12, 12, 4, 4, 8),
    "tiny": Size(512, 96, 3, 4, 2, 256, 256, 64, 500, 8, 0.05, 0.4, 2, 8, 192, 48, 300, 8, 16),
    "small": Size(
        8192, 512, 8, 8, 4, 1408, 1024, 512, 6000, 48, 0.03, 60.0, 4, 16, 8192, 192, 4000, 32, 64
    ),
}


def main() -> None:
    options = arguments()
    size = SIZES[options.size]
    if options.steps is not None:
        size = Size(**{**asdict(size), "steps": options.steps})
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    corpus = options.corpus or collect(out / "corpus.txt", options.packages, size.megabytes)
    split = split_documents(read_documents([corpus]), 0.1)
    (out / "held_out.txt").write_text("\f".join(split.valid), encoding="utf-8")
    tokenizer = train_tokenizer(split.train, size.vocab - SPARE)
    tokenizer.save(str(out / "tokenizer.json"))
    target, target_facts = make_target(size, split, tokenizer, options)
    target.save_pretrained(out)
    model, drafter_facts = make_drafter(
        target, size, prompts_of(tokenizer, split.train, size), options
    )
    drafter_checkpoint.save(model, out / "drafter")
    held_out = prompts_of(tokenizer, split.valid, size)[: options.check]
    facts = {
        "size": asdict(size),
        "target": target_facts,
        "drafter": drafter_facts,
        "held_out": check(target, model, held_out, size),
    }
    (out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")


def collect(path: Path, packages: list[str], megabytes: float) -> Path:
    """Python source: modules of the packages first, then the standard library, up to a size."""
    documents = [text for package in packages for text in wheel_sources(package)]
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            documents.append(file.read_text(encoding="utf-8", errors="replace"))
    kept, total = [], 0
    for document in (one.replace("\f", "\n").strip() for one in documents):
        if document and total < megabytes * 1e6:
            kept.append(document)
            total += len(document)
    path.write_text("\f".join(kept), encoding="utf-8")
    say(f"{len(kept)} documents, {total / 1e6:.1f} million characters")
    return path


def wheel_sources(package: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, folder, "--only-binary", ":all:", package], check=True)
        texts = []
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in sorted(archive.namelist()) if name.endswith(".py")]
                texts += [archive.read(name).decode("utf-8", "replace") for name in names]
        return texts


def make_target(size: Size, split: Split, tokenizer, options) -> tuple[Decoder, dict]:
    """A dense decoder, trained as `trapline train --dense` trains one."""
    on_gpu = options.device.startswith("cuda")
    shape = Shape(size.vocab, size.dim, size.layers, size.heads, size.window)
    decoder = Decoder(decoder_config(shape, kv_heads=size.kv_heads, hidden=size.hidden))
    initialise(decoder, options.seed)
    recipe = Recipe(
        steps=size.steps,
        batch=size.batch,
        peak_rate=size.rate,
        final_rate=size.rate / 10,
        warm_up=max(1, size.steps // 25),
        weight_decay=0.05,
        evaluate_every=max(1, size.steps // 10),
        seed=options.seed,
        precision="bf16" if on_gpu else "fp32",
        compile=on_gpu,
    )
    train, valid = (cut(encode(tokenizer, side), size.window) for side in split)
    trainer = Trainer(
        DecoderLM(decoder), recipe, train, valid[:HELD_OUT_WINDOWS], device=options.device
    )
    started = time.perf_counter()
    best = trainer.run(
        lambda row: say(f"target: step {row.step}, held-out loss {row.valid_loss:.3f}")
    )
    facts = {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "seconds": time.perf_counter() - started,
        "held_out_loss": trainer.progress.best_loss,
    }
    return lengthened(best.decoder, size.context).eval().requires_grad_(False), facts


def lengthened(decoder: Decoder, context: int) -> Decoder:
    """The same weights with room for longer texts than it was trained on."""
    longer = Decoder(replace(decoder.config, context=context))
    longer.load_state_dict(decoder.state_dict())
    return longer.to(decoder.device)


def prompts_of(tokenizer, documents, size) -> list[list[int]]:
    """Pieces of 32 tokens from all over the documents, the same every time."""
    prompts = []
    for document in documents:
        ids = tokenizer.encode(document).ids
        step = max(64, len(ids) * len(documents) // (2 * size.prompts))
        prompts += [ids[at : at + 32] for at in range(0, max(1, len(ids) - 32), step)]
    order = np.random.default_rng(0).permutation(len(prompts))
    return [prompts[i] for i in order if len(prompts[i]) == 32]


def make_drafter(target, size, prompts, options):
    started = time.perf_counter()
    texts = regenerate(
        target,
        prompts[: size.prompts],
        max_new_tokens=size.answer,
        temperatures=(0.0, 1.0),
        seed=options.seed,
        batch=256 if options.device == "cuda" else 64,
    )
    seconds = time.perf_counter() - started
    say(f"drafter: the target answered {len(texts)} prompts in {seconds:.0f} s")
    shape = drafter_config(
        target.config, layers=size.drafter_layers, block=size.block, mask_id=size.vocab - 1
    )
    how = TrainingConfig(
        steps=size.drafter_steps,
        batch=size.drafter_batch,
        anchors=size.anchors,
        learning_rate=2e-3 if size.dim < 256 else 1e-3,
        decay=7.0 if size.block >= 16 else 4.0,
        seed=options.seed,
    )
    model = fresh(shape, options.seed).to(options.device)

    def report(step, loss):
        if (step + 1) % max(1, how.steps // 10) == 0:
            say(f"drafter: step {step + 1} of {how.steps}, loss {loss:.3f}")

    losses = train(model, target, texts, how, report)
    count = sum(parameter.numel() for parameter in model.parameters())
    facts = {"parameters": count, "seconds": time.perf_counter() - started, "loss": losses[-1]}
    return model, facts


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
    parser.add_argument("--corpus", type=Path, help="a text collected before")
    parser.add_argument("--steps", type=int, help="of the target's training, if not the size's")
    parser.add_argument("--check", type=int, default=32, help="held-out prompts to check with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
