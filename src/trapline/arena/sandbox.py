"""Starts a program beside a submission at an isolation level; finds out which levels there are."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from trapline.arena.errors import MissingError
from trapline.arena.isolation import process
from trapline.arena.isolation.running import Running
from trapline.arena.isolation.spec import Launch, Limits
from trapline.arena.isolation.stage import Stage, remove_leftovers
from trapline.arena.record import Level

__all__ = ["Launch", "Limits", "Running", "launch", "probe"]

_COMMANDS = {"process": process.command}


def probe() -> tuple[Level, ...]:
    """The levels this machine offers, strongest first, found by trying each once."""
    return ("process",)


def launch(spec: Launch) -> Running:
    """Starts `spec.program`; it may still be starting when this returns."""
    if spec.level not in _COMMANDS:
        raise MissingError(f"isolation level {spec.level!r} is not available on this machine")
    stage = Stage(spec.program, spec.submission)
    try:
        started = _spawner().submit(_start, spec, stage).result()
    except BaseException:
        stage.remove()
        raise
    spec.channel.close()
    return Running(started, stage)


def _start(spec: Launch, stage: Stage) -> "subprocess.Popen[bytes]":
    command, environment = _COMMANDS[spec.level](spec, stage)
    return subprocess.Popen(
        command,
        env=environment,
        cwd=stage.scratch,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(spec.channel.fileno(),),
        start_new_session=True,
    )


@cache
def _spawner() -> ThreadPoolExecutor:
    """One thread starts everything: a child that dies with its parent dies with that thread."""
    remove_leftovers()
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


os.register_at_fork(after_in_child=_spawner.cache_clear)
