"""Trains, loads and saves byte-level BPE tokenisers, which encode every text losslessly."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trapline.gold.decoder.text import end_ids, save_ends
from trapline.gold.errors import RangeError

END = "</s>"
#: Every byte and the end of a document.
SMALLEST = 257
_BATCH = 1000


def train_tokenizer(documents: Iterable[str], vocab: int) -> Any:
    """A `tokenizers.Tokenizer` with exactly `vocab` tokens, token 0 the end of a document.

    A text too small for this vocabulary raises RangeError: the rest of the embedding would never
    be trained.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < SMALLEST:
        raise RangeError(f"a byte-level vocabulary has at least {SMALLEST} tokens, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    supported = tokenizer.get_vocab_size()
    if supported < vocab:
        raise RangeError(
            f"the text supports a vocabulary of {supported} tokens, {vocab} were asked for"
        )
    return tokenizer


def load_tokenizer(folder: str | Path) -> Any:
    """The tokeniser of a checkpoint."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise RangeError(f"{folder} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise RangeError(f"{path} is not a tokeniser: {error}") from None


def ends_of(tokenizer: Any, folder: str | Path | None = None) -> list[int]:
    """The end tokens: those of the checkpoint, or our own; possibly none."""
    named = [] if folder is None else end_ids(Path(folder))
    own = tokenizer.token_to_id(END)
    return named or ([] if own is None else [own])


def save_tokenizer(tokenizer: Any, folder: str | Path, ends: Sequence[int] | None = None) -> None:
    """Writes tokeniser and end tokens to a checkpoint folder."""
    # The library's own `save` does not raise OSError on a full disk.
    folder = Path(folder)
    written = tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(written, encoding="utf-8")
    save_ends(folder, ends_of(tokenizer) if ends is None else ends)


def encode(
    tokenizer: Any, documents: Sequence[str], ends: Sequence[int] | None = None
) -> np.ndarray:
    """All documents as one int32 stream, each followed by the first end token if there is one."""
    ending = list(ends_of(tokenizer) if ends is None else ends)[:1]
    parts = []
    for at in range(0, len(documents), _BATCH):
        for one in tokenizer.encode_batch(list(documents[at : at + _BATCH])):
            parts.append(np.array(one.ids + ending, dtype=np.int32))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
