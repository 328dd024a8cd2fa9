"""All-ternary models against dense twins: equal tokens, the same sweep of rates, several seeds.

    PYTHONPATH=src python benchmarks/ternary_twins.py corpus --out runs/twins --device cuda \
        --dim 512 --layers 7 --heads 8 --vocab 8192 --context 512 --batch 32 --steps 1000 \
        --optimiser muon --precision bf16 --compile

Kinds: `dense`, `ternary` from scratch, `distilled` (a dense teacher for half the steps, then a
ternary student of it for the other half: equal tokens in all), `equal bytes` (a dense model in
float16 no larger than the packed ternary one), and `collapse` (ternary without early stopping).
Each gets every rate with seed 0 and `--sweep-steps`; the best rate gets all steps and seeds. With
`--softs` ternary weights may also harden over a share of the steps, if the sweep finds it better.
`--tokens 48000` cuts the training side, for the small-data regime.

The best checkpoint is chosen on some held-out windows, its perplexity is that of the others. Every
run leaves a file in OUT/runs and is not run again, so several processes (`--only`) and several
sittings (`--until`) add up to one study.
"""

import argparse
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from trapline.gold.decoder.model import Decoder
from trapline.gold.ternary import curves, train_run
from trapline.gold.ternary.fast import unpacked
from trapline.gold.ternary.linear_packed import pack_model, packed_bytes, save_packed
from trapline.gold.ternary.tokenizer import load_tokenizer, save_tokenizer
from trapline.gold.ternary.train import Recipe, Row, Trainer
from trapline.gold.ternary.train_model import DecoderLM, Shape, decoder_config

KINDS = ("dense", "ternary", "equal bytes", "teachers", "distilled", "collapse")
#: Held-out windows that choose the best checkpoint, at most; the others judge it.
CHOOSING = 128
#: Held-out windows on which the exported file is compared with the model in memory.
COMPARED = 32


def main() -> None:
    given = _arguments()
    torch.set_num_threads(given.threads)
    study = Study(given)
    try:
        for kind in given.only:
            study.do(kind)
    except OutOfTimeError as said:
        print(said, flush=True)
    study.leave()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="*", help="not needed once OUT/text is there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    for name, value in (("dim", 256), ("layers", 4), ("heads", 4), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("context", 256), ("batch", 16), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sweep-steps", type=int, help="of the sweep, as many as --steps if not")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.12, 0.24, 0.48, 0.96])
    parser.add_argument("--softs", type=float, nargs="*", default=[], help="with the best rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimiser", default="adamw")
    parser.add_argument("--method", default="absmean")
    parser.add_argument("--latent-decay", type=float, default=0.0)
    parser.add_argument("--distill", type=float, default=0.7, help="the teacher's share of a loss")
    parser.add_argument("--teaching", type=float, default=0.5, help="the teacher's share of steps")
    parser.add_argument("--tokens", type=int, help="training tokens, all if not given")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--device", default=train_run.default_device())
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--capture", action="store_true", help="the step as one CUDA graph")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds for all of it")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


@dataclass(frozen=True)
class Choice:
    """What a sweep chooses from: a rate, and in what share of the steps weights harden."""

    rate: float
    soft: float

    def __str__(self) -> str:
        return f"rate {self.rate}{f' soft {self.soft}' if self.soft else ''}"


class OutOfTimeError(Exception):
    """The next run would not end in time."""


