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
known: the rates fall to their ends when the time is over.

The folder gets `corpus.txt`, `held_out.txt`, the target as a Hugging Face checkpoint with its
tokeniser, `drafter/`, and `pair.json` with all settings and what was measured.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from trapline.gold.decoder.model import Decoder
from trapline.gold.ternary.data import Split, cut, read_documents, split_documents
from trapline.gold.ternary.tokenizer import encode, load_tokenizer, train_tokenizer
from trapline.gold.ternary.train import DecoderLM, Recipe, Shape, Trainer
from trapline.gold.ternary.train_model import decoder_config, initialise
from trapline.gold.tree_decoding import drafter_checkpoint
from trapline.gold.tree_decoding.drafter import DFlashDrafter, drafter_config
from trapline.gold.tree_decoding.drafter_lookup import PromptLookup
from trapline.gold.tree_decoding.drafter_training import (
    TrainingConfig,
    before_loops,
    fresh,
    regenerate,
    regenerate_in_rounds,
    train,
)
from trapline.gold.tree_decoding.generate import generate
from trapline.gold.tree_decoding.generate_decoder import DecoderTarget

#: Tokens that no text has; the last one is the drafter's mask.
SPARE = 1
#: How much of the held-out text judges the target while it learns.
HELD_OUT_WINDOWS = 256
#: Steps of a run by the clock before anything is measured.
WARM_STEPS = 10
#: Million characters from which the tokeniser is made: more changes little and takes long.
TOKENIZER_MEGABYTES = 12.0


@dataclass(frozen=True, kw_only=True)
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
    drafter_hidden: int
    seen: int  # target layers that the drafter looks at
    block: int
    prompts: int
    prompt: int
    answer: int
    drafter_steps: int
    drafter_batch: int
    anchors: int
    drafter_rate: float


SIZES = {
    # Learns nothing: shows in seconds that everything fits together.
    "toy": Size(
        vocab=300,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=48,
        context=256,
        window=32,
        steps=4,
        batch=4,
        rate=0.05,
        megabytes=0.05,
        drafter_layers=1,
        drafter_hidden=48,
        seen=1,
        block=6,
        prompts=12,
        prompt=32,
        answer=12,
        drafter_steps=4,
        drafter_batch=4,
        anchors=8,
        drafter_rate=2e-3,
    ),
    "tiny": Size(
        vocab=512,
        dim=96,
        layers=3,
        heads=4,
        kv_heads=2,
        hidden=256,
        context=256,
        window=64,
        steps=500,
        batch=8,
        rate=0.05,
        megabytes=0.4,
        drafter_layers=2,
        drafter_hidden=256,
        seen=2,
        block=8,
        prompts=192,
        prompt=32,
        answer=48,
        drafter_steps=300,
        drafter_batch=8,
        anchors=16,
        drafter_rate=2e-3,
    ),
    # Deep and narrow: a pass over few rows costs what its kernels cost to start, so depth is what
    # a drafter saves. Few and short tokens: most of them follow from those before.
    "small": Size(
        vocab=2048,
        dim=256,
        layers=18,
        heads=4,
        kv_heads=2,
        hidden=768,
        context=1024,
        window=512,
        steps=6000,
        batch=96,
        rate=0.03,
        megabytes=80.0,
        drafter_layers=2,
        drafter_hidden=2048,
        seen=4,
        block=8,
        prompts=12288,
        prompt=64,
        answer=192,
        drafter_steps=6000,
        drafter_batch=64,
        anchors=32,
        drafter_rate=1e-3,
    ),
}


