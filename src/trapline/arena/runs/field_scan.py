"""Looks through a field's answers and transcripts for what only the judge, or another, wrote."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from trapline.arena.challenge import Challenge, load
from trapline.arena.judge.contamination import Leak, copies, hidden, joined, leaks_in
from trapline.arena.judge.intake import take_in
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import Record
from trapline.arena.runs.field import RECORD
from trapline.arena.runs.sessions import read_plain

TRANSCRIPT = Path(RECORD).with_name("raw.jsonl")


class Suspicion(Record):
    entrant: str
    challenge: str
    attempt: int
    #: submission or transcript.
    where: str
    leak: Leak


def scan_field(
    entries: Sequence[GradeRequest], trusted: frozenset[str] = frozenset()
) -> list[Suspicion]:
    """Every leak, by challenge and entrant. Trusted entrants may hold the gold answer."""
    found: list[Suspicion] = []
    ordered = sorted(entries, key=lambda entry: (entry.challenge, entry.entrant, entry.attempt))
    for name, group in groupby(ordered, key=lambda entry: entry.challenge):
        challenge, asked = load(name), list(group)
        for entry in asked:
            if entry.entrant not in trusted:
                places = {"submission": _submission(entry), "transcript": transcript(entry.folder)}
                found += [
                    _suspicion(entry, where, leak)
                    for where, text in places.items()
                    for leak in leaks_in(text, hidden(challenge))
                ]
        found += _copies_among(
            [entry for entry in asked if entry.entrant not in trusted], challenge
        )
    return found


def transcript(folder: Path) -> str:
    """The transcript of how an answer was produced; empty where none was kept."""
    return "\n".join(_strings(read_plain(folder / TRANSCRIPT)))


def _strings(text: str) -> Iterator[str]:
    """The text behind JSON lines, however deep they are nested; other lines as they are."""
    for line in text.splitlines():
        parsed = _json(line)
        if parsed is None:
            yield line
        else:
            for inner in _leaves(parsed):
                yield from _strings(inner)


def _json(line: str) -> object:
    """The object or list on this line, None when it holds neither."""
    if not line.lstrip().startswith(("{", "[")):
        return None
    try:
        parsed: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parsed


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def _copies_among(entries: list[GradeRequest], challenge: Challenge) -> list[Suspicion]:
    """One entrant's own attempts may be alike; two entrants' may not."""
    by_name: dict[str, list[GradeRequest]] = {}
    for entry in entries:
        by_name.setdefault(entry.entrant, []).append(entry)
    texts = {name: "\n".join(map(_submission, own)) for name, own in by_name.items()}
    found = []
    for one, other, part in copies(texts, hidden(challenge)):
        for entrant, source in ((one, other), (other, one)):
            leak = Leak(
                kind="copy", source=source, share=round(part, 3), detail=f"a near-copy of {source}"
            )
            found.append(_suspicion(by_name[entrant][0], "submission", leak))
    return found


def _suspicion(entry: GradeRequest, where: str, leak: Leak) -> Suspicion:
    return Suspicion(
        entrant=entry.entrant,
        challenge=entry.challenge,
        attempt=entry.attempt,
        where=where,
        leak=leak,
    )


def _submission(entry: GradeRequest) -> str:
    texts, _ = take_in(entry.folder).texts()
    return joined(texts)
