"""What a study was asked for: the files of its runs do not say it, and must not mix two studies."""

import argparse
import json
from pathlib import Path
from typing import Any

from twins_files import write

#: Runs are named by these, or they choose which runs there are and how long all may take.
FREE = {
    "out", "only", "rates", "decays", "softs", "seeds", "steps", "sweep_steps", "until", "threads",
}  # fmt: skip


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a folder have in common, as JSON keeps it."""
    asked = {name: value for name, value in vars(given).items() if name not in FREE}
    # Several processes may sit on several GPUs of one machine.
    asked["device"] = given.device.split(":")[0]
    return asked | {"texts": [str(text.resolve()) for text in given.texts]}


def refuse_others(file: Path, asked: dict[str, Any]) -> None:
    """Ends the program if the folder was begun with other settings."""
    if not file.exists():
        return
    kept = json.loads(file.read_text())
    for name, now in asked.items():
        before = kept.get(name)
        # Without `texts`, the text in the folder is read again.
        if now != before and (name != "texts" or now):
            option = name if name == "texts" else f"--{name.replace('_', '-')}"
            raise SystemExit(
                f"{file.parent} was begun with {option} {_shown(before)}, asked for is now"
                f" {_shown(now)}: choose another folder"
            )


def keep(file: Path, asked: dict[str, Any]) -> None:
    """Binds the folder to these settings, unless it is bound already."""
    refuse_others(file, asked)
    if not file.exists():
        write(file, json.dumps(asked, indent=1) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "none" if value is None else str(value)
