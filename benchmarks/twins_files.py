"""Files by which several processes share the runs of one study out among themselves."""

import os
from pathlib import Path


def claimed(claim: Path) -> bool:
    """Whether this process may do what the file stands for: no other one has said it does."""
    try:
        with claim.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def forget_the_dead(folder: Path) -> None:
    """Takes away what processes that are gone have claimed."""
    for claim in folder.glob("*.claim"):
        try:
            owner = claim.read_text()
            os.kill(int(owner or os.getpid()), 0)
        except ProcessLookupError:
            claim.unlink(missing_ok=True)
        except FileNotFoundError:
            continue


def write(file: Path, text: str) -> None:
    """All at once: another process may be looking."""
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, file)
