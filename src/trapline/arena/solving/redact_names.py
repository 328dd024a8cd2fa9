"""Learns from a text what people and machines in it are called.

A transcript of another machine gives its user away in many places, but always first in a few: the
path of a home folder, the owner in a listing, a shell's prompt, a commit's author. A name learned
there is hidden everywhere.
"""

import re
from collections.abc import Iterable, Iterator

#: Keys of JSON objects whose value is a name.
NAME_KEYS = frozenset({"user", "username", "user_name", "login", "logname", "hostname"})
#: Accounts and words that identify nobody. As words they stay; their home folders are hidden.
_GENERIC = """
    root user users username admin administrator guest nobody daemon default shared public system
    staff wheel adm sudo docker node runner ubuntu debian fedora centos alpine arch vscode coder
    codespace jovyan gitpod vagrant pi ec2-user azureuser git www-data localhost local host home dir
    page directory path name login none null true false undefined unknown anonymous me you human
    assistant agent model bot claude codex opencode gpt
    app api bin lib src tmp var log out env opt etc dev doc docs test tests data work code main
    project projects workspace build
    max min sum dim row col key len map set get put run new old all any and the for not has use pip
    npm numpy torch python self will may art mark
"""
GENERIC = frozenset(_GENERIC.split())
_NAME = r"[A-Za-z_][\w.-]{1,63}"
#: Up to three words, as in `kim`, `kim.lee` or `Kim Lee`.
_FULL_NAME = r"[^\W\d_][\w.'-]*(?: [\w.'-]+){0,2}"
_SLASH = r"(?:\\?/|%2[Ff])"
#: The path of a home folder up to the user's name; `/mnt/c/Users` is Windows seen from Linux.
_HOMES = (
    rf"(?<![\w.-])(?:{_SLASH}(?:export|var|mnt{_SLASH}[a-z]|[a-z]))?{_SLASH}(?:home|Users){_SLASH}"
)
_SOURCES = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (rf"{_HOMES}([^\s/'\"`:;,)<>\\%|*?&$#{{}}()\[\]=]+)", 0),
        (r"[A-Za-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/)([^\s\\/'\"<>:;,|*?]+)", 0),
        # A path with hyphens for slashes, as agents name the folders of their sessions.
        (r"(?:(?<![A-Za-z0-9-])|(?<=\b[A-Za-z]-))-(?:home|Users)-([A-Za-z0-9_.]+)", 0),
        # `-rw-r--r-- 1 kim staff 120`
        (rf"^[-dlbcps][-rwxsStT]{{9}}[@+.]?\s+\d+\s+({_NAME})\s+{_NAME}\s+\d", re.MULTILINE),
        # `kim@laptop:~$`: the user and the machine
        (rf"\b({_NAME})@{_NAME}:(?=[~/])", 0),
        (rf"\b{_NAME}@({_NAME}):(?=[~/])", 0),
        (rf"\b(?:USER|LOGNAME|USERNAME)=[\"']?({_NAME})", 0),
        (
            r"[\"'](?:user|user_?name|login)[\"']\s*[:=]\s*[\"']([^\"'<>\n]{2,64})[\"']",
            re.IGNORECASE,
        ),
        (rf"\b(?:username|login)\s*=\s*[\"']({_NAME})[\"']", 0),
        (rf"^(?:Author|Committer|Signed-off-by|Co-authored-by):\s+({_FULL_NAME})\s+<", re.M),
        (rf"\buser\.name[= ]+[\"']?({_FULL_NAME})", 0),
    )
)


def learn_names(text: str) -> frozenset[str]:
    """The names that this text gives away."""
    found = (match.group(1) for source in _SOURCES for match in source.finditer(text))
    return frozenset(_worth_hiding(found))


def names_in_value(value: str) -> frozenset[str]:
    """The names in the value of one of NAME_KEYS; none if it is not a name but a sentence."""
    value = value.strip()
    is_name = len(value) <= 64 and re.fullmatch(_FULL_NAME, value)
    return frozenset(_worth_hiding([value])) if is_name else frozenset()


def _worth_hiding(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        name = name.strip(" .-_'")
        if len(name) < 2 or name.isdigit():
            continue
        if name.lower() not in GENERIC:
            yield name
        parts = name.split()
        if len(parts) > 1:
            yield from (p for p in parts if len(p) > 3 and p[0].isupper())


def pattern_of(name: str, *, anywhere: bool = False) -> re.Pattern[str]:
    """Where a name counts: as a whole word; a name of two letters only beside a separator."""
    escaped = re.escape(name)
    if len(name) > 2 or anywhere:
        whole = rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
    else:
        whole = rf"(?:(?<=[/\\~])|(?<=-)){escaped}(?=[/\\@-])|\b{escaped}(?=@)"
    return re.compile(whole, re.IGNORECASE)
