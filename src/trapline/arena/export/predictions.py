"""SWE-bench-style predictions: one JSON line an answer, with a patch against the starter."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import UsageError
from trapline.arena.export.patches import make_patch
from trapline.arena.judge.intake import take_in
from trapline.arena.judge.request import GradeRequest
from trapline.arena.solving.deploy import read_starter


class Prediction(BaseModel):
    """One answer; further keys that other tools write are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    instance_id: str
    model_name_or_path: str
    model_patch: str


def predict(entry: GradeRequest) -> Prediction:
    """An answer as a patch. Several attempts are several lines with the same id."""
    texts, _ = take_in(entry.folder).texts()
    texts.pop("prompt.md", None)
    return Prediction(
        instance_id=entry.challenge,
        model_name_or_path=entry.entrant,
        model_patch=make_patch(read_starter(load(entry.challenge)), texts),
    )


def write_predictions(entries: Iterable[GradeRequest], path: Path) -> int:
    lines = [predict(entry).model_dump_json() + "\n" for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read_predictions(path: Path) -> list[tuple[Challenge, int, Prediction]]:
    """Each answer with its challenge and its number among the model's attempts."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    attempts: dict[tuple[str, str], int] = {}
    found = []
    for number, prediction in _parse(path, text):
        challenge = _challenge(path, number, prediction.instance_id)
        key = (prediction.model_name_or_path, challenge.id)
        attempts[key] = attempts.get(key, 0) + 1
        found.append((challenge, attempts[key], prediction))
    if not found:
        raise UsageError(f"{path} holds no predictions")
    return found


def _parse(path: Path, text: str) -> Iterator[tuple[int, Prediction]]:
    """JSON lines, or one JSON list, as SWE-bench takes both."""
    if text.lstrip().startswith("["):
        rows = list(enumerate(_json(path, 1, text), 1))
    else:
        rows = [
            (number, _json(path, number, line))
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
    for number, row in rows:
        try:
            yield number, Prediction.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"{path}, prediction {number}: {where} {first['msg']}") from None


def _json(path: Path, number: int, text: str) -> "list[object]":
    try:
        parsed: list[object] = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}, line {number} is not valid JSON: {error}") from None
    return parsed


def _challenge(path: Path, number: int, instance_id: str) -> Challenge:
    try:
        return load(instance_id)
    except UsageError as error:
        raise UsageError(f"{path}, prediction {number}: {error}") from None
