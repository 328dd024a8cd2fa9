"""A fresh workspace for whoever solves a challenge: prompt and starter, nothing of the judge's."""

import re
from pathlib import Path

from trapline.arena import output_paths
from trapline.arena.challenge import DEPLOYED, Challenge
from trapline.arena.errors import UsageError

PROMPT, STARTER = DEPLOYED
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def check_entrant(name: str) -> str:
    """An entrant's name is a folder's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no entrant name: letters, digits, '.', '_' and '-' only")
    return name


def deploy(root: Path, challenge: Challenge, entrant: str, attempt: int | None = None) -> Path:
    """Makes `<root>/<entrant>/<challenge>`, or an attempt's folder in it; it must not exist yet."""
    workspace = free_workspace(root, challenge, entrant, attempt)
    copy_workspace(challenge, workspace)
    return workspace


def free_workspace(
    root: Path, challenge: Challenge, entrant: str, attempt: int | None = None
) -> Path:
    """Where it would be made; refused where something is already."""
    output_paths.folder(root, "what workspaces are deployed into")
    workspace = root / check_entrant(entrant) / challenge.id
    if attempt == 1 and (workspace / "solution.py").is_file():
        raise UsageError(f"{workspace} holds attempt 1 already and is left alone")
    if attempt is not None:
        workspace /= f"attempt-{attempt}"
    if workspace.exists() and any(workspace.iterdir()):
        raise UsageError(f"{workspace} exists already and is left alone")
    return workspace


def copy_workspace(challenge: Challenge, workspace: Path) -> None:
    """Prompt and starter, and nothing else, into a folder."""
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / PROMPT).write_text(challenge.prompt)
    for name, text in read_starter(challenge).items():
        target = workspace / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def read_starter(challenge: Challenge) -> dict[str, str]:
    """The starter's files, path → text."""
    folder = challenge.folder / STARTER
    return {
        str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))
    }
