"""A field of entrants on disk: `<entrant>/<challenge>/solution.py`, further attempts in
`attempt-2`, …

A `field.toml` with `gold = true` adds the gold solutions as the entrant `gold`; `profile = "…"`
names the prompt that the field answers, `[profiles]` the prompts of single entrants, `[rounds]`
the order in which groups of challenges were set, and `track = "gpu"` says that the answers run on
a GPU.
"""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import StrictBool, TypeAdapter, ValidationError

import trapline
from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.judge.intake import ATTEMPT, SESSION, Intake
from trapline.arena.judge.request import GradeRequest, entry_files
from trapline.arena.record import Origin, Record, Track
from trapline.arena.runs.sessions import read_plain, read_session, shown_name

#: Written beside an answer by the harness that produced it: harness, model, status.
RECORD = ".trapline/record.json"
#: The entrants that ship with the package; `trapline demo` grades them.
_PACKAGE = Path(trapline.__file__).resolve().parent
#: Inside an installed package; beside the sources in a clone.
EXAMPLE_FIELD = next(
    (path for path in (_PACKAGE / "example_field",) if path.is_dir()),
    _PACKAGE.parents[1] / "examples" / "field",
)
#: Beside the record: the conversation that led to the answer, redacted.
PUBLIC = "transcript.json"
#: The model gave no answer, by its record.
UNANSWERED = ("no_answer", "refused", "truncated")
#: Beside the entrants' folders; may be missing.
SETTINGS = "field.toml"
#: The entrant that the arena brings itself.
GOLD = "gold"


class FieldSettings(Record):
    """`field.toml`, whole."""

    gold: StrictBool = False
    #: The prompt that every entrant answers, as a profile; empty for the challenges' own.
    profile: str = ""
    #: Entrant → its profile, where it differs.
    profiles: dict[str, str] = {}
    #: The track of all answers; None where the field does not say it.
    track: Track | None = None
    #: Name of a round → its challenges, the first round first.
    rounds: dict[str, list[str]] = {}

    def of(self, entrant: str) -> str:
        return self.profiles.get(entrant, self.profile)


def find_entries(
    field: Path,
    challenges: list[str],
    gold: bool | None = None,
    profile: str | None = None,
    track: Track = "cpu",
    on_skipped: Callable[[str], None] | None = None,
) -> list[GradeRequest]:
    """Every answer in the field, for these challenges or for all.

    An answer to an unknown challenge is refused; with `on_skipped`, which is told a sentence, it
    is left out, so that one entrant cannot stop the others.

    `profile` is the prompt that all of them answer; None: as the field's `field.toml` says.

    With `gold`, the gold solutions answer too, as the entrant `gold`, wherever an entrant does; a
    field with a folder of that name keeps its own. None: as the field's `field.toml` says.
    """
    if not field.exists():
        raise UsageError(f"no such folder: {field}")
    if not field.is_dir():
        raise UsageError(
            f"{field} is a file; a field is a folder <entrant>/<challenge>/solution.py"
        )
    settings = read_settings(field)
    refuse_other_track(field, settings, track)
    if profile is not None:
        settings = FieldSettings(gold=settings.gold, profile=profile)
    skipped = _without_challenge(field, track)
    if skipped and on_skipped is None:
        raise UsageError(skipped[0])
    wanted = [load(name, track).id for name in challenges] or list(load_all(track))
    entries = [
        entry
        for entrant, name in _entrants(field).items()
        for challenge in wanted
        for entry in _entries_of(entrant, name, challenge, settings.of(entrant.name), track)
    ]
    if not entries:
        none = f"{field} holds no <entrant>/<challenge>/ folder of a challenge to grade"
        raise UsageError(skipped[0] if skipped else none)
    if on_skipped is not None:
        for sentence in skipped:
            on_skipped(sentence)
    with_gold = settings.gold if gold is None else gold
    if with_gold and not (field / GOLD).is_dir():
        entries += _gold_entries(entries, settings.profile, track)
        entries.sort(key=lambda entry: entry.entrant)
    return entries


def _without_challenge(field: Path, track: Track) -> list[str]:
    """A sentence for each folder of an answer whose name is not a challenge's."""
    folders = {solution.parent for solution in field.glob("[!.]*/[!.]*/solution.*")}
    known = ", ".join(load_all(track))
    return [
        f"{printable_name(str(folder))} does not name a challenge; the challenges are: {known}"
        for folder in sorted(folders)
        if folder.name not in load_all(track)
    ]


def _entrants(field: Path) -> dict[Path, str]:
    """The entrants' folders and the names that are shown, which no two share."""
    folders = [path for path in field.iterdir() if path.is_dir() and not path.name.startswith(".")]
    names = {folder: folder.name for folder in folders if folder.name.isprintable()}
    for folder in sorted(set(folders) - names.keys()):
        name = printable_name(folder.name)
        while name in names.values():  # another entrant is called what the escapes look like
            name += "_"
        names[folder] = name
    return dict(sorted(names.items()))


