"""From text files to a checkpoint folder: what `trapline train` does, step by step."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from trapline.gold.atomic_write import write_file, write_folder
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import read_config
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.ternary.layers import (
    Share,
    assert_all_ternary,
    check_trainable,
    convert,
    coverage,
    dequantized,
    learn_scales,
)
from trapline.gold.ternary.packed_model import pack_model, packed_bytes, save_packed
from trapline.gold.ternary.quantize import GROUP
from trapline.gold.ternary.training import curves, data
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.tokenizer import (
    encode,
    ends_of,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from trapline.gold.ternary.training.trainer import Recipe, Row, Trainer, check_vocabulary

CHECKPOINT = "last.pt"


@dataclass(frozen=True)
class Job:
    """The settings of one run. Paths may be strings."""

    texts: tuple[str | Path, ...]
    out: Path
    shape: Shape
    recipe: Recipe
    kv_heads: int | None = None
    hidden: int | None = None
    tied: bool = True
    #: Fraction of the documents held out for validation.
    held_out: float = 0.05
    group_size: int = GROUP
    method: str = "absmean"
    #: Whether to learn the scale of each group.
    learn_scales: bool = False
    #: Trains a dense model instead.
    dense: bool = False
    #: A checkpoint to start from, and one to distil from; both include a tokeniser.
    start: str | Path | None = None
    teacher: str | Path | None = None
    resume: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))


class Text(NamedTuple):
    """Training and validation windows, and the number of leaks."""

    train: np.ndarray
    valid: np.ndarray
    tokenizer: Any
    leaks: int
    dropped: int
    #: The end tokens; the first ends every document; None: those of the tokeniser.
    ends: list[int] | None = None


@dataclass
class Result:
    """The result of a run."""

    best_loss: float
    best_step: int
    steps: int
    stopped_early: bool
    skipped: int
    parameters: int
    packed_bytes: int | None
    tokens: dict[str, int]
    leaks: int
    coverage: list[Share] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    plotted: bool = True


def prepare(job: Job) -> Text:
    """Reads, splits by content, drops leaks, trains or loads the tokeniser, cuts windows."""
    split = data.split_documents(data.read_documents(job.texts), job.held_out)
    found = data.leaks(split)
    clean = data.without_leaks(split) if found else split
    source = job.start or job.teacher
    # From training text only: held-out text must not affect the vocabulary.
    tokenizer = load_tokenizer(source) if source else train_tokenizer(clean.train, job.shape.vocab)
    if job.start and job.teacher:
        _check_alike(job.start, job.teacher)
    ends = ends_of(tokenizer, source)
    train, valid = (data.cut(encode(tokenizer, side, ends), job.shape.context) for side in clean)
    check_vocabulary([train, valid], job.shape.vocab)
    return Text(train, valid, tokenizer, len(found), len(split.train) - len(clean.train), ends)


def _check_alike(start: str | Path, teacher: str | Path) -> None:
    """Student and teacher must have the same tokeniser."""
    one, other = (load_tokenizer(folder).get_vocab() for folder in (start, teacher))
    if one != other:
        raise RangeError(f"{start} and {teacher} have different tokenisers")


def build(job: Job) -> Decoder:
    """The model to train, with latent weights unless `job.dense`."""
    if job.start is not None:
        decoder = Decoder.from_pretrained(job.start).float()
    else:
        config = decoder_config(job.shape, kv_heads=job.kv_heads, hidden=job.hidden, tied=job.tied)
        decoder = Decoder(config)
        initialise(decoder, job.recipe.seed)
    _check_sizes(decoder, job, "the checkpoint to begin with")
    check_trainable(decoder)
    if not job.dense:
        convert(decoder, job.group_size, job.method)
        if job.learn_scales:
            learn_scales(decoder)
        assert_all_ternary(decoder)
    return decoder.train()


def _check_sizes(decoder: Decoder, job: Job, what: str) -> None:
    config = decoder.config
    if config.vocab != job.shape.vocab:
        raise ShapeError(f"{what} has {config.vocab} tokens, asked for are {job.shape.vocab}")
    if config.context < job.shape.context:
        raise ShapeError(f"{what} has {config.context} positions, not {job.shape.context}")


def make_trainer(job: Job, text: Text) -> Trainer:
    """The trainer with model and teacher, resumed if asked for."""
    teacher = None
    if job.teacher is not None:
        dense = Decoder.from_pretrained(job.teacher).float()
        _check_sizes(dense, job, "the teacher")
        teacher = DecoderLM(dense)
    model = DecoderLM(build(job))
    trainer = Trainer(model, job.recipe, text.train, text.valid, teacher=teacher, device=job.device)
    if job.resume:
        trainer.load(job.out / CHECKPOINT)
    return trainer


def run(
    job: Job,
    *,
    on_start: Callable[[Text, Trainer], None] = lambda text, trainer: None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Result:
    """Trains and writes `model/`, `packed/`, curves and a checkpoint to `job.out`."""
    _check_folder(job)
    text = prepare(job)
    trainer = make_trainer(job, text)
    on_start(text, trainer)

    def evaluated(row: Row) -> None:
        if is_first():
            trainer.save(job.out / CHECKPOINT)
            curves.write_table(trainer.progress.rows, job.out / "curves.csv")
        on_row(row)

    best: DecoderLM = trainer.run(evaluated, on_step=on_step)
    if not math.isfinite(trainer.progress.best_loss):
        raise RangeError("nothing was learned: no held-out loss was finite; try a lower rate")
    result = _result(text, trainer, best.decoder)
    if is_first():
        result.plotted = _leave(job, text, trainer, best.decoder, result)
    return result


def _check_folder(job: Job) -> None:
    known = (job.out / CHECKPOINT).exists()
    if job.resume and not known:
        raise RangeError(f"{job.out} has no {CHECKPOINT} to resume from")
    if known and not job.resume:
        raise RangeError(f"{job.out} holds a run already: resume it or choose another folder")
    job.out.mkdir(parents=True, exist_ok=True)
    # Fails now, not at the first evaluation, if the folder is not writable.
    with tempfile.TemporaryFile(dir=job.out):
        pass


def _result(text: Text, trainer: Trainer, decoder: Decoder) -> Result:
    progress = trainer.progress
    return Result(
        best_loss=progress.best_loss,
        best_step=progress.best_step,
        steps=progress.step,
        stopped_early=trainer.stalled(),
        skipped=progress.skipped,
        parameters=sum(p.numel() for p in decoder.parameters()),
        packed_bytes=None,
        tokens={"train": int(text.train.size), "valid": int(text.valid.size)},
        leaks=text.leaks,
        coverage=coverage(decoder),
        events=progress.events,
    )


def _leave(job: Job, text: Text, trainer: Trainer, best: Decoder, result: Result) -> bool:
    best = best.cpu().eval()
    write_folder(job.out / "model", lambda place: _save_dense(best, text, place))
    if not job.dense:
        packed = pack_model(best)
        result.packed_bytes = packed_bytes(packed)
        write_folder(job.out / "packed", lambda place: _save_packed(packed, text, place))
    shape = asdict(_shape(best, job.shape.context))
    summary = {"recipe": asdict(job.recipe), "shape": shape, **asdict(result)}
    said = json.dumps(summary, indent=1, default=str) + "\n"
    write_file(job.out / "run.json", lambda place: place.write_text(said, encoding="utf-8"))
    try:
        curves.plot({job.out.name: trainer.progress.rows}, job.out / "curves.png")
    except ImportError:
        return False
    return True


def _shape(decoder: Decoder, context: int) -> Shape:
    """Of what was trained: a checkpoint to begin with brings its own."""
    config = decoder.config
    return Shape(config.vocab, config.dim, config.layers, config.heads, context)


def _save_dense(decoder: Decoder, text: Text, folder: Path) -> None:
    dequantized(decoder).save_pretrained(folder)
    save_tokenizer(text.tokenizer, folder, text.ends)


def _save_packed(decoder: Any, text: Text, folder: Path) -> None:
    save_packed(decoder, folder)
    save_tokenizer(text.tokenizer, folder, text.ends)


def join_processes(device: str) -> str:
    """Joins the process group under torchrun and returns the device of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def leave_processes() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process writes files and output."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def vocabulary(folder: str | Path) -> int:
    """The vocabulary size of a checkpoint."""
    return read_config(folder).vocab


def check_asked(folder: str | Path, asked: Mapping[str, object]) -> None:
    """Raises ShapeError if a requested size differs from that of the checkpoint."""
    config = read_config(folder)
    for name, wanted in asked.items():
        found = getattr(config, name)
        if found != wanted:
            raise ShapeError(f"{folder} has {name} {found}, asked for is {wanted}: leave it out")
