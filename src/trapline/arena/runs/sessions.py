"""Session logs of coding agents: what an answer took, in tokens, turns and time.

Claude Code and pi write one JSON object a line, opencode exports one document; streams of the same
agents differ little. All of them say the same few things under different names, so that one reader
looks for any of the names. A log is the entrant's own file: what it says is shown, never scored,
and what cannot be read is left out.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trapline.arena.record import MOST_TOKENS, Origin

MOST_BYTES = 64 << 20
#: Longest name of a model or harness that is shown.
MOST_NAME = 80
_INPUT = ("input_tokens", "input", "prompt_tokens")
_OUTPUT = ("output_tokens", "output", "completion_tokens")
#: Beside the input.
_CACHED = ("cache_read_input_tokens", "cacheRead", "cache.read")
_WRITTEN = ("cache_creation_input_tokens", "cacheWrite", "cache.write")
#: Within the input.
_CACHED_INSIDE = ("cached_input_tokens", "prompt_tokens_details.cached_tokens")
_COST = ("usage.cost.total", "cost", "costUSD")
#: Events of streams that report one reply without a role.
_REPLIES = ("step_finish", "turn.completed")


@dataclass(frozen=True)
class Session:
    harness: str
    model: str
    origin: Origin


@dataclass
class _Reply:
    """One reply of the model; Claude Code repeats it on a line for each of its parts."""

    input: int = 0
    cached: int = 0
    output: int = 0
    usd: float | None = None

    def merge(self, other: "_Reply") -> None:
        self.input = max(self.input, other.input)
        self.cached = max(self.cached, other.cached)
        self.output = max(self.output, other.output)
        known = [usd for usd in (self.usd, other.usd) if usd is not None]
        self.usd = max(known, default=None)


@dataclass
class _Log:
    replies: dict[str, _Reply] = field(default_factory=dict)
    #: Time of each event, and whether it is a person's prompt.
    times: list[tuple[float, bool]] = field(default_factory=list)
    harness: str = ""
    model: str = ""


def read_session(path: Path) -> Session | None:
    return parse_session(read_plain(path))


def read_plain(path: Path) -> str:
    """The text of a plain file that lies beside an answer, "" where there is none.

    An entrant may have put it there: a link could lead anywhere, a pipe has no end, and a file may
    be larger than memory.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            content = file.read(MOST_BYTES + 1)
    except OSError:
        return ""
    return "" if len(content) > MOST_BYTES else content.decode(errors="replace")


def parse_session(text: str) -> Session | None:
    """None where no reply of a model is found."""
    log = _Log()
    for event in _events(text):
        _take(log, event)
    if not log.replies:
        return None
    replies = log.replies.values()
    prices = [reply.usd for reply in replies]
    known = [usd for usd in prices if usd is not None]
    total = sum(known) if len(known) == len(prices) else 0.0
    try:
        origin = Origin(
            input_tokens=sum(reply.input for reply in replies),
            cached_tokens=sum(reply.cached for reply in replies),
            output_tokens=sum(reply.output for reply in replies),
            turns=len(replies),
            seconds=round(_busy(log.times), 1),
            # Agents write 0 for a model whose price they do not know.
            cost_usd=round(total, 6) or None,
        )
    except ValidationError:  # sums that no session reaches
        return None
    return Session(log.harness, log.model, origin)


def _events(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a log, by line, or those in the `messages` of one document."""
    whole = _parsed(text)
    if isinstance(whole, dict) and isinstance(whole.get("messages"), list):
        yield from (event for event in whole["messages"] if isinstance(event, dict))
        return
    if isinstance(whole, list):
        yield from (event for event in whole if isinstance(event, dict))
        return
    for line in text.splitlines():
        event = _parsed(line)
        if isinstance(event, dict):
            yield event


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _take(log: _Log, event: dict[str, Any]) -> None:
    message = next(
        (event[name] for name in ("message", "info", "part") if isinstance(event.get(name), dict)),
        event,
    )
    role = message.get("role")
    is_reply = role == "assistant" or event.get("type") in _REPLIES
    if not is_reply and not isinstance(role, str):
        return
    is_prompt = role == "user" and not _is_tool_result(event, message)
    log.times += [(time, is_prompt) for time in _times(event, message)]
    log.harness = log.harness or _harness(event, message)
    if not is_reply:
        return
    log.model = log.model or shown_name(message.get("model") or message.get("modelID"))
    reply = _reply(event, message)
    if reply is not None:
        key = message.get("id") if isinstance(message.get("id"), str) else ""
        log.replies.setdefault(key or f"line {len(log.replies)}", _Reply()).merge(reply)


def shown_name(told: Any) -> str:
    """A name that a file beside an answer tells: text that can be printed and is not too long."""
    return told[:MOST_NAME] if isinstance(told, str) and told.isprintable() else ""


def _reply(event: dict[str, Any], message: dict[str, Any]) -> _Reply | None:
    """Tokens and price of a reply; None if it tells no tokens."""
    usage = message.get("usage") or message.get("tokens") or event.get("usage")
    if not isinstance(usage, dict) or _first(usage, _OUTPUT) is None:
        return None
    cached, written = _count(usage, _CACHED), _count(usage, _WRITTEN)
    return _Reply(
        input=_count(usage, _INPUT) + cached + written,
        cached=cached + _count(usage, _CACHED_INSIDE),
        output=_count(usage, _OUTPUT) + _count(usage, ("reasoning",)),
        usd=_first(message, _COST),
    )


def _is_tool_result(event: dict[str, Any], message: dict[str, Any]) -> bool:
    """Some logs keep what a tool answered as a message of the user."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return bool(event.get("isMeta")) or any(
        isinstance(part, dict) and part.get("type") == "tool_result" for part in parts
    )


def _harness(event: dict[str, Any], message: dict[str, Any]) -> str:
    if "sessionId" in event and "uuid" in event:
        return "claude"
    if "sessionID" in event or "sessionID" in message:
        return "opencode"
    return "pi" if "parentId" in event else ""


def _times(event: dict[str, Any], message: dict[str, Any]) -> list[float]:
    """Seconds since 1970: when it was written, or when it began and ended."""
    told = event.get("timestamp") or message.get("timestamp")
    if told is not None:
        seconds = _seconds(told)
        return [] if seconds is None else [seconds]
    span = message.get("time")
    ends = (span.get("created"), span.get("completed")) if isinstance(span, dict) else ()
    return [seconds for seconds in map(_seconds, ends) if seconds is not None]


def _seconds(told: Any) -> float | None:
    """From milliseconds or an ISO date."""
    if type(told) in (int, float) and math.isfinite(told) and 0 < told < MOST_TOKENS * 10:
        return float(told) / 1000
    if not isinstance(told, str):
        return None
    try:
        date = datetime.fromisoformat(told)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _busy(times: list[tuple[float, bool]]) -> float:
    """From each prompt to the last event before the next one; a clock set back counts 0."""
    total = 0.0
    begin = end = None
    for time, is_prompt in times:
        if begin is None or end is None or is_prompt:
            total += max(0.0, end - begin) if begin is not None and end is not None else 0.0
            begin = time
        end = time
    return total + (max(0.0, end - begin) if begin is not None and end is not None else 0.0)


def _count(values: dict[str, Any], paths: tuple[str, ...]) -> int:
    return int(_first(values, paths) or 0)


def _first(values: dict[str, Any], paths: tuple[str, ...]) -> float | None:
    """The first of these entries that is a number a log could mean."""
    for path in paths:
        found: Any = values
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if type(found) in (int, float) and 0 <= found <= MOST_TOKENS:
            return float(found)
    return None
