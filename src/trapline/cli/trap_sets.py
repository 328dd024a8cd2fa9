"""Reads the folder that `--traps` names."""

from collections.abc import Sequence
from pathlib import Path

from trapline.arena.challenge import load_all
from trapline.arena.errors import UsageError
from trapline.arena.record import Track
from trapline.arena.trap_set import TrapSet


def read_trap_set(
    folder: Path, challenges: Sequence[str], profile: str | None, track: Track
) -> TrapSet:
    """The set, refused where it could not grade these challenges."""
    if profile or track == "gpu":
        raise UsageError(
            "--traps takes answers to the challenges' own prompts on the CPU track: leave out "
            "--profile and --track gpu"
        )
    private = TrapSet(folder)
    private.refuse_unknown(list(load_all()))
    for name in challenges:
        if private.path(name) is None:
            raise UsageError(
                f"the trap set {private} has no traps for {name}; it has some for: "
                f"{', '.join(private.challenges)}"
            )
    return private
