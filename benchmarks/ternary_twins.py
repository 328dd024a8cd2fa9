"""All-ternary models against dense twins: equal tokens, the same sweep of rates, several seeds.

    PYTHONPATH=src python benchmarks/ternary_twins.py corpus --out runs/twins --device cuda \
        --dim 512 --layers 7 --heads 8 --vocab 8192 --context 512 --batch 32 --steps 1000 \
        --optimiser muon --precision bf16 --compile

Kinds: `dense`; `ternary` from scratch; `distilled` (dense for `--own-teacher` of the steps, then
the same run goes on as ternary student of what it was: teacher's and student's tokens are together
those of the twin); `student` (from scratch, learns from the finished dense twin, and reads as many
tokens as that did: twice the tokens in all); `equal bytes` (a dense model in float16 no larger than
the packed ternary one); `collapse` (ternary without early stopping).
Each gets every rate with seed 0 and `--sweep-steps`, then every decay with the best rate; what is
best gets all steps and seeds. With `--softs` ternary weights harden over a share of the steps:
rates and decays are swept with the first one, the others tried with what was best. `--tokens 48000`
cuts the training side, for the small-data regime.

The best checkpoint is chosen on some held-out windows, its perplexity is that of the others. Beside
it stand bits a byte of text, which compare between vocabularies. Every run leaves a file in
OUT/runs and is not run again, so several processes (they share the runs out among themselves) and
several sittings (`--until`) add up to one study. What the files' names do not say is in
OUT/asked.json: the folder takes no runs of other settings.
"""

import argparse
import gc
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from twins_asked import keep, refuse_others, settings
from twins_export import exported
from twins_files import claimed, forget_the_dead, write
from twins_text import study_text

from trapline.gold.atomic_write import write_folder
from trapline.gold.decoder.api import Decoder
from trapline.gold.ternary.training import curves
from trapline.gold.ternary.training import run as train_run
from trapline.gold.ternary.training.model import Shape, decoder_config
from trapline.gold.ternary.training.tokenizer import save_tokenizer
from trapline.gold.ternary.training.trainer import Recipe, Row, Trainer

KINDS = ("dense", "ternary", "equal bytes", "distilled", "student", "collapse")


