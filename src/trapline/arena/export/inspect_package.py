"""An Inspect task package: a folder that `inspect eval` runs, with our challenges as samples."""

import json
from collections.abc import Iterable
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.judge.contamination import canary

TASK_FILE, SAMPLES_FILE = "tasks.py", "samples.jsonl"

_TASKS = '''\
"""Trapline's challenges as an Inspect task; the grade is Trapline's, and so is the sandbox.

    pip install "trapline[inspect]"
    inspect eval tasks.py --model openai/my-model
    inspect eval tasks.py --model openai/my-model -T challenge=kv_cache --epochs 5
"""

from pathlib import Path

from inspect_ai import Task, task
from trapline.arena.export.inspect_tasks import challenges_task


@task
def trapline(challenge: str = "", full: bool = False) -> Task:
    """All challenges of this folder, or the one that is named."""
    return challenges_task(Path(__file__).with_name("samples.jsonl"), challenge, full=full)
'''


def write_package(challenges: Iterable[Challenge], out: Path) -> list[Path]:
    paths = [out / TASK_FILE, out / SAMPLES_FILE]
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} exists already and is left alone")
    out.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(_TASKS, encoding="utf-8")
    paths[1].write_text(
        "".join(json.dumps(_sample(one)) + "\n" for one in challenges), encoding="utf-8"
    )
    return paths


def _sample(challenge: Challenge) -> dict[str, object]:
    return {
        "id": challenge.id,
        "input": challenge.prompt,
        "target": "",
        "metadata": {
            "title": challenge.plan.title,
            "difficulty": challenge.plan.difficulty,
            "challenge_digest": challenge.digest,
            "canary": canary(challenge.id),
        },
    }
