"""Runs a piece of hostile code at an isolation level and says what it achieved."""

import contextlib
import json
import os
import socket
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trapline.arena.process import sandbox
from trapline.arena.process.sandbox import Launch, RunningSandbox, SandboxLimits

ATTACKER = Path(__file__).with_name("attacker.py")


@dataclass
class Attack:
    """A started attack; `outcome` waits for its report."""

    running: RunningSandbox
    channel: socket.socket

    def outcome(self) -> dict[str, Any]:
        self.channel.settimeout(60)
        with self.channel.makefile() as lines:
            line = lines.readline()
        return json.loads(line) if line else {"error": "died", "why": self.running.output()}


@pytest.fixture
def start(tmp_path):
    """`start(level, code, without=…)`: the attack, running."""
    with contextlib.ExitStack() as cleanup:

        def begin(level, code, without=(), limits=None, **others):
            need(level)
            (tmp_path / "attack.py").write_text(textwrap.dedent(code))
            ours, theirs = socket.socketpair()
            cleanup.callback(ours.close)
            launch = Launch(
                level,
                ATTACKER,
                tmp_path,
                theirs,
                limits or SandboxLimits(),
                without=frozenset(without),
                **others,
            )
            running = sandbox.launch(launch)
            cleanup.callback(running.kill)
            return Attack(running, ours)

        yield begin


@pytest.fixture
def attack(start):
    """`attack(level, code, without=…)`: what the code's `attempt()` returned or raised."""
    return lambda *args, **kwargs: start(*args, **kwargs).outcome()


def need(level):
    """Skips where the machine lacks a level; where nothing may be skipped, fails."""
    missing = sandbox.why_not(level)
    if missing and os.environ.get("TRAPLINE_NO_SKIP") == "1":
        pytest.fail(f"level {level} is missing: {missing}")
    if missing:
        pytest.skip(f"level {level} is missing: {missing}")
