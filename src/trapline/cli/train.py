"""`trapline train`: text files in, an all-ternary language model out."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trapline.arena import output_paths
from trapline.arena.errors import ArenaError, InterruptedRunError, MissingError, UsageError
from trapline.cli.asked import is_written

_COMMAND = "trapline train book.txt --out runs/book --vocab 1024 --dim 128 --layers 4"
EXAMPLE = f"{_COMMAND}; several GPUs: torchrun --no-python {_COMMAND}"
_CONSOLE = Console(stderr=True)

Optimiser = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "trapezoid", "constant"]
Precision = Literal["fp32", "bf16"]
Method = Literal["absmean", "threshold", "lstsq"]
Device = Literal["auto", "cpu", "cuda"]
#: Sizes that --start takes from its checkpoint; --teacher takes the first.
_BROUGHT = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "tied")
#: Options without effect on a dense model.
_OF_TERNARY = ("group_size", "method", "soft", "learn_scales", "latent_decay")
_TEXTS = "Text files, or folders of .txt files. Form feeds separate documents, else blank lines do."


def train(
    called: typer.Context,
    texts: Annotated[list[Path], typer.Argument(help=_TEXTS)],
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    vocab: Annotated[int, typer.Option(help="Tokens of the BPE vocabulary.")] = 4096,
    dim: Annotated[int, typer.Option(min=2, help="Width; a multiple of 128 packs best.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 6,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Default: about 8/3 of dim.")] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens per training window.")] = 256,
    tied: Annotated[bool, typer.Option(help="One table for embedding and head.")] = True,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Windows per micro-batch and GPU.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    optimiser: Annotated[Optimiser, typer.Option(help="Optimiser.")] = "adamw",
    rate: Annotated[
        float, typer.Option(min=0, help="Peak learning rate, relative to a typical weight.")
    ] = 0.05,
    final_rate: Annotated[
        float | None, typer.Option(min=0, help="Last learning rate; default: a tenth of the peak.")
    ] = None,
    matrices: Annotated[
        float, typer.Option(min=0, help="Factor of the rate for matrices inside the layers.")
    ] = 1.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps of rising rate.")] = 50,
    schedule: Annotated[Schedule, typer.Option(help="How the rate falls.")] = "cosine",
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of the gradient.")] = 1.0,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 50,
    patience: Annotated[
        int, typer.Option(min=0, help="End after so many evaluations without a best; 0: never.")
    ] = 8,
    held_out: Annotated[float, typer.Option(help="Share of documents to evaluate on.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    precision: Annotated[Precision, typer.Option(help="Of matrix products.")] = "fp32",
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    capture: Annotated[bool, typer.Option(help="Run CUDA graphs (one GPU).")] = False,
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = "auto",
    group_size: Annotated[int, typer.Option(min=1, help="Weights per scale; TQ2_0: 256.")] = 128,
    method: Annotated[Method, typer.Option(help="How weights become ternary.")] = "absmean",
    soft: Annotated[float, typer.Option(help="Share of steps with soft weights.")] = 0.0,
    learn_scales: Annotated[
        bool, typer.Option(help="Learn the groups' scales as well.")
    ] = False,
    dense: Annotated[bool, typer.Option(help="Train a dense model instead.")] = False,
    start: Annotated[Path | None, typer.Option(help="A dense checkpoint to begin with.")] = None,
    teacher: Annotated[Path | None, typer.Option(help="A dense checkpoint to learn from.")] = None,
    distill: Annotated[
        float, typer.Option(min=0, max=1, help="The teacher's share of the loss.")
    ] = 0.5,
    weight_decay: Annotated[float, typer.Option(min=0, help="Decay of dense matrices.")] = 0.0,
    latent_decay: Annotated[float, typer.Option(min=0, help="Decay of latent weights.")] = 0.0,
    resume: Annotated[bool, typer.Option(help="Continue the run in --out.")] = False,
) -> None:  # fmt: skip
    """Train a language model whose embeddings, attention, MLP and head are all ternary.

    Writes model/ (a Hugging Face checkpoint), packed/ (2 bits per weight), curves.csv, curves.png,
    run.json and the state for --resume. Keeps the model that is best on held-out documents.
    """
    output_paths.folder(out, "a run")
    run = _training()
    found: str = run.default_device()
    if device == "cuda" != found:
        raise MissingError("no CUDA device was found; use --device cpu")
    place = found if device == "auto" else device
    _refuse_unused(called, dense=dense, taught=teacher is not None, falls=schedule != "constant")
    peak_end = rate / 10 if final_rate is None else final_rate
    try:
        place = run.join_processes(place)
        source = start or teacher
        size = run.vocabulary(source) if source else vocab
        # Sizes on the command line must equal those of the checkpoint.
        for folder, names in ((start, _BROUGHT), (teacher, _BROUGHT[:1])):
            if folder is not None:
                written = [name for name in names if is_written(called, name)]
                run.check_asked(folder, {name: called.params[name] for name in written})
        recipe = run.Recipe(
            steps=steps, batch=batch, accumulate=accumulate, optimiser=optimiser, peak_rate=rate,
            final_rate=peak_end, warm_up=warm_up, schedule=schedule, clip=clip,
            weight_decay=weight_decay, evaluate_every=evaluate_every, patience=patience or None,
            seed=seed, precision=precision, compile=compiled, distill=distill if teacher else 0.0,
            soft=soft, capture=capture, latent_decay=latent_decay, matrices=matrices,
        )  # fmt: skip
        job = run.Job(
            texts=tuple(texts), out=out, recipe=recipe, kv_heads=kv_heads, hidden=hidden, tied=tied,
            shape=run.Shape(size, dim, layers, heads, context),
            held_out=held_out, group_size=group_size, method=method, learn_scales=learn_scales,
            dense=dense, start=start, teacher=teacher, resume=resume, device=place,
        )  # fmt: skip
        _show(_run(run, job), out)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        stays = "the last whole checkpoint stays" if _is_begun(run, out) else "nothing is saved yet"
        raise ArenaError(f"the run ended: {error}; {stays}") from None
    except KeyboardInterrupt:
        raise InterruptedRunError(_after_interrupt(run, out)) from None
    finally:
        run.leave_processes()


def _after_interrupt(run: Any, out: Path) -> str:
    if _is_begun(run, out):
        return "the last checkpoint is kept, the same command with --resume goes on"
    return "nothing is kept, the same command begins anew"


def _refuse_unused(called: typer.Context, *, dense: bool, taught: bool, falls: bool) -> None:
    """Refuses options that have no effect in this combination."""
    for name in _OF_TERNARY if dense else ():
        if is_written(called, name):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is for ternary weights: leave it or --dense out")
    if not dense and is_written(called, "weight_decay"):
        raise UsageError("--weight-decay is for dense weights: add --dense, or take --latent-decay")
    if not falls and is_written(called, "final_rate"):
        raise UsageError("--final-rate is never reached: leave it or --schedule constant out")
    if not taught and is_written(called, "distill"):
        raise UsageError("--distill is a teacher's share: add --teacher")


def _is_begun(run: Any, out: Path) -> bool:
    return Path(out / run.CHECKPOINT).exists()


def _training() -> Any:
    try:
        import tokenizers  # noqa: F401

        from trapline.gold.ternary.training import run as train_run
    except ImportError:
        raise MissingError("training needs torch and tokenizers: trapline[torch]") from None
    return train_run


def _run(run: Any, job: Any) -> Any:
    """The run with a bar: loss, perplexity, tokens a second, flips of ternary codes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    clock = _Clock()
    with Progress(*columns, console=_CONSOLE, disable=not run.is_first()) as bar:
        task = bar.add_task("training", total=job.recipe.steps, now="")

        def on_start(text: Any, trainer: Any) -> None:
            clock.tokens_a_step = trainer.tokens_a_step
            count = sum(p.numel() for p in trainer.model.parameters())
            sizes = f"{text.train.size:,} tokens to learn from, {text.valid.size:,} held out"
            said = f"{count:,} weights; {sizes}"
            if text.leaks:
                dropped = f"{text.dropped} training documents dropped"
                said += f"; {text.leaks} lines stood on both sides: {dropped}"
            bar.console.print(said, highlight=False, markup=False)
            bar.update(task, completed=trainer.progress.step)

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step, now=f"loss {loss:.3f} {clock.rate(step)} {clock.last}")

        def on_row(row: Any) -> None:
            clock.last = f"perplexity {row.perplexity:.1f} flips {row.flipped:.2%}"

        return run.run(job, on_start=on_start, on_step=on_step, on_row=on_row)


