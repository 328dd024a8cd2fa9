"""Level `landlock`: file rules, namespaces and a system call filter, straight from the kernel."""

import os
from functools import cache
from pathlib import Path

from trapline.arena.errors import MissingError
from trapline.arena.process.isolation import interpreter, packages
from trapline.arena.process.isolation.limits import environment
from trapline.arena.process.isolation.plan import (
    Command,
    SandboxPlan,
    common,
    start_inside,
    unused_user,
)
from trapline.arena.process.isolation.spec import Launch
from trapline.arena.process.isolation.stage import SandboxStage

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def by_user(launch: Launch, stage: SandboxStage) -> Command:
    """For root: become a user that owns nothing, whose processes the kernel counts. It must be able
    to read the interpreter, which an installation in root's home folder does not allow."""
    if os.geteuid() != 0:
        raise MissingError("only root can become another user")
    user = unused_user()
    stage.root.chmod(0o711)
    os.chown(stage.scratch, user, user)
    return _command(launch, stage, user)


def by_namespace(launch: Launch, stage: SandboxStage) -> Command:
    """As the present user, without capabilities. Where that is root, the kernel limits the number
    of processes in control groups only."""
    return _command(launch, stage, None)


def _command(launch: Launch, stage: SandboxStage, user: int | None) -> Command:
    site = stage.site(launch.packages)
    plan = SandboxPlan(
        program=str(stage.program),
        site=str(site),
        supervise=True,
        namespaces="namespaces" not in launch.without,
        own_numbers=not launch.gpu,
        scratch=str(stage.scratch),
        scratch_mb=launch.scratch_mb,
        user=user,
        landlock=None if "landlock" in launch.without else _rules(launch, stage, site),
        **common(launch),
    )
    arguments = start_inside(plan, str(stage.inside), launch, str(stage.submission))
    return Command(arguments, environment(str(stage.scratch), launch.gpu))


def _rules(launch: Launch, stage: SandboxStage, site: Path) -> dict[str, list[str]]:
    """Rules only ever add, so a folder with something to hide in it is shown entry by entry."""
    read = [stage.program.parent, stage.submission, site]
    read += packages.entries(("numpy", *launch.packages)).values()
    shown, listed = _interpreter()
    gpu = interpreter.gpu_files() if launch.gpu else []
    return {
        "read": [str(path) for path in (*read, *shown, *gpu)],
        "listed": [str(path) for path in listed],
        "write": [str(stage.scratch)],
        "devices": list(_DEVICES),
        "driven": [*interpreter.gpu_devices(), "/proc/self/task"] if launch.gpu else [],
    }


@cache
def _interpreter() -> tuple[list[Path], list[Path]]:
    """What to read and what only to list of the system and the interpreter."""
    read: list[Path] = []
    listed: list[Path] = []
    hidden = set(interpreter.installed_packages())
    for path in interpreter.needed_files():
        _show(path.resolve(), hidden, read, listed)
    return read, listed


def _show(path: Path, hidden: set[Path], read: list[Path], listed: list[Path]) -> None:
    if path in hidden:
        return
    if not any(path in place.parents for place in hidden):
        read.append(path)
        return
    listed.append(path)
    for entry in path.iterdir():
        _show(entry, hidden, read, listed)
