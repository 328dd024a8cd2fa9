"""Measures how long the quick reward takes, and writes the table of docs/environments.md.

    python benchmarks/quick_reward.py            # measures, about 4 minutes on an idle machine
    python benchmarks/quick_reward.py --page     # writes the table from the committed figures

Every answer of the example field and the gold solution are graded one after the other, with three
seeds each; an answer's time is the median.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from trapline.arena.challenge import Challenge, load, load_all
from trapline.arena.export.environment import grade_answer
from trapline.arena.export.noise import Noise, reward_noise
from trapline.arena.runs.field import EXAMPLE_FIELD

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quick_reward.json"
PAGE = ROOT / "docs" / "environments.md"
SEEDS = (1, 2, 3)
HEAD = (
    "| task | reward | noise of `quick` (bound) | noise of `grade` (bound) | "
    "p50 / p95 of `quick`, s |\n|---|---|---|---|---|\n"
)


def answers(challenge: Challenge) -> dict[str, dict[str, str]]:
    """Entrant → files: the gold solution and the answers of the example field."""
    found = {"gold": challenge.solution_files()}
    for folder in sorted(EXAMPLE_FIELD.iterdir()):
        files = {path.name: path.read_text() for path in (folder / challenge.id).glob("*.py")}
        if files:
            found[folder.name] = files
    return found


def measure(names: list[str], seeds: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Challenge → entrant → seconds."""
    seconds: dict[str, dict[str, float]] = {}
    for name in names:
        files = answers(load(name))
        grade(name, files["gold"], 0)  # the first examines the machine
        seconds[name] = {
            entrant: round(statistics.median(grade(name, given, seed) for seed in seeds), 2)
            for entrant, given in files.items()
        }
        print(name, percentiles(seconds[name]), seconds[name], flush=True)
    return seconds


def grade(name: str, files: dict[str, str], seed: int) -> float:
    return asyncio.run(grade_answer(name, files, seed=seed)).seconds


def percentiles(seconds: dict[str, float]) -> str:
    """Median and, of so few answers, the largest."""
    return f"{statistics.median(seconds.values()):.1f} / {max(seconds.values()):.1f}"


def note(record: dict[str, Any]) -> str:
    """How the seconds were measured."""
    return (
        "Seconds are wall time of the gold solution's and the example entrants' answers (4 to 8 a "
        "task, so p95 is the largest), graded one after\n"
        f"the other on {record['cores']} cores, at load {record['load'][0]:.1f} before.\n"
        "`python benchmarks/quick_reward.py` measures them and writes this table.\n"
    )


def table(seconds: dict[str, dict[str, float]]) -> str:
    rows = []
    for challenge in load_all().values():
        quick, whole = (_share(reward_noise(challenge, checks_only=only)) for only in (True, False))
        times = percentiles(seconds[challenge.id])
        rows.append(f"| `{challenge.id}` | 0 to 1 | {quick} | {whole} | {times} |\n")
    return HEAD + "".join(rows)


def _share(noise: Noise) -> str:
    return f"{noise.survivors} of {noise.mutants} = {noise.share:.1%} ({noise.bound:.1%})"


def page(text: str, record: dict[str, Any]) -> str:
    """The page with a new table, and the paragraph below it, in place of the old ones."""
    before, rest = text.split(HEAD.partition("\n")[0], 1)
    _, _, after = rest.split("\n\n", 2)
    return f"{before}{table(record['seconds'])}\n{note(record)}\n{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--challenge", action="append", help="only this one; writes nothing")
    asked = parser.parse_args()
    if asked.challenge:
        measure(asked.challenge, SEEDS[:1])
        return
    if not asked.page:
        machine = {"cores": os.cpu_count(), "system": platform.platform()}
        record = {**machine, "load": os.getloadavg(), "seconds": measure([*load_all()], SEEDS)}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
