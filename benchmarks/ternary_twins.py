"""All-ternary models against dense twins: equal tokens, the same sweep of rates, several seeds.

    PYTHONPATH=src python benchmarks/ternary_twins.py corpus --out runs/twins --device cuda \
        --dim 512 --layers 8 --heads 8 --vocab 8192 --context 512 --batch 64 --steps 4000 \
        --precision bf16 --compile

Five kinds: `dense`, `ternary` from scratch, `distilled` (a dense teacher for half the steps, then a
ternary student of it for the other half: equal tokens in all), `equal bytes` (a dense model in
float16 no larger than the packed ternary one), and `collapse` (ternary without early stopping).
Each of the first two and the fourth gets every rate with the first seed; the best rate, all seeds.
Perplexity is that of the best checkpoint on held-out documents. `--tokens 48000` cuts the training
side, for the small-data regime.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from trapline.gold.ternary import curves, train_run
from trapline.gold.ternary.train import Recipe, Trainer
from trapline.gold.ternary.train_model import Shape


def main() -> None:
    given = _arguments()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    study = Study(given)
    for kind in ("dense", "ternary", "equal bytes"):
        study.sweep(kind)
    study.distil()
    study.collapse()
    print(study.table())
    (given.out / "twins.json").write_text(json.dumps(study.results, indent=1) + "\n")
    curves.plot(study.curves, given.out / "twins.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("dim", 256), ("layers", 4), ("heads", 4), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("context", 256), ("batch", 16), ("steps", 1000), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--optimiser", default="adamw")
    parser.add_argument("--tokens", type=int, help="training tokens, all if not given")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--held-out", type=float, default=0.05)
    parser.add_argument("--device", default=train_run.default_device())
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


class Study:
    """All runs on one text, and what came out."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.results: dict[str, Any] = {}
        self.curves: dict[str, list[Any]] = {}
        self._job = self._plain_job(given.dim)
        text = train_run.prepare(self._job)
        if given.tokens:
            text = text._replace(train=text.train[: max(1, given.tokens // text.train.shape[1])])
        self._text = text

    def _plain_job(self, dim: int) -> train_run.Job:
        given = self.given
        recipe = Recipe(
            steps=given.steps, batch=given.batch, optimiser=given.optimiser, patience=8,
            evaluate_every=given.evaluate_every, warm_up=max(1, given.steps // 40),
            precision=given.precision, compile=given.compile,
        )  # fmt: skip
        shape = Shape(given.vocab, dim, given.layers, given.heads, given.context)
        return train_run.Job(
            tuple(given.texts), given.out, shape, recipe,
            held_out=given.held_out, device=given.device,
        )  # fmt: skip

    def sweep(self, kind: str) -> None:
        job = replace(self._job, dense=kind != "ternary")
        if kind == "equal bytes":
            job = replace(self._plain_job(self._equal_width()), dense=True)
        first = {rate: self._trained(f"{kind} {rate}", job, rate, 0) for rate in self.given.rates}
        best = min(first, key=lambda rate: first[rate]["perplexity"])
        rest = [
            self._trained(f"{kind} {best} seed {seed}", job, best, seed)
            for seed in range(1, self.given.seeds)
        ]
        self._keep(kind, [first[best], *rest], rate=best, sweep=list(first.values()))

    def distil(self) -> None:
        """Teacher and student share the steps; the student begins as the teacher."""
        rate, half = self.results["ternary"]["rate"], self.given.steps // 2
        runs = []
        for seed in range(self.given.seeds):
            teacher = self._trained(
                f"teacher {seed}", replace(self._job, dense=True),
                self.results["dense"]["rate"], seed, steps=half, keep=f"teacher-{seed}",
            )  # fmt: skip
            folder = self.given.out / f"teacher-{seed}"
            job = replace(self._job, start=folder, teacher=folder)
            student = self._trained(f"distilled {seed}", job, rate, seed, steps=half, distill=0.7)
            runs.append(student | {"teacher": teacher["perplexity"]})
        self._keep("distilled", runs, rate=rate)

    def collapse(self) -> None:
        rate = self.results["ternary"]["rate"]
        run = self._trained("no early stopping", self._job, rate, 0, patience=None)
        self._keep("collapse", [run], rate=rate)

    def _trained(
        self, name: str, job: train_run.Job, rate: float, seed: int, keep: str = "", **more: Any
    ) -> dict[str, Any]:
        recipe = replace(job.recipe, peak_rate=rate, final_rate=rate / 10, seed=seed, **more)
        trainer = train_run.make_trainer(replace(job, recipe=recipe), self._text)
        best = trainer.run()
        if keep:
            best.decoder.cpu().save_pretrained(self.given.out / keep)
            self._text.tokenizer.save(str(self.given.out / keep / "tokenizer.json"))
        self.curves[name] = trainer.progress.rows
        found = _summary(trainer)
        print(f"{name:28} {found}", flush=True)
        return found

    def _keep(self, kind: str, runs: list[dict[str, Any]], **more: Any) -> None:
        perplexity = mean(run["perplexity"] for run in runs)
        self.results[kind] = {"perplexity": perplexity, "runs": runs, **more}

    def _equal_width(self) -> int:
        """The widest dense float16 model that is no larger than the packed ternary one."""
        ternary = train_run.build(self._job)
        budget = sum(p.numel() * (2.125 / 8 if p.ndim > 1 else 4) for p in ternary.parameters())
        step = 2 * self.given.heads
        for dim in range(self.given.dim, step, -step):
            dense = train_run.build(replace(self._plain_job(dim), dense=True))
            if sum(p.numel() * 2 for p in dense.parameters()) <= budget:
                return dim
        return step

    def table(self) -> str:
        dense = self.results["dense"]["perplexity"]
        lines = [f"{'':14} {'perplexity':>10} {'to dense':>9} {'last/best':>9}"]
        for kind, found in self.results.items():
            last = np.mean([run["last"] / run["perplexity"] for run in found["runs"]])
            ratio = found["perplexity"] / dense
            lines.append(f"{kind:14} {found['perplexity']:10.2f} {ratio:9.3f} {last:9.2f}")
        return "\n".join(lines)


def _summary(trainer: Trainer) -> dict[str, Any]:
    progress = trainer.progress
    return {
        "perplexity": float(np.exp(progress.best_loss)),
        "step": progress.best_step,
        "steps": progress.step,
        "last": progress.rows[-1].perplexity,
        "skipped": progress.skipped,
    }


if __name__ == "__main__":
    main()
