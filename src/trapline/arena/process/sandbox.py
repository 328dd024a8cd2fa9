"""Starts a program beside a submission at an isolation level; finds out which levels there are."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from trapline.arena.errors import ArenaError, MissingError
from trapline.arena.process.isolation import (
    bubblewrap,
    cgroups,
    interpreter,
    landlock,
    process,
    stage,
)
from trapline.arena.process.isolation.cgroups import Group
from trapline.arena.process.isolation.plan import Command
from trapline.arena.process.isolation.running import RunningSandbox
from trapline.arena.process.isolation.spec import Launch, SandboxLimits
from trapline.arena.process.isolation.stage import SandboxStage, scratch_folder
from trapline.arena.record import LEVELS, Level

__all__ = [
    "Launch",
    "RunningSandbox",
    "SandboxLimits",
    "bounds_processes",
    "launch",
    "probe",
    "scratch_folder",
    "why_not",
]

Way = Callable[[Launch, SandboxStage], Command]
#: Ways to reach a level, best first; the first that works on this machine is taken.
_WAYS: dict[Level, tuple[Way, ...]] = {
    "bubblewrap": (bubblewrap.by_user, bubblewrap.by_namespace),
    "landlock": (landlock.by_user, landlock.by_namespace),
    "process": (process.command,),
}
#: These run a sandbox of root as another user, whose processes the kernel counts.
_BY_USER = (bubblewrap.by_user, landlock.by_user)
_SELFTEST = Path(process.__file__).with_name("selftest.py")
_SELFTEST_SECONDS = 30.0


def probe() -> tuple[Level, ...]:
    """The levels this machine offers, strongest first, found by trying each once."""
    return tuple(level for level in reversed(LEVELS) if not why_not(level))


def why_not(level: Level) -> str:
    """Why a level is not to be had here; empty where it is."""
    way, reasons = _way(level)
    return "" if way is not None else "; ".join(reasons)


def launch(spec: Launch) -> RunningSandbox:
    """Starts `spec.program`; it may still be starting when this returns."""
    way, reasons = _way(spec.level, spec.gpu and bool(interpreter.gpu_devices()))
    if way is None:
        raise MissingError(f"isolation level {spec.level!r} is missing: {'; '.join(reasons)}")
    return _launch(spec, way)


def bounds_processes(level: Level, *, gpu: bool = False) -> bool:
    """Whether the number of processes inside is limited here: a control group does that, and a
    limit of the user, unless that is root."""
    by_limit = os.geteuid() != 0 or _way(level, gpu)[0] in _BY_USER
    return level != "process" and (cgroups.counts_processes() or by_limit)


@cache
def _way(level: Level, gpu: bool = False) -> tuple[Way | None, tuple[str, ...]]:
    reasons: list[str] = []
    for way in _WAYS[level]:
        try:
            wrong = _try(level, way, gpu)
        except ArenaError as error:
            wrong = str(error)
        if not wrong:
            return way, ()
        reasons.append(wrong)
    return None, tuple(dict.fromkeys(reasons))


def _try(level: Level, way: Way, gpu: bool) -> str:
    """What is wrong with this way to start, found by starting the self-test."""
    with scratch_folder() as folder:
        hidden = [__file__, str(Path(__file__).parents[1] / "__init__.py"), "/etc/passwd"]
        Path(folder, "hidden.json").write_text(json.dumps(hidden), encoding="utf-8")
        Path(folder, "gpu.json").write_text(json.dumps(gpu), encoding="utf-8")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            running = _launch(Launch(level, _SELFTEST, Path(folder), theirs, gpu=gpu), way)
            try:
                report = _report(ours, running)
            finally:
                running.kill()
    return _objection(level, report)


def _report(channel: socket.socket, running: RunningSandbox) -> dict[str, Any]:
    channel.settimeout(_SELFTEST_SECONDS)
    with channel.makefile() as lines:
        try:
            line = lines.readline()
        except TimeoutError:
            line = ""
    if not line:
        running.kill()
        raise ArenaError(f"did not start ({running.output().strip()[-300:]})")
    report: dict[str, Any] = json.loads(line)
    return report


def _objection(level: Level, report: dict[str, Any]) -> str:
    if not report["numpy"]:
        return "NumPy cannot be imported inside"
    if report["cuda"]:
        return f"CUDA does not start inside: {report['cuda']}"
    if level == "process":
        return ""
    if report["readable"]:
        return f"it can read {', '.join(report['readable'])}"
    for power in ("trapline", "socket", "writable", "signals"):
        if report[power]:
            return f"the self-test had the power {power!r}"
    return "it runs as root" if report["user"] == 0 else ""


def _launch(spec: Launch, way: Way) -> RunningSandbox:
    prepared = SandboxStage(spec.program, spec.submission)
    group = Group(spec.limits, spec.without)
    try:
        command = way(spec, prepared)
        started = _spawner().submit(_start, spec, command, prepared, group).result()
    except BaseException:
        group.remove()
        prepared.remove()
        raise
    spec.channel.close()
    for descriptor in command.descriptors:
        os.close(descriptor)
    return RunningSandbox(started, prepared, group)


def _start(
    spec: Launch, command: Command, prepared: SandboxStage, group: Group
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        group.entering(command.arguments),
        env=command.environment,
        cwd=prepared.scratch,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(spec.channel.fileno(), *command.descriptors),
        start_new_session=True,
    )


@cache
def _spawner() -> ThreadPoolExecutor:
    """One thread starts everything: a child that dies with its parent dies with that thread."""
    stage.remove_leftovers()
    cgroups.remove_leftovers()
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


os.register_at_fork(after_in_child=_spawner.cache_clear)
