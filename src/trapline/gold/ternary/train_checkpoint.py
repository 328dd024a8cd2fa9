"""The state of a run as a file: written whole or not at all, read only if it is of the same run."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from trapline.gold.errors import RangeError, ShapeError


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Writes beside its place, then moves: a full disk leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except RuntimeError as error:
        # What torch makes of a write that the disk refused.
        first = str(error).splitlines()[0]
        raise OSError(f"{path} could not be written whole: {first}") from None
    finally:
        partial.unlink(missing_ok=True)


def read_checkpoint(path: Path, mine: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The state, if what it says about shapes and recipe is what this run has."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RangeError(f"{path} is no checkpoint of a run: {error}") from None
    for name, here in mine.items():
        if state[name] != here:
            raise ShapeError(
                f"the checkpoint was made with other {name}: {_difference(state[name], here)}"
            )
    return state


def _difference(theirs: dict[str, Any], here: dict[str, Any]) -> str:
    names = [name for name in {**theirs, **here} if theirs.get(name) != here.get(name)]
    first = names[0]
    return f"{first} {theirs.get(first)}, here {here.get(first)}"
