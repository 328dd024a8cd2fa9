"""The report as Markdown documents."""

from collections.abc import Mapping
from pathlib import Path

from trapline.arena.report.catalog import ChallengeInfo
from trapline.arena.report.markdown import (
    comprehensive,
    deep_dive,
    reproduction,
    said,
    three_way,
    two_way,
)
from trapline.arena.report.reading import Reading
from trapline.arena.report.runview import RunView

__all__ = ["documents", "write_markdown"]


def documents(run: RunView, told: Mapping[str, ChallengeInfo] | None = None) -> dict[str, str]:
    reading = Reading(run, told)
    found = {"comprehensive.md": comprehensive.document(reading)}
    ranked = len(reading.ranking.standings)
    if ranked >= 2:
        found["2-way.md"] = two_way.document(reading)
    if ranked >= 3:
        found["3-way.md"] = three_way.document(reading)
    if reading.executed:
        for challenge in reading.field.challenges:
            slug = reading.field.challenge_slugs[challenge]
            found[f"challenge-{slug}.md"] = deep_dive.document(reading, challenge)
    if run.reproduction:
        found["reproduction.md"] = reproduction.document(reading)
    if page := said.document(run):
        found["said-and-measured.md"] = page
    return found


def write_markdown(
    run: RunView, out: Path, told: Mapping[str, ChallengeInfo] | None = None
) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in documents(run, told).items():
        path = out / name
        path.write_text(text, encoding="utf-8", errors="replace")
        paths.append(path)
    return paths