class _Clock:
    """Tokens a second since the first step, and what the last evaluation said."""

    def __init__(self) -> None:
        self.tokens_a_step = 0
        self.last = ""
        self._began: tuple[int, float] | None = None

    def rate(self, step: int) -> str:
        now = time.perf_counter()
        if self._began is None:
            self._began = step, now
            return ""
        steps, seconds = step - self._began[0], now - self._began[1]
        return f"{steps * self.tokens_a_step / max(seconds, 1e-9):,.0f} tokens/s"


def _show(result: Any, out: Path) -> None:
    table = Table("tensor", "shape", "ternary", "share", title="coverage")
    for share in result.coverage:
        shape = " × ".join(map(str, share.shape))
        table.add_row(share.name, shape, "yes" if share.ternary else "no", f"{share.share:.2%}")
    _CONSOLE.print(table)
    for event in result.events:
        typer.echo(event, err=True)
    how = "stopped early" if result.stopped_early else "ran to the end"
    typer.echo(
        f"best held-out loss {result.best_loss:.4f} at step {result.best_step} of {result.steps}"
        f" ({how}), {result.skipped} steps left out; {out / 'model'}"
    )
    if result.packed_bytes is not None:
        typer.echo(f"packed: {result.packed_bytes:,} bytes of tensors in {out / 'packed'}")
    if not result.plotted:
        typer.echo("no plot: matplotlib is missing (trapline[report]); curves.csv has the figures")
