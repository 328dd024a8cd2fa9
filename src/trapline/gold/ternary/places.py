"""Folders that are whole or as they were before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def in_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside its place, then moves it: a full disk leaves what was there."""
    # Names of our own: what others keep beside it, say as `.old`, is theirs.
    partial, old = (folder.with_name(f"{folder.name}.trapline.{end}") for end in ("partial", "old"))
    _take_back(folder, old)
    for stale in (partial, old):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        partial.mkdir()
        write(partial)
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:
        raise OSError(f"{folder} could not be written whole: {error}") from None
    finally:
        _take_back(folder, old)
        shutil.rmtree(partial, ignore_errors=True)


def _take_back(folder: Path, old: Path) -> None:
    """Whoever ended between the two moves left no folder at all."""
    if old.exists() and not folder.exists():
        os.replace(old, folder)
