"""The privileges that `inside.py` gives up, and the command that starts it."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from trapline.arena.process.isolation import seccomp
from trapline.arena.process.isolation.interpreter import FLAGS, PYTHON
from trapline.arena.process.isolation.limits import rlimits
from trapline.arena.process.isolation.spec import Launch

#: Users that no account has, one a sandbox in turn: limits on processes count by user.
_FIRST_USER, _USERS = 61184, 4000
_launches = count()


@dataclass(frozen=True)
class SandboxPlan:
    """Paths are those seen inside."""

    program: str
    site: str
    rlimits: dict[str, int]
    #: Keep a parent that adopts orphans, so that none escapes us.
    supervise: bool = False
    #: Unshare everything first; not where bubblewrap has done it.
    namespaces: bool = False
    #: Keep the numbers of processes: the CUDA driver looks itself up in /proc.
    own_numbers: bool = True
    scratch: str = ""
    scratch_mb: int = 0
    #: Real user to become; None to keep the present one.
    user: int | None = None
    #: Arguments of `inside.restrict_files`.
    landlock: dict[str, list[str]] | None = None
    drop_capabilities: bool = False
    #: The filter in hexadecimal.
    seccomp: str = ""


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environment: dict[str, str]
    #: Descriptors it inherits beside the channel; closed here once it has them.
    descriptors: tuple[int, ...] = ()


def start_inside(plan: SandboxPlan, inside: str, launch: Launch, submission: str) -> list[str]:
    """The interpreter, and in it `inside.py` with this plan."""
    channel = str(launch.channel.fileno())
    return [PYTHON, *FLAGS, inside, json.dumps(asdict(plan)), channel, submission]


def unused_user() -> int:
    return _FIRST_USER + (os.getpid() * 97 + next(_launches)) % _USERS


def common(launch: Launch) -> dict[str, Any]:
    """The defences that every level above `process` has."""
    filtered = (
        "" if "seccomp" in launch.without else seccomp.program(platform.machine(), launch.gpu).hex()
    )
    limited = {} if "rlimits" in launch.without else rlimits(launch.limits, launch.gpu)
    if limited:
        limited["RLIMIT_NPROC"] = launch.limits.processes
    return {"rlimits": limited, "seccomp": filtered, "drop_capabilities": True}