class Study:
    """All runs on one text, and what came out."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self._began = time.monotonic()
        self._seconds_a_step: list[float] = []
        (given.out / "runs").mkdir(parents=True, exist_ok=True)
        self._job = self._plain_job()
        self._text, self._judging = self._windows()

    def _plain_job(self) -> train_run.Job:
        given = self.given
        recipe = Recipe(
            batch=given.batch, optimiser=given.optimiser, patience=8, schedule="linear",
            evaluate_every=given.evaluate_every, latent_decay=given.latent_decay,
            precision=given.precision, compile=given.compile, capture=given.capture,
        )  # fmt: skip
        shape = Shape(given.vocab, given.dim, given.layers, given.heads, given.context)
        return train_run.Job(
            tuple(given.texts), given.out, shape, recipe, method=given.method,
            held_out=given.held_out, device=given.device,
        )  # fmt: skip

    def _windows(self) -> tuple[train_run.Text, np.ndarray]:
        """Windows in an order of their own: neighbours come from one document."""
        folder = self.given.out / "text"
        if not (folder / "valid.npy").exists():
            folder.mkdir(exist_ok=True)
            made = train_run.prepare(self._job)
            made.tokenizer.save(str(folder / "tokenizer.json"))
            for name in ("train", "valid"):
                np.save(folder / f"{name}.npy", getattr(made, name).astype(np.uint16).ravel())
        step, sides = self.given.context + 1, []
        for name in ("train", "valid"):
            stream = np.load(folder / f"{name}.npy").astype(np.int32)
            windows = stream[: len(stream) // step * step].reshape(-1, step)
            sides.append(windows[np.random.default_rng(0).permutation(len(windows))])
        train, valid = sides
        if self.given.tokens:
            train = train[: max(1, self.given.tokens // step)]
        choosing = min(CHOOSING, len(valid) // 2)
        rest = valid[choosing:]
        # Whole batches: compiled code is made for one size.
        judging = rest[: max(1, len(rest) // self.given.batch) * self.given.batch]
        text = train_run.Text(train, valid[:choosing], load_tokenizer(folder), 0, 0)
        return text, judging

    def do(self, kind: str) -> None:
        """The sweep, then every seed with the best of it."""
        if kind == "collapse":
            self._trained("ternary", self._best("ternary"), 0, self.given.steps, driven=True)
            return
        best = self._best("dense" if kind == "teachers" else kind)
        for seed in self.given.seeds:
            if kind == "teachers":
                self._teacher(seed, self._teaching(self.given.steps))
            else:
                self._trained(kind, best, seed, self.given.steps)

    def _best(self, kind: str) -> Choice:
        """The best rate of the sweep, then how softly; a student takes what the ternary has."""
        kind = "ternary" if kind == "distilled" else kind
        choices = [Choice(rate, 0.0) for rate in self.given.rates]
        if len(choices) > 1:
            choices = [self._best_of(kind, choices)]
        if kind == "ternary" and self.given.softs:
            choices += [Choice(choices[0].rate, soft) for soft in self.given.softs]
        return self._best_of(kind, choices) if len(choices) > 1 else choices[0]

    def _best_of(self, kind: str, choices: list[Choice]) -> Choice:
        steps = self.given.sweep_steps or self.given.steps
        found = {one: self._trained(kind, one, 0, steps) for one in choices}
        return min(found, key=lambda one: float(found[one]["perplexity"]))

    def _teaching(self, steps: int) -> int:
        return round(steps * self.given.teaching)

    def _trained(
        self, kind: str, choice: Choice, seed: int, steps: int, *, driven: bool = False
    ) -> dict[str, Any]:
        """One run, or what its file says."""
        name = f"{kind} {choice} seed {seed} steps {steps}{' driven' if driven else ''}"
        file = self.given.out / "runs" / f"{name.replace(' ', '-')}.json"
        if not file.exists():
            left = self.given.until - (time.monotonic() - self._began)
            # The first run compiles: what it took says nothing about the next.
            if left < steps * min(self._seconds_a_step[1:], default=0.0):
                raise OutOfTimeError(f"{name}: {left:.0f} s are left")
            began = time.monotonic()
            found = {"kind": "collapse" if driven else kind, "seed": seed, **asdict(choice)}
            found |= self._run(kind, choice, seed, steps, name, None if driven else 8)
            seconds = time.monotonic() - began
            self._seconds_a_step.append(seconds / found["steps"])
            file.write_text(json.dumps(found | {"seconds": round(seconds, 1)}) + "\n")
            shown = {key: value for key, value in found.items() if key != "rows"}
            print(f"{name:44} {seconds:5.0f} s {shown}", flush=True)
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def _run(
        self, kind: str, choice: Choice, seed: int, steps: int, name: str, patience: int | None
    ) -> dict[str, Any]:
        rate = choice.rate
        job = replace(self._job, dense=kind != "ternary")
        whole, before = steps == self.given.steps, list[Row]()
        if kind == "equal bytes":
            job = self._equal_bytes()
        if kind == "distilled":
            folder, before = self._teacher(seed, self._teaching(steps))
            job = replace(job, dense=False, start=folder, teacher=folder)
            # The student goes on where the plan of rates would be after so many steps.
            rate *= 1.0 - self.given.teaching
            steps -= self._teaching(steps)
        recipe = replace(
            job.recipe, peak_rate=rate, final_rate=rate / 100, seed=seed, steps=steps,
            warm_up=max(1, steps // 20), patience=patience, soft=choice.soft,
            distill=self.given.distill if kind == "distilled" else 0.0, distill_falls=True,
        )  # fmt: skip
        trainer = train_run.make_trainer(replace(job, recipe=recipe), self._text)
        trainer.run()
        found = _summary(trainer, before)
        trainer.model.load_state_dict(trainer.best)
        trainer.valid = torch.from_numpy(self._judging).to(trainer.device)
        found |= {"perplexity": float(np.exp(trainer.valid_loss())), "width": job.shape.dim}
        if whole and not job.dense:
            found |= self._exported(trainer, self.given.out / "packed" / name.replace(" ", "-"))
        return found

    def _teacher(self, seed: int, steps: int) -> tuple[Path, list[Row]]:
        """A dense model that has had a part of the tokens, trained once for all its students."""
        rate = self._best("dense").rate
        folder = self.given.out / f"teacher-{seed}-{steps}"
        rows = folder / "rows.json"
        if not rows.exists():
            recipe = replace(
                self._job.recipe, peak_rate=rate, final_rate=rate / 100, seed=seed, steps=steps,
                warm_up=max(1, steps // 20),
            )  # fmt: skip
            job = replace(self._job, dense=True, recipe=recipe)
            trainer = train_run.make_trainer(job, self._text)
            trainer.run().decoder.cpu().save_pretrained(folder)
            save_tokenizer(self._text.tokenizer, folder)
            rows.write_text(json.dumps([asdict(row) for row in trainer.progress.rows]))
        return folder, [Row(**row) for row in json.loads(rows.read_text())]

    def _exported(self, trainer: Trainer, folder: Path) -> dict[str, Any]:
        """Writes the packed file and judges what is read back from it, by the same code."""
        trainer.valid = trainer.valid[:COMPARED]
        memory = _plain_loss(trainer, DecoderLM(trainer.model.decoder))
        packed = pack_model(trainer.model.decoder.cpu())
        save_packed(packed, folder)
        save_tokenizer(self._text.tokenizer, folder)
        gap = _plain_loss(trainer, DecoderLM(_read_back(folder))) - memory
        return {"gap of the exported file": gap, "packed bytes": packed_bytes(packed)}

    def _equal_bytes(self) -> train_run.Job:
        """The widest dense float16 model that is no larger than the packed ternary one."""
        ternary = train_run.build(self._job)
        budget = sum(p.numel() * (2.125 / 8 if p.ndim > 1 else 4) for p in ternary.parameters())
        for dim in range(self.given.dim // 32 * 32, 32, -32):
            shape = replace(self._job.shape, dim=dim, heads=dim // 32)
            for hidden in range(4 * dim, 2 * dim, -8):
                dense = replace(self._job, shape=shape, hidden=hidden, dense=True)
                if 2 * _weights(dense) <= budget:
                    return dense
        raise SystemExit("the model is too small to have a smaller twin")

    def leave(self) -> None:
        """Table, figures and plot of everything that has been run so far, by any process."""
        files = sorted((self.given.out / "runs").glob("*.json"))
        runs = {file.stem: json.loads(file.read_text()) for file in files}
        whole = {name: run for name, run in runs.items() if self._is_whole(name)}
        by_kind = {k: [run for run in whole.values() if run["kind"] == k] for k in KINDS}
        results = {}
        for kind, found in by_kind.items():
            if found:
                best = _best_choice(found)
                figures = [run["perplexity"] for run in best]
                spread = stdev(figures) if len(figures) > 1 else 0.0
                results[kind] = {"perplexity": mean(figures), "deviation": spread, "runs": best}
        judged = [run for found in results.values() for run in found["runs"]]
        sweep = [_without_rows(run) for run in runs.values() if run not in judged]
        asked = {k: v for k, v in vars(self.given).items() if isinstance(v, int | str | float)}
        left = {"asked": asked | {"until": None}, "kinds": results, "sweep": sweep}
        (self.given.out / "twins.json").write_text(json.dumps(left) + "\n")
        print(_table(results))
        shown = {k: [Row(*row) for row in r["runs"][0]["rows"]] for k, r in results.items()}
        if not shown:
            return
        try:
            curves.plot(shown, self.given.out / "twins.png")
        except ImportError:
            print("no plot: matplotlib is missing; twins.json has the curves")

    def _is_whole(self, name: str) -> bool:
        return re.search(rf"-steps-{self.given.steps}(-driven)?$", name) is not None


def _best_choice(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with what was best for seed 0, by seed."""
    first = [run for run in runs if run["seed"] == 0] or runs
    best = _choice(min(first, key=lambda run: float(run["perplexity"])))
    return sorted((run for run in runs if _choice(run) == best), key=lambda run: int(run["seed"]))


