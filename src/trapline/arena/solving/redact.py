"""Makes transcripts safe to publish: removes names, places and keys.

Five sources of what to hide: patterns of well-known keys, identities and paths, the actual values
in this environment, names that the text itself gives away (`redact_names`), words that stand after
a telling name (`password: …`), and long strings too random to be prose. Every replacement is a
fixed mark in angle brackets, which no rule matches again, so redacting twice changes nothing and a
second scan must find nothing.
"""

import contextlib
import getpass
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from trapline.arena.record import Record
from trapline.arena.solving.redact_names import pattern_of

#: Environment variables whose value is always a secret.
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|DSN)", re.IGNORECASE)
_SHORTEST_VALUE = 6
_SHORTEST_RANDOM = 24
#: Bits per character: prose has about 4, base64 of noise nearly 6, hexadecimal noise nearly 4.
_RANDOM_BITS, _RANDOM_HEX_BITS = 4.3, 3.0


class Found(Record):
    kind: str
    line: int
    #: Its first characters only: a finding must not repeat the secret.
    hint: str


def _rule(kind: str, pattern: str, flags: int = 0) -> tuple[str, re.Pattern[str]]:
    return kind, re.compile(pattern, flags)


#: First parts of absolute paths that every machine has, that the rules for homes hide, or that are
#: those of web addresses.
_SYSTEM = (
    "home|Users|root|export/home|var/home|bin|boot|dev|etc|lib|lib32|lib64|nix|proc|sbin|sys|usr|"
    "var/(?:cache|lib|log|run)|System|Library|Applications|api|v[0-9]+"
)
_PART = r"[^\s/'\"`:;,()<>\\|*?{}\[\]=&%]+"

