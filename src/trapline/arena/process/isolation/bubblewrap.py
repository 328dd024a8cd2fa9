"""Level `bubblewrap`: a file system of its own with nothing of ours in it."""

import os
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from trapline.arena.errors import MissingError
from trapline.arena.process.isolation import interpreter, packages
from trapline.arena.process.isolation.inside import NOBODY
from trapline.arena.process.isolation.limits import environment
from trapline.arena.process.isolation.plan import (
    Command,
    SandboxPlan,
    common,
    start_inside,
    unused_user,
)
from trapline.arena.process.isolation.spec import MEGABYTE, Launch
from trapline.arena.process.isolation.stage import SandboxStage

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SCRATCH, _SITE, _PROGRAM, _SUBMISSION = "/tmp", "/site", "/program", "/submission"  # noqa: S108
#: What a test shows on purpose, to see that it is hidden otherwise.
_ARENA = Path(__file__).resolve().parents[2]


def by_user(launch: Launch, stage: SandboxStage) -> Command:
    """For root: build the file system as root, then become a user that owns nothing anywhere."""
    unshared = ["ipc", "pid", "net", "uts", "cgroup-try"]
    powers = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    options = ["--cap-drop", "ALL", *_each("--cap-add", powers)]
    return _command(launch, stage, unshared, options, unused_user())


def by_namespace(launch: Launch, stage: SandboxStage) -> Command:
    """Without root: a user namespace without capabilities, in which no other can be made."""
    unshared = ["user", "ipc", "pid", "net", "uts", "cgroup-try"]
    options = ["--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    return _command(launch, stage, unshared, [*options, "--disable-userns"], None)


def _command(
    launch: Launch, stage: SandboxStage, unshared: list[str], options: list[str], user: int | None
) -> Command:
    unshared = [name for name in unshared if name not in launch.without]
    lines = [f"--unshare-{name}" for name in unshared]
    lines += ["--die-with-parent", *options, *_files(launch, stage), "--chdir", _SCRATCH]
    plan = SandboxPlan(
        program=f"{_PROGRAM}/{stage.program.name}", site=_SITE, user=user, **common(launch)
    )
    inside = f"{_PROGRAM}/{stage.inside.relative_to(stage.program.parent)}"
    started = start_inside(plan, inside, launch, _SUBMISSION)
    # Options travel beside the command line, which every process inside can read in /proc.
    described = os.memfd_create("bubblewrap")
    with open(described, "wb", closefd=False) as file:
        file.write(b"\0".join(line.encode() for line in lines) + b"\0")
    os.lseek(described, 0, os.SEEK_SET)
    return Command(
        [_executable(), "--args", str(described), "--", *started],
        environment(_SCRATCH, launch.gpu),
        (described,),
    )


def _files(launch: Launch, stage: SandboxStage) -> list[str]:
    lines = [*_writable(launch), "--proc", "/proc"]
    for device in _DEVICES:
        lines += ["--dev-bind", device, device]
    for device in interpreter.gpu_devices() if launch.gpu else ():
        lines += ["--dev-bind", device, device]
    if "files" in launch.without:
        lines += _shown({str(_ARENA): _ARENA})
    # /proc is a new one inside.
    gpu = [path for path in interpreter.gpu_files() if path.parts[1] != "proc" and launch.gpu]
    for path in (*interpreter.needed_files(), *gpu):
        lines += _shown({str(path): path})
    for path in interpreter.installed_packages():
        lines += ["--perms", "0755", "--tmpfs", str(path), "--remount-ro", str(path)]
    entries = packages.entries(("numpy", *launch.packages))
    lines += _shown({f"{_SITE}/{name}": real for name, real in entries.items()})
    lines += _shown({_PROGRAM: stage.program.parent, _SUBMISSION: stage.submission})
    return [*lines, "--remount-ro", "/dev", "--remount-ro", "/"]


def _writable(launch: Launch) -> list[str]:
    """Two small folders in memory; nothing written there reaches a disk."""
    size = ["--size", str(launch.scratch_mb * MEGABYTE), "--perms", "1777"]
    return ["--tmpfs", "/dev", *size, "--tmpfs", "/dev/shm", *size, "--tmpfs", _SCRATCH]  # noqa: S108


def _shown(places: dict[str, Path]) -> list[str]:
    """Read-only, with parent folders that a stranger may walk through; links stay links."""
    lines: list[str] = []
    for inside, real in places.items():
        for parent in reversed(Path(inside).parents[:-1]):
            lines += ["--perms", "0755", "--dir", str(parent)]
        if real.is_symlink() and str(real) == inside:
            lines += ["--symlink", os.readlink(real), inside]
        else:
            lines += ["--ro-bind", str(real), inside]
    return lines


def _each(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


@cache
def _executable() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise MissingError("bubblewrap (bwrap) is not installed")
    return found
