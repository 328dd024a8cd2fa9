"""Agent command lines: a table, a version probe, and one run inside a workspace."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trapline.arena.errors import ArenaError, MissingError, UsageError
from trapline.arena.record import Record, Track
from trapline.arena.solving.transcript import Metrics

#: By track.
_WRITE = {
    "cpu": "solution.py, its tests and ANALYSIS.md",
    "gpu": "solution.py or solution.cu",
}
_PROBE_SECONDS = 60
_MOST_OUTPUT = 64 << 20


class Usage(Record):
    """Where an agent's stream reports usage: an event type, and paths into that event."""

    event: str
    input: str
    output: str
    cost: str = ""


class Agent(Record):
    package: str = ""
    #: The newest version whose --help lists all flags below.
    tested: str = ""
    version: list[str] = []
    command: list[str]
    stdin: bool = False
    #: Commands whose output lists the flags, and the flags that must be among them.
    help: list[list[str]] = []
    flags: list[str] = []
    usage: Usage | None = None


@dataclass(frozen=True)
class AgentRun:
    output: str
    code: int
    seconds: float
    timed_out: bool


@cache
def table() -> dict[str, Agent]:
    text = Path(__file__).with_name("agents.toml").read_text(encoding="utf-8")
    return {name: Agent.model_validate(entry) for name, entry in tomllib.loads(text).items()}


def find(name: str) -> Agent:
    if name not in table():
        raise UsageError(f"no agent {name!r}; known agents: {', '.join(table())}")
    return table()[name]


def from_template(template: str) -> Agent:
    """Any other program: a command line with {prompt} and, optionally, {model}."""
    command = shlex.split(template)
    if not command:
        raise UsageError("the agent command is empty: give a program and its arguments")
    return Agent(command=command, stdin=not any("{prompt}" in part for part in command))


def probe(agent: Agent) -> str:
    program = agent.command[0]
    if shutil.which(program) is None:
        hint = f" (npm install -g {agent.package})" if agent.package else ""
        raise MissingError(f"the agent's program {program!r} is not installed{hint}")
    if not agent.version:
        return ""
    done = subprocess.run(agent.version, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    if done.returncode:
        raise ArenaError(f"{' '.join(agent.version)} failed: {done.stderr.strip()[:200]}")
    return done.stdout.strip().splitlines()[0][:100] if done.stdout.strip() else ""


def instruction(track: Track) -> str:
    """What the agent is told; the task itself lies in its folder."""
    return (
        f"Read prompt.md in this folder and do what it asks. Write {_WRITE[track]} into this "
        "folder. Work in this folder only."
    )


def run(agent: Agent, workspace: Path, model: str, seconds: float, told: str) -> AgentRun:
    """Runs the agent in the workspace, in a process group that ends at the time limit."""
    fill = {"{prompt}": told, "{model}": model}
    command = [_filled(part, fill) for part in agent.command]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=workspace,
        stdin=subprocess.PIPE if agent.stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    given = told.encode() if agent.stdin else None
    try:
        output, _ = process.communicate(given, timeout=seconds)
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        _end_group(process)
    if timed_out:
        output, _ = process.communicate()
    text = output[-_MOST_OUTPUT:].decode(errors="replace")
    return AgentRun(text, process.returncode, time.monotonic() - started, timed_out)


def spent(agent: Agent, output: str) -> Metrics | None:
    """Tokens and dollars, summed over all events that report them; None if none does."""
    if agent.usage is None:
        return None
    events = [event for event in _events(output) if event.get("type") == agent.usage.event]
    told = [event for event in events if _number(event, agent.usage.output) is not None]
    if not told:
        return None
    costs = [_number(event, agent.usage.cost) for event in told]
    return Metrics(
        prompt_tokens=int(sum(_number(event, agent.usage.input) or 0 for event in told)),
        completion_tokens=int(sum(_number(event, agent.usage.output) or 0 for event in told)),
        cost_usd=None if None in costs else sum(cost or 0.0 for cost in costs),
    )


def _events(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        try:
            event = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _number(event: dict[str, Any], path: str) -> float | None:
    found: Any = event
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if type(found) in (int, float) and math.isfinite(found) else None


def _filled(part: str, fill: dict[str, str]) -> str:
    for mark, value in fill.items():
        part = part.replace(mark, value)
    return part


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