def main() -> None:
    options = arguments()
    size = SIZES[options.size]
    if options.steps is not None:
        size = replace(size, steps=options.steps)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
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
    if not options.again:
        target, target_facts = make_target(size, split, tokenizer, options)
        # What runs on a GPU is what is kept, taught from and measured: 16 bits.
        target = target.bfloat16() if options.device.startswith("cuda") else target
        target.save_pretrained(out)
    else:
        target = Decoder.from_pretrained(out, device=options.device).eval().requires_grad_(False)
        target_facts = {"parameters": sum(parameter.numel() for parameter in target.parameters())}
    model, drafter_facts = make_drafter(
        target, size, prompts_of(tokenizer, split.train, size), options
    )
    drafter_checkpoint.save(model.to(target.norm.weight.dtype), out / "drafter")
    facts = {
        "sources": sources,
        "size": asdict(size),
        "target": target_facts,
        "drafter": drafter_facts,
        "seconds": time.perf_counter() - started,
    }
    (out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")
    held_out = prompts_of(tokenizer, split.valid, size)[: options.check]
    if held_out:
        facts["held_out"] = check(target.float(), model.float(), held_out, size)
        (out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")


def collect(path: Path, options, megabytes: float, sources: list[dict]) -> Path:
    """Python source: modules of packages and of the standard library, mixed, up to a size."""
    documents = [text for package in options.packages for text in wheel_sources(package, sources)]
    for package in options.installed:
        documents += installed_sources(package, sources)
    library = Path(sysconfig.get_path("stdlib"))
    sources.append(
        {"name": "python", "version": sys.version.split()[0], "licence": "PSF-2.0 (library)"}
    )
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            documents.append(file.read_text(encoding="utf-8", errors="replace"))
    clean = (one.replace("\f", "\n").strip() for one in documents)
    mixed = sorted({one for one in clean if one}, key=drawn)
    kept = some_of(mixed, megabytes)
    path.write_text("\f".join(kept), encoding="utf-8")
    say(f"{len(kept)} documents, {sum(map(len, kept)) / 1e6:.1f} million characters")
    return path


def drawn(document: str) -> bytes:
    """An order that has nothing to do with where a document comes from."""
    return hashlib.sha256(b"order" + document.encode("utf-8", "replace")).digest()


def some_of(documents: list[str], megabytes: float) -> list[str]:
    kept, total = [], 0
    for document in documents:
        if total >= megabytes * 1e6:
            break
        kept.append(document)
        total += len(document)
    return kept


def installed_sources(package: str, sources: list[dict]) -> list[str]:
    """The modules of an installed package, its tests left out."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"error: {package} is not installed") from None
    sources.append(
        {"name": package, "version": found.version, "licence": licence_of(found.metadata)}
    )
    texts = []
    for file in sorted(found.files or [], key=str):
        if file.suffix == ".py" and not {"test", "tests", "testing"} & set(file.parts):
            path = Path(str(found.locate_file(file)))
            if path.is_file():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def licence_of(facts) -> str:
    """What a package says of its licence: in one word, in a line, or by classifiers."""
    for key in ("License-Expression", "License"):
        lines = (facts.get(key) or "").strip().splitlines()
        if lines and lines[0].strip().upper() != "UNKNOWN":
            return lines[0].strip()[:80]
    kinds = [line for line in facts.get_all("Classifier") or [] if line.startswith("License ::")]
    return "; ".join(line.split(" :: ")[-1] for line in kinds) or "not said"


def wheel_sources(package: str, sources: list[dict]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, folder, "--only-binary", ":all:", package], check=True)
        texts = []
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                about = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
                facts = message_from_bytes(archive.read(about))
                sources.append(
                    {"name": package, "version": facts["Version"], "licence": licence_of(facts)}
                )
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
        compile=on_gpu and not options.eager,
        patience=None,
    )
    train, valid = (cut(encode(tokenizer, side), size.window) for side in split)
    trainer = Trainer(
        DecoderLM(decoder), recipe, train, valid[:HELD_OUT_WINDOWS], device=options.device
    )
    say(f"target: {sum(map(len, train)) / 1e6:.1f} million tokens")
    started = time.perf_counter()
    best = train_target(trainer, options.seconds[0] if options.seconds else None)
    facts = {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "seconds": time.perf_counter() - started,
        "steps": trainer.progress.step,
        "tokens": trainer.progress.step * trainer.tokens_a_step,
        "tokens_of_text": int(train.size),
        "held_out_loss": trainer.progress.best_loss,
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
    trainer.run(report, stop_at=WARM_STEPS)  # compiles, and is no measure of speed
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


def prompts_of(tokenizer, documents, size) -> list[list[int]]:
    """Pieces from all over the documents, the same every time."""
    width, prompts = size.prompt, []
    total = sum(map(len, documents))
    for number, document in enumerate(documents):
        luck = np.random.default_rng(number)
        wanted = 2.0 * size.prompts * len(document) / total
        for _ in range(int(wanted + luck.random())):
            # A token is at most as many bytes as these characters are likely to have.
            at = int(luck.integers(0, max(1, len(document) - 8 * width)))
            begin = document.find("\n", at) + 1
            ids = tokenizer.encode(document[begin : begin + 8 * width]).ids[:width]
            prompts += [ids] if len(ids) == width else []
    order = np.random.default_rng(0).permutation(len(prompts))
    return [prompts[i] for i in order]


def make_drafter(target, size, prompts, options):
    started = time.perf_counter()
    on_gpu = options.device.startswith("cuda")
    answers = regenerate_in_rounds if on_gpu else regenerate
    texts = answers(
        target,
        prompts[: size.prompts],
        max_new_tokens=size.answer,
        temperatures=options.temperatures,
        seed=options.seed,
        batch=512 if on_gpu else 64,
    )
    answered = time.perf_counter() - started
    said = sum(len(text.tokens) - text.start for text in texts)
    kept = [before_loops(text) for text in texts]
    learned = sum(len(text.tokens) - text.start for text in kept)
    say(f"drafter: {said} tokens in {answered:.0f} s, {learned} of them before a loop")
    shape = drafter_config(
        target.config,
        layers=size.drafter_layers,
        block=size.block,
        mask_id=size.vocab - 1,
        seen=size.seen,
        hidden=size.drafter_hidden,
    )
    how = TrainingConfig(
        steps=size.drafter_steps,
        batch=size.drafter_batch,
        anchors=size.anchors,
        learning_rate=size.drafter_rate,
        decay=7.0 if size.block >= 16 else 4.0,
        seed=options.seed,
        seconds=options.seconds[1] if options.seconds else None,
    )
    model = fresh(shape, options.seed).to(options.device)

    def report(step, loss):
        if (step + 1) % max(1, how.steps // 20) == 0:
            gone = time.perf_counter() - started
            say(f"drafter: step {step + 1} of {how.steps}, {gone:.0f} s, loss {loss:.3f}")

    losses = train(model, target, kept, how, report)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "answers": len(texts),
        "tokens": said,
        "tokens_before_loops": learned,
        "seconds_answering": answered,
        "seconds": time.perf_counter() - started,
        "steps": len(losses),
        "loss": sum(losses[-50:]) / len(losses[-50:]),
    }
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
    parser.add_argument("--installed", nargs="*", default=[], help="installed packages likewise")
    parser.add_argument("--corpus", type=Path, help="a text collected before")
    parser.add_argument("--steps", type=int, help="of the target's training, if not the size's")
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
    parser.add_argument("--eager", action="store_true", help="no torch.compile on a GPU")
    parser.add_argument("--check", type=int, default=32, help="held-out prompts to check with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
