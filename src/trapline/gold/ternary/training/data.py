"""Training text: reads documents, splits them by content, removes leaks, cuts windows."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from trapline.gold.errors import RangeError

VOCAB = 256
#: Shorter lines ("}", a heading) are shared by documents that have nothing else in common.
LEAK_LENGTH = 40


class Split(NamedTuple):
    """Training and validation documents."""

    train: list[str]
    valid: list[str]


def read_documents(paths: Iterable[str | Path]) -> list[str]:
    """Documents of text files, and of every `.txt` file below a folder.

    Form feeds separate documents; in files without form feeds blank lines do.
    """
    documents: list[str] = []
    for path in paths:
        for file in _files(Path(path)):
            documents += _documents(_text(file))
    if not documents:
        raise RangeError("the files contain no text")
    return documents


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    # Not `rglob`, which silently skips unreadable folders.
    walk = os.walk(path, onerror=_refuse)
    files = (Path(at, name) for at, _, names in walk for name in names)
    found = sorted(file for file in files if file.name.endswith(".txt"))
    if not found:
        raise RangeError(f"{path} has no .txt file")
    return found


def _refuse(error: OSError) -> NoReturn:
    raise RangeError(f"{error.filename} cannot be read: {error.strerror}") from None


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RangeError(f"{path} is not valid UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise RangeError(f"{path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise RangeError(f"{path} is not a text file: it contains zero bytes")
    return text


def _documents(text: str) -> list[str]:
    parts = text.split("\f" if "\f" in text else "\n\n")
    return [stripped for part in parts if (stripped := part.strip())]


def split_documents(documents: Sequence[str], fraction: float) -> Split:
    """Splits by a hash of the content; equal documents stay together."""
    if not 0.0 < fraction < 1.0:
        raise RangeError(f"fraction must lie between 0 and 1, got {fraction}")
    if len(set(documents)) < 2:
        raise RangeError(
            "one document cannot both teach and judge: there must be two different,"
            " parted by form feeds or blank lines"
        )
    order = sorted(set(documents), key=_draw)
    count = min(len(order) - 1, max(1, round(fraction * len(order))))
    limit = _draw(order[count - 1])
    held_out = [document for document in documents if _draw(document) <= limit]
    return Split([document for document in documents if _draw(document) > limit], held_out)


def leaks(split: Split) -> list[str]:
    """Long lines that occur on both sides."""
    seen = {line for document in split.train for line in _long_lines(document)}
    return sorted({line for document in split.valid for line in _long_lines(document)} & seen)


def without_leaks(split: Split) -> Split:
    """The split without training documents that share a long line with a validation document."""
    shared = set(leaks(split))
    kept = [d for d in split.train if not shared.intersection(_long_lines(d))]
    if not kept:
        raise RangeError("every training document shares a line with a judged one")
    return Split(kept, split.valid)


def tokens(document: str) -> np.ndarray:
    """The UTF-8 bytes of a document as tokens."""
    return np.frombuffer(document.encode(), dtype=np.uint8).astype(np.int64)


def windows(documents: Sequence[str], context: int) -> np.ndarray:
    """(N, context + 1) byte windows of the documents, joined by blank lines."""
    return cut(tokens("\n\n".join(documents)), context)


def cut(stream: np.ndarray, context: int) -> np.ndarray:
    """(N, context + 1) windows of a token stream; an incomplete last window is dropped."""
    step = context + 1
    count = len(stream) // step
    if not count:
        raise RangeError(f"the text has {len(stream)} tokens, a window of {step} needs more")
    return stream[: count * step].reshape(count, step)


def _draw(document: str) -> bytes:
    return hashlib.sha256(document.encode()).digest()


def _long_lines(document: str) -> list[str]:
    return [line.strip() for line in document.splitlines() if len(line.strip()) >= LEAK_LENGTH]
