"""A fresh workspace for whoever solves a challenge: prompt and starter, nothing of the judge's."""

import re
import shutil
from pathlib import Path

from trapline.arena.challenge import DEPLOYED, Challenge
from trapline.arena.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def check_entrant(name: str) -> str:
    """An entrant's name is a folder's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no entrant name: letters, digits, '.', '_' and '-' only")
    return name


def deploy(root: Path, challenge: Challenge, entrant: str, attempt: int | None = None) -> Path:
    """Makes `<root>/<entrant>/<challenge>`, or an attempt's folder in it; it must not exist yet."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file; workspaces are deployed into a folder")
    workspace = root / check_entrant(entrant) / challenge.id
    if attempt is not None:
        workspace /= f"attempt-{attempt}"
    if workspace.exists() and any(workspace.iterdir()):
        raise UsageError(f"{workspace} exists already and is left alone")
    workspace.mkdir(parents=True, exist_ok=True)
    prompt, starter = (challenge.folder / name for name in DEPLOYED)
    shutil.copyfile(prompt, workspace / prompt.name)
    for source in sorted(starter.rglob("*.py")):
        target = workspace / source.relative_to(starter)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return workspace