_RULES = (
    _rule(
        "private-key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
        re.DOTALL,
    ),
    _rule("key", r"\bsk-[A-Za-z0-9_-]{16,}"),
    _rule("key", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
    _rule("key", r"\b(?:glpat|xox[abprs]|hf|npm|pypi|dop_v1|shpat|r8|gsk)[-_][A-Za-z0-9_-]{12,}"),
    _rule("key", r"\b(?:AKIA|ASIA|AIza|ya29\.)[A-Za-z0-9_-]{12,}"),
    _rule("key", r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    _rule("token", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _rule("token", r"(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"),
    _rule("token", r"(?<=[Bb]asic )[A-Za-z0-9+/]{8,}={0,2}"),
    _rule("password", r"(?<=://)[^\s/:@<>]+:[^\s/@<>]+(?=@)"),
    _rule(
        "email",
        r"\b[A-Za-z0-9][A-Za-z0-9._%+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b",
    ),
    _rule("user", r"\b[a-z_][a-z0-9_-]{1,31}(?=@[A-Za-z][A-Za-z0-9-]{2,62}(?:[:\s~$#]))"),
    _rule("host", r"(?<=>@)[A-Za-z][A-Za-z0-9-]{2,62}(?=[:\s~$#])"),
    _rule(
        "home",
        r"(?:\\?/|%2[Ff])(?:(?:export|var)(?:\\?/|%2[Ff]))?(?:home|Users)(?:\\?/|%2[Ff])"
        r"[^\s/'\"`:;,)<>\\%]+",
    ),
    _rule("home", r"(?<![\w/])/root(?=[/\s'\"`:;,)]|$)"),
    _rule("home", r"[A-Za-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/)[^\s\\/'\"<>:;,|*?]+"),
    _rule("home", r"(?:(?<![A-Za-z0-9-])|(?<=\b[A-Za-z]-))-(?:home|Users)-[A-Za-z0-9_.]+"),
    _rule("path", rf"(?<![\w./~<>%$)\]}}\\-])/(?!(?:{_SYSTEM})(?:/|\b)){_PART}(?:/{_PART})+/?"),
    _rule("path", rf"(?<=file://)/(?!(?:{_SYSTEM})(?:/|\b)){_PART}(?:/{_PART})+/?"),
    _rule(
        "path",
        r"\b[A-Za-z]:(?:\\{1,4}|/)(?!Windows\b|Program Files|\\|/)[\w.$ -]*[\w$-]"
        r"(?:(?:\\{1,4}|/)[\w.$-]+)+",
    ),
    _rule("address", r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)"),
    _rule("address", r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"),
)
_NAMED_SECRET = re.compile(
    r"(?P<name>\b[\w-]*(?:api[_-]?key|secret|token|passw(?:or)?d|passphrase|credential)s?\b"
    r"[\"']?\s*[=:]\s*[\"']?)(?P<value>(?=[^\s\"'<>,;]*\d)[^\s\"'<>,;(){}\[\]]{6,})",
    re.IGNORECASE,
)
_CANDIDATE = re.compile(rf"[A-Za-z0-9+/_=-]{{{_SHORTEST_RANDOM},}}")
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Redactor:
    """Hides what identifies this machine, its user, and everybody whom it has learned of."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    names: tuple[str, ...] = field(default_factory=lambda: machine_names())
    #: Names that a document gives away, and names that the caller asks to hide everywhere.
    learned: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()

    def learning(self, names: Iterable[str]) -> "Redactor":
        """The same redactor, which also hides these names."""
        return replace(self, learned=self.learned.union(names))

    @cached_property
    def _values(self) -> list[tuple[str, str]]:
        """Literal texts of this machine, longest first, so that a part never hides the whole."""
        secrets = {(value, "key") for value in self._secrets}
        home = self.environment.get("HOME", "")
        homes = {(home, "home")} if len(home) > 1 else set()
        people = {(name, "name") for name in self.names if len(name) >= 4}
        return sorted(secrets | homes | people, key=lambda pair: (-len(pair[0]), pair))

    @cached_property
    def _secrets(self) -> list[str]:
        found = {
            value
            for name, value in self.environment.items()
            if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_VALUE
        }
        return sorted(found, key=lambda value: (-len(value), value))

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        """In the order of their use: names come last, so that a home path is hidden whole."""
        people = sorted(self.learned | self.asked, key=lambda name: (-len(name), name))
        return [
            *(
                (kind, re.compile(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])"))
                for value, kind in self._values
            ),
            *_RULES,
            *(("name", pattern_of(name, anywhere=name in self.asked)) for name in people),
        ]

    def hide_secrets(self, text: str) -> str:
        """Removes only the environment's secrets: a raw transcript stays raw without keys."""
        for value in self._secrets:
            text = text.replace(value, "<key>")
        return text

    def redact(self, text: str, hidden: Counter[str] | None = None) -> str:
        """The text without what must not be published; `hidden` counts the parts by kind."""
        counts = Counter[str]() if hidden is None else hidden
        for kind, pattern in self._patterns:
            text, count = pattern.subn(f"<{kind}>", text)
            counts[kind] += count
        text, count = _NAMED_SECRET.subn(lambda match: f"{match['name']}<secret>", text)
        counts["secret"] += count
        return _CANDIDATE.sub(_counting_random(counts), text)

    def scan(self, text: str) -> list[Found]:
        """Findings that remain; empty for a redacted text."""
        found = [
            _found(kind, text, match.start(), match.group())
            for kind, pattern in self._patterns
            for match in pattern.finditer(text)
        ]
        found += [
            _found("secret", text, match.start(), match["value"])
            for match in _NAMED_SECRET.finditer(text)
        ]
        return found + [
            _found("random", text, match.start(), match.group())
            for match in _CANDIDATE.finditer(text)
            if is_random(match.group())
        ]


def _found(kind: str, text: str, start: int, matched: str) -> Found:
    """A third of a short text tells enough to find it and too little to know it."""
    shown = min(4, max(1, len(matched) // 3))
    return Found(kind=kind, line=_line(text, start), hint=matched[:shown] + "…")


def _counting_random(counts: Counter[str]) -> Callable[[re.Match[str]], str]:
    def replaced(match: re.Match[str]) -> str:
        if not is_random(match.group()):
            return match.group()
        counts["random"] += 1
        return "<random>"

    return replaced


def machine_names() -> tuple[str, ...]:
    host = socket.gethostname()
    found = {host, host.split(".")[0]}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        found.add(getpass.getuser())
    return tuple(sorted(found - {"root", "localhost"}))


def is_random(text: str) -> bool:
    """Whether the characters look random, like a key. Digests of content are kept."""
    if _DIGEST.fullmatch(text):
        return False
    has_digit = any(c.isdigit() for c in text)
    if re.fullmatch(r"[0-9a-fA-F]+", text):
        return has_digit and _entropy(text) >= _RANDOM_HEX_BITS
    mixed = has_digit and any(c.isupper() for c in text) and any(c.islower() for c in text)
    return mixed and _entropy(text) >= _RANDOM_BITS


def _entropy(text: str) -> float:
    counts = Counter(text)
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