def _gold_entries(entries: list[GradeRequest], profile: str, track: Track) -> list[GradeRequest]:
    """The gold solutions, or a profile's faultless controls, of every challenge answered."""
    answered = list(dict.fromkeys(entry.challenge for entry in entries))
    having = [name for name in answered if not _no_profile(name, profile, track)]
    judges = [load(name, track, profile) for name in having]
    return [
        GradeRequest(GOLD, judge.id, 1, judge.control, profile=profile, track=track)
        for judge in judges
        if not judge.not_run
    ]


def refuse_other_track(field: Path, settings: FieldSettings, track: Track) -> None:
    if settings.track not in (None, track):
        fix = "add --track gpu" if settings.track == "gpu" else "leave out --track gpu"
        raise UsageError(
            f"{field} holds answers of the {settings.track} track ({field / SETTINGS} says so): "
            f"{fix}, or give another folder"
        )


def read_settings(field: Path) -> FieldSettings:
    path = field / SETTINGS
    if not path.is_file():
        return FieldSettings()
    try:
        settings = FieldSettings.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except ValidationError:
        raise UsageError(
            f'{path} may say `gold = true`, `track = "gpu"`, `profile = "name"`, a table '
            '[profiles] of lines entrant = "name" and a table [rounds] of lines '
            '"round 1" = ["challenge", …], and nothing else'
        ) from None
    for name, challenges in settings.rounds.items():
        for challenge in challenges:
            if challenge not in load_all():
                known = ", ".join(load_all())
                raise UsageError(
                    f"{path}: {name} names {challenge!r}, and the challenges are: {known}"
                )
    return settings


def _no_profile(challenge: str, profile: str, track: Track) -> str:
    """Why answers to this challenge cannot be judged by this profile; empty where they can."""
    try:
        load(challenge, track, profile)
    except UsageError as error:
        return str(error)
    return ""


def _entries_of(
    entrant: Path, name: str, challenge: str, profile: str, track: Track
) -> list[GradeRequest]:
    folder = entrant / challenge
    if not folder.is_dir():
        return []
    first = any((folder / file).is_file() for file in entry_files(profile, track))
    attempts = {
        int(match.group(1)): path
        for path in folder.iterdir()
        if path.is_dir() and (match := ATTEMPT.fullmatch(path.name))
    }
    faults = dict.fromkeys(attempts, "")
    if 1 in attempts and first:
        faults[1] = "the folder holds two first attempts: solution.py and attempt-1"
    if not attempts or first:
        attempts[1] = folder
    if name != entrant.name:
        fault = "the name of the entrant's folder cannot be printed; rename the folder"
        faults = dict.fromkeys(attempts, fault)
    entries = [
        GradeRequest(
            name,
            challenge,
            number,
            path,
            **_made_by(path),
            profile=profile,
            track=track,
            # Without its files: what is wrong is the entrant's fault, and no verdict on them.
            intake=Intake({}, faults[number]) if faults.get(number) else None,
        )
        for number, path in sorted(attempts.items())
    ]
    if reason := _no_profile(challenge, profile, track):
        # Such a cell is not graded, and says why; the rest of the field is.
        entries = [replace(entry, profile="", trouble=reason) for entry in entries]
    return entries


def printable_name(name: str) -> str:
    """The name with escapes for control characters and for bytes that are not UTF-8."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _made_by(folder: Path) -> dict[str, Any]:
    """The record beside the answer; where it tells no tokens, completed by the session's log."""
    told = _record(folder / RECORD)
    origin: Origin | None = told.get("origin")
    if origin is not None and origin.output_tokens:
        return told
    logs = (folder / RECORD).with_name(SESSION), folder / SESSION
    session = next((found for found in map(read_session, logs) if found is not None), None)
    if session is None:
        return told
    spent = session.origin.model_dump(exclude_defaults=True)
    return {
        **told,
        "harness": told.get("harness") or session.harness,
        "model": told.get("model") or session.model,
        "origin": (origin or Origin()).model_copy(update=spent),
    }


def _record(path: Path) -> dict[str, Any]:
    """Harness, model, origin and trouble, as far as the record beside the answer gives them."""
    try:
        record = json.loads(read_plain(path))
        status, reason = record.get("status"), printable_name(str(record.get("reason", "")))
        return {
            "harness": shown_name(record.get("harness")),
            "model": shown_name(record.get("model")),
            "origin": _origin(record),
            "trouble": reason if status == "infra_error" else "",
            "unanswered": f"{status}: {reason}" if status in UNANSWERED else "",
            "transcript": _transcript(path.with_name(PUBLIC)),
        }
    except (ValueError, AttributeError, RecursionError):
        return {}


def _transcript(path: Path) -> list[dict[str, str]]:
    """Who said what, as the harness wrote it for publication; empty where it did not."""
    try:
        return TypeAdapter(list[dict[str, str]]).validate_json(read_plain(path))
    except ValueError:
        return []


def _origin(record: dict[str, Any]) -> Origin | None:
    """What the record says about the making of the answer; None where it has another form."""
    known = {name: record[name] for name in Origin.model_fields if name in record}
    try:
        origin = Origin.model_validate(known) if known else None
        return origin if origin is None or _is_printable(origin.model_dump()) else None
    except ValidationError:
        return None


def _is_printable(value: Any) -> bool:
    """Whether every text in it can be printed, and so be written into a cell."""
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(_is_printable(part) for pair in value.items() for part in pair)
    return True