def main() -> None:
    given = _arguments()
    torch.set_num_threads(given.threads)
    # One process makes code for several kinds of model, each with and without gradients.
    torch._dynamo.config.recompile_limit = 64
    study = Study(given)
    try:
        study.do_all()
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
    parser.add_argument("--sweep-steps", type=int, help="fewer choose too much decay")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.12, 0.24, 0.48, 0.96])
    parser.add_argument("--matrices", type=float, default=1.0, help="times the rate, of the inner")
    parser.add_argument("--softs", type=float, nargs="*", default=[], help="with the best rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimiser", default="adamw")
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--method", default="absmean")
    parser.add_argument("--decays", type=float, nargs="+", default=[0.0], help="with the best rate")
    parser.add_argument("--untied", action="store_true", help="embedding and head are two tables")
    parser.add_argument("--learn-scales", action="store_true", help="of groups of ternary weights")
    parser.add_argument("--distill", type=float, default=0.5, help="the teacher's share of a loss")
    for name, value, said in (
        ("own-teacher", 0.3, "share of the steps after which `distilled` teaches itself"),
        ("distill-until", 0.6, "share of the steps by which its teacher is not asked any more"),
        ("distilled-soft", 0.9, "share of the steps by which it has hardened"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=said)
    parser.add_argument("--average", type=int, default=50, help="steps a teacher is averaged over")
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
    """What a sweep chooses from: rate, decay, and in what share of the steps weights harden."""

    rate: float
    decay: float
    soft: float

    def __str__(self) -> str:
        more = {name: getattr(self, name) for name in ("decay", "soft")}
        return " ".join([f"rate {self.rate}", *(f"{n} {v}" for n, v in more.items() if v)])


#: A student learns from a model that stays ahead of it: it may listen all the time.
LISTENS = 0.7


class OutOfTimeError(Exception):
    """The next run would not end in time."""


class Study:
    """All runs on one text, and what came out."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self._began = time.monotonic()
        self._seconds_a_step: list[float] = []
        asked = settings(given)
        refuse_others(given.out / "asked.json", asked)
        (given.out / "runs").mkdir(parents=True, exist_ok=True)
        forget_the_dead(given.out / "runs")
        self._job = self._plain_job()
        self._read = study_text(self._job, given.out / "text", given.tokens)
        # Not before there is a text: a mistyped path must not bind the folder.
        keep(given.out / "asked.json", asked)

    def _plain_job(self) -> train_run.Job:
        given = self.given
        recipe = Recipe(
            batch=given.batch, optimiser=given.optimiser, patience=8, schedule=given.schedule,
            evaluate_every=given.evaluate_every, matrices=given.matrices,
            precision=given.precision, compile=given.compile, capture=given.capture,
        )  # fmt: skip
        shape = Shape(given.vocab, given.dim, given.layers, given.heads, given.context)
        return train_run.Job(
            tuple(given.texts), given.out, shape, recipe, method=given.method,
            held_out=given.held_out, device=given.device, tied=not given.untied,
            learn_scales=given.learn_scales,
        )  # fmt: skip

    def do_all(self) -> None:
        """The sweeps, then the first seed of every kind before the second of any."""
        kinds = [kind for kind in self.given.only if kind != "collapse"]
        best = {kind: self._best(kind) for kind in kinds}
        for seed in self.given.seeds:
            for kind in kinds:
                self._trained(kind, best[kind], seed, self.given.steps)
        if "collapse" in self.given.only:
            self._trained("ternary", self._best("ternary"), 0, self.given.steps, driven=True)

    def _best(self, kind: str) -> Choice:
        """The best rate, then decay, then how softly; a student takes what the ternary has."""
        kind = "ternary" if kind in ("distilled", "student") else kind
        softs = (self.given.softs if kind == "ternary" else []) or [0.0]
        first, *decays = self.given.decays
        best = self._best_of(kind, [Choice(rate, first, softs[0]) for rate in self.given.rates])
        best = self._best_of(kind, [best, *(replace(best, decay=decay) for decay in decays)])
        return self._best_of(kind, [best, *(replace(best, soft=soft) for soft in softs[1:])])

    def _best_of(self, kind: str, choices: list[Choice]) -> Choice:
        if len(choices) == 1:
            return choices[0]
        steps = self.given.sweep_steps or self.given.steps
        # First what no other process does, then what the others have done.
        for one in choices:
            self._trained(kind, one, 0, steps)
        found = {one: self._trained(kind, one, 0, steps, wait=True) for one in choices}
        return min(found, key=lambda one: float(found[one]["perplexity"]))

    def _trained(
        self, kind: str, choice: Choice, seed: int, steps: int,
        *, driven: bool = False, wait: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """One run, or what its file says; empty if another process is at it and we do not wait."""
        name = f"{kind} {choice} seed {seed} steps {steps}{' driven' if driven else ''}"
        file = self.given.out / "runs" / f"{name.replace(' ', '-')}.json"
        claim = file.with_suffix(".claim")
        while not file.exists() and not claimed(claim):
            if not wait:
                return {}
            time.sleep(0.5)
        if not file.exists():
            try:
                self._do(name, file, kind, choice, seed, steps, driven)
            finally:
                claim.unlink()
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def _do(
        self, name: str, file: Path, kind: str, choice: Choice, seed: int, steps: int, driven: bool
    ) -> None:
        left = self.given.until - (time.monotonic() - self._began)
        # The first run compiles: what it took says nothing about the next.
        if left < steps * min(self._seconds_a_step[1:], default=0.0):
            raise OutOfTimeError(f"{name}: {left:.0f} s are left")
        began = time.monotonic()
        found = {"kind": "collapse" if driven else kind, "seed": seed, **asdict(choice)}
        found |= self._run(kind, choice, seed, steps, name, None if driven else 8)
        gc.collect()  # graphs keep gigabytes until their trainer is gone
        seconds = time.monotonic() - began
        self._seconds_a_step.append(seconds / found["steps"])
        write(file, json.dumps(found | {"seconds": round(seconds, 1)}) + "\n")
        shown = {key: value for key, value in found.items() if key != "rows"}
        print(f"{name:44} {seconds:5.0f} s {shown}", flush=True)

    def _run(
        self, kind: str, choice: Choice, seed: int, steps: int, name: str, patience: int | None
    ) -> dict[str, Any]:
        job = replace(self._job, dense=kind in ("dense", "equal bytes"))
        own: dict[str, Any] = {}
        if kind == "equal bytes":
            job = self._equal_bytes()
        if kind == "student":
            job = replace(job, teacher=self._finished_twin(seed))
            own = {"distill": LISTENS}
        if kind == "distilled":
            own = {
                "soft": self.given.distilled_soft, "own_teacher": self.given.own_teacher,
                "average": self.given.average, "distill": self.given.distill,
                "distill_falls": True, "distill_until": self.given.distill_until,
            }  # fmt: skip
        recipe = replace(
            job.recipe, peak_rate=choice.rate, final_rate=choice.rate / 100, seed=seed, steps=steps,
            weight_decay=choice.decay, latent_decay=choice.decay, warm_up=max(1, steps // 20),
            patience=patience, **{"soft": choice.soft, **own},
        )  # fmt: skip
        trainer = train_run.make_trainer(replace(job, recipe=recipe), self._read.text)
        trainer.run()
        taught = {"teacher": job.teacher.name} if job.teacher else {}
        found = _summary(trainer) | {"teaching": own | taught}
        trainer.model.load_state_dict(trainer.best)
        trainer.valid = torch.from_numpy(self._read.judging).to(trainer.device)
        loss = trainer.valid_loss()
        bits = loss / np.log(2) / self._read.bytes_a_token
        found |= {"perplexity": float(np.exp(loss)), "bits a byte": float(bits)}
        found["width"] = job.shape.dim
        if steps == self.given.steps and kind == "dense":
            self._keep_twin(trainer, self._twin(choice, seed))
        if steps == self.given.steps and not job.dense:
            place = self.given.out / "packed" / name.replace(" ", "-")
            found |= exported(trainer, self._read.text.tokenizer, place)
        return found

    def _twin(self, choice: Choice, seed: int) -> Path:
        return self.given.out / "twins" / f"{choice} seed {seed}".replace(" ", "-")

    def _keep_twin(self, trainer: Trainer, folder: Path) -> None:
        """For students, who may be waiting for it."""
        write_folder(folder, lambda place: self._save_twin(trainer, place))

    def _save_twin(self, trainer: Trainer, folder: Path) -> None:
        trainer.model.decoder.cpu().save_pretrained(folder)
        save_tokenizer(self._read.text.tokenizer, folder)

    def _finished_twin(self, seed: int) -> Path:
        folder = self._twin(self._best("dense"), seed)
        while not folder.exists():
            if time.monotonic() - self._began > self.given.until:
                raise OutOfTimeError(f"no dense twin of seed {seed} to learn from")
            time.sleep(0.5)
        return folder

    def _equal_bytes(self) -> train_run.Job:
        """The widest dense float16 model that is no larger than the packed ternary one."""
        weights = _empty(self._job).parameters()
        budget = sum(p.numel() * (2.125 / 8 if p.ndim > 1 else 4) for p in weights)
        for dim in range(self.given.dim // 32 * 32, 32, -32):
            shape = replace(self._job.shape, dim=dim, heads=dim // 32)
            dense = replace(self._job, shape=shape, hidden=2 * dim + 8, dense=True)
            room = budget / 2 - _weights(dense)
            if room >= 0:
                # Each of the three matrices of an MLP has a row or a column for each hidden value.
                more = int(room // (3 * dim * shape.layers)) // 8 * 8
                return replace(dense, hidden=min(4 * dim, 2 * dim + 8 + more))
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
        write(self.given.out / "twins.json", json.dumps(left) + "\n")
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
    return Choice(run["rate"], run["decay"], run["soft"])


def _summary(trainer: Trainer) -> dict[str, Any]:
    progress = trainer.progress
    return {
        "chosen": float(np.exp(progress.best_loss)),
        "step": progress.best_step,
        "steps": progress.step,
        "last": progress.rows[-1].perplexity,
        "skipped": progress.skipped,
        "rows": [
            [r.step, round(r.train_loss, 4), round(r.valid_loss, 4), r.flipped]
            for r in progress.rows
        ],
    }


def _weights(job: train_run.Job) -> int:
    return sum(p.numel() for p in _empty(job).parameters())


def _empty(job: train_run.Job) -> Decoder:
    """A job's model as shapes alone."""
    with torch.device("meta"):
        return Decoder(decoder_config(job.shape, hidden=job.hidden, tied=job.tied))


def _without_rows(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "rows"}


def _table(results: dict[str, Any]) -> str:
    heads = f"{'':12} {'perplexity':>10} {'±':>6} {'to dense':>9} {'last/best':>9} {'rate':>6}"
    lines = [heads]
    dense = {run["seed"]: run["perplexity"] for run in results.get("dense", {}).get("runs", ())}
    for kind, found in results.items():
        runs = found["runs"]
        last = mean(run["last"] / run["chosen"] for run in runs)
        # Seed by seed: text and start are the same, and a kind may have fewer seeds.
        ratio = mean(run["perplexity"] / dense.get(run["seed"], float("nan")) for run in runs)
        lines.append(
            f"{kind:12} {found['perplexity']:10.2f} {found['deviation']:6.2f}"
            f" {ratio:9.3f} {last:9.2f} {runs[0]['rate']:6g}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
