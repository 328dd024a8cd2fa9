"""The text of a study as windows of tokens, and how many bytes of text a token stands for."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trapline.gold.ternary.training import run as train_run
from trapline.gold.ternary.training.tokenizer import END, load_tokenizer

#: Held-out windows that choose the best checkpoint, at most; the others judge it.
CHOOSING = 128


class StudyText(NamedTuple):
    """What all runs of a study read."""

    text: train_run.Text
    judging: np.ndarray
    #: Of the judged tokens, on average. Perplexities of two vocabularies do not compare; bits a
    #: byte do.
    bytes_a_token: float


def study_text(job: train_run.Job, folder: Path, tokens: int | None) -> StudyText:
    """Windows in an order of their own: neighbours come from one document."""
    if not (folder / "valid.npy").exists():
        folder.mkdir(exist_ok=True)
        made = train_run.prepare(job)
        made.tokenizer.save(str(folder / "tokenizer.json"))
        for name in ("train", "valid"):
            np.save(folder / f"{name}.npy", getattr(made, name).astype(np.uint16).ravel())
    step = job.shape.context + 1
    train, valid = (_shuffled(np.load(folder / f"{name}.npy"), step) for name in ("train", "valid"))
    if tokens:
        train = train[: max(1, tokens // step)]
    choosing = min(CHOOSING, len(valid) // 2)
    rest = valid[choosing:]
    # Whole batches: compiled code is made for one size.
    judging = rest[: max(1, len(rest) // job.recipe.batch) * job.recipe.batch]
    tokenizer = load_tokenizer(folder)
    text = train_run.Text(train, valid[:choosing], tokenizer, 0, 0)
    return StudyText(text, judging, float(token_bytes(tokenizer)[judging[:, 1:]].mean()))


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Bytes of text by token; the end of a document counts as the one that parts them in a file."""
    names = [tokenizer.id_to_token(at) for at in range(tokenizer.get_vocab_size())]
    # A byte-level vocabulary writes each byte as one letter.
    return np.array([1 if name == END else len(name) for name in names])


def _shuffled(stream: np.ndarray, step: int) -> np.ndarray:
    windows = stream.astype(np.int32)[: len(stream) // step * step].reshape(-1, step)
    return windows[np.random.default_rng(0).permutation(len(windows))]