def _choice(run: dict[str, Any]) -> Choice:
    return Choice(run["rate"], run.get("soft", 0.0))


def _summary(trainer: Trainer, before: list[Row]) -> dict[str, Any]:
    progress, earlier = trainer.progress, before[-1].step if before else 0
    shifted = [replace(row, step=row.step + earlier) for row in progress.rows]
    rows = [*before, *shifted]
    return {
        "chosen": float(np.exp(progress.best_loss)),
        "step": progress.best_step + earlier,
        "steps": progress.step + earlier,
        "last": progress.rows[-1].perplexity,
        "skipped": progress.skipped,
        "rows": [[r.step, round(r.train_loss, 4), round(r.valid_loss, 4), r.flipped] for r in rows],
    }


def _plain_loss(trainer: Trainer, model: DecoderLM) -> float:
    """The held-out loss by code that is not compiled, so that equal weights give equal sums."""
    trainer.model = model.to(trainer.device)
    return trainer.valid_loss()


def _read_back(folder: Path) -> Decoder:
    """A decoder with plain float32 matrices, made from the packed file alone."""
    decoder = Decoder.from_pretrained(folder)
    plain = Decoder(decoder.config)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            part: Any = decoder.get_submodule(name)
            weight = unpacked(part.codes, part.scales, part.columns, part.group_size)
            module.weight.data.copy_(weight)
    own = dict(decoder.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in own:
            parameter.data.copy_(own[name])
    return plain


def _weights(job: train_run.Job) -> int:
    with torch.device("meta"):
        decoder = Decoder(decoder_config(job.shape, hidden=job.hidden))
    return sum(p.numel() for p in decoder.parameters())


def _without_rows(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "rows"}


def _table(results: dict[str, Any]) -> str:
    heads = f"{'':12} {'perplexity':>10} {'±':>6} {'to dense':>9} {'last/best':>9} {'rate':>6}"
    lines = [heads]
    dense = results.get("dense", {}).get("perplexity", float("nan"))
    for kind, found in results.items():
        runs = found["runs"]
        last = mean(run["last"] / run["chosen"] for run in runs)
        lines.append(
            f"{kind:12} {found['perplexity']:10.2f} {found['deviation']:6.2f}"
            f" {found['perplexity'] / dense:9.3f} {last:9.2f} {runs[0]['rate']:6g}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
