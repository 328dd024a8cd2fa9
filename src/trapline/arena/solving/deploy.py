"""Fresh workspaces: the prompt and the starter of a challenge, none of the judge's files."""

import re
import shutil
from pathlib import Path

from trapline.arena import output_paths
from trapline.arena.challenge import DEPLOYED, Challenge
from trapline.arena.errors import UsageError
from trapline.arena.gpu.contract import HEADER
from trapline.arena.judge.request import entry_files
from trapline.arena.record import Track
from trapline.arena.runs.field import SETTINGS, read_settings, refuse_other_track

PROMPT, STARTER = DEPLOYED
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def claim_field(root: Path, profile: str, track: Track = "cpu") -> None:
    """Makes sure that one field holds answers to one kind of prompt, and says which.

    Writes `field.toml` for a profile or the GPU track. Raises `UsageError` where the field has
    another one.
    """
    path = root / SETTINGS
    there = read_settings(root)
    refuse_other_track(root, there, track)
    if there.profile == profile and (there.track is not None or track == "cpu"):
        return
    if there.profile:
        raise UsageError(f"{root} is a field of the profile {there.profile!r}: {path} says so")
    if path.exists() or any(one.is_dir() for one in root.glob("[!.]*")):
        asked = f"the profile {profile!r}" if profile else f"the {track} track"
        raise UsageError(
            f"{root} is a field of the challenges' own prompts on the CPU: deploy {asked} "
            "into another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'profile = "{profile}"\n' if profile else f'track = "{track}"\n', encoding="utf-8"
    )


def check_entrant(name: str) -> str:
    """Returns the name if it can be a folder's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not an entrant name: use letters, digits, '.', '_', '-'")
    return name


def deploy(root: Path, challenge: Challenge, entrant: str, attempt: int | None = None) -> Path:
    """Makes `<root>/<entrant>/<challenge>`, or an attempt's folder in it; it must not exist yet."""
    workspace = free_workspace(root, challenge, entrant, attempt)
    copy_workspace(challenge, workspace)
    return workspace


def free_workspace(
    root: Path, challenge: Challenge, entrant: str, attempt: int | None = None
) -> Path:
    """The path of a new workspace; raises `UsageError` if it is not empty."""
    output_paths.folder(root, "a field", "")
    workspace = root / check_entrant(entrant) / challenge.id
    names = entry_files("", challenge.track)
    if attempt == 1 and any((workspace / name).is_file() for name in names):
        raise UsageError(f"{workspace} already holds attempt 1; nothing was written")
    if attempt is not None:
        workspace /= f"attempt-{attempt}"
    if workspace.exists() and any(workspace.iterdir()):
        raise UsageError(f"{workspace} already exists; nothing was written")
    return workspace


def copy_workspace(challenge: Challenge, workspace: Path) -> None:
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / PROMPT).write_text(challenge.prompt, encoding="utf-8")
    for name, text in read_starter(challenge).items():
        target = workspace / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if target.suffix == ".cu":  # so that nvcc finds it
            shutil.copyfile(HEADER, target.with_name(HEADER.name))


def read_starter(challenge: Challenge) -> dict[str, str]:
    folder = challenge.folder / STARTER
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", ".cu")
    }
