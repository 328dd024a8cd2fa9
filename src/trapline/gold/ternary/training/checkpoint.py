"""Checkpoints of training runs: written atomically, read only by the same run."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trapline.gold.atomic_write import write_file
from trapline.gold.errors import RangeError, ShapeError

#: The keys of a checkpoint.
PARTS = (
    *("shapes", "recipe", "inputs", "model", "best"),
    *("optimisers", "rng", "codes", "own_teacher", "progress"),
)


def write_checkpoint(state: dict[str, Any], path: str | Path) -> None:
    """Writes atomically: a full disk leaves the old file."""
    try:
        write_file(path, lambda partial: torch.save(state, partial))
    except RuntimeError as error:
        # torch raises RuntimeError when a write fails.
        first = str(error).splitlines()[0]
        raise OSError(f"{path} could not be written whole: {first}") from None


def read_checkpoint(path: str | Path, mine: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The state, if its shapes, recipe and inputs are those of this run."""
    state = _state(Path(path))
    for name, here in mine.items():
        if state[name] != here:
            raise ShapeError(
                f"the checkpoint was made with other {name}: {_difference(state[name], here)}"
            )
    return state


def _state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds
        said = f"it cannot be read ({type(error).__name__})"
        raise RangeError(f"{path} is not the checkpoint of a run: {said}") from None
    found = dict(state) if isinstance(state, dict) else {}
    lacking = [name for name in PARTS if name not in found]
    if lacking:
        # Keys that every version has written.
        ours = {"model", "recipe", "progress"} <= found.keys()
        said = "was written by an earlier version" if ours else "is not the checkpoint of a run"
        raise RangeError(f"{path} {said}: it has no {lacking[0]}")
    return found


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A short hash of tensors."""
    digest = hashlib.blake2b(digest_size=6)
    for one in tensors:
        digest.update(f"{one.dtype} {tuple(one.shape)}".encode())
        digest.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _difference(theirs: dict[str, Any], here: dict[str, Any]) -> str:
    names = [name for name in {**theirs, **here} if theirs.get(name) != here.get(name)]
    first = names[0]
    return f"{first} {theirs.get(first)}, here {here.get(first)}"
