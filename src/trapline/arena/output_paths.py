"""Where results may go: asked before the work, so that none of it is lost to a wrong path."""

from pathlib import Path

from trapline.arena.errors import UsageError


def folder(path: Path, what: str) -> Path:
    """The path, which is a folder or becomes one."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; {what} is a folder")
    for above in path.parents:
        if above.exists() and not above.is_dir():
            raise UsageError(f"cannot write {path}: {above} is a file")
    return path


def file(path: Path, what: str) -> Path:
    """The path, which is a file or becomes one, in a folder that is there."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; {what} is a file")
    if not folder(path.parent, f"what holds {path.name}").exists():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    return path
