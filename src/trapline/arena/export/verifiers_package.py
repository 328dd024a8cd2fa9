"""Packages for verifiers (v1): one for each challenge, and one with all of them."""

import json
from collections.abc import Sequence
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.export.environment import TaskRow, task_row
from trapline.arena.export.noise import reward_noise
from trapline.arena.export.own_package import own_version

_TASKSET = Path(__file__).with_name("templates") / "verifiers_taskset.py"
ALL = "trapline_all"

_PROJECT = """\
[project]
name = "{name}"
version = "{version}"
description = {description}
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
keywords = ["verifiers", "trapline", "llm-systems", "reinforcement-learning"]
dependencies = ["trapline>={version}", "verifiers>=0.4,<0.5"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
_INIT = '''\
"""{description}"""

from {package}.taskset import TraplineTaskset

__all__ = ["TraplineTaskset"]
'''
_README = """\
# {name}

{description} A taskset for verifiers v1; answers are graded by Trapline in a sandbox on the machine
that runs the environment.

```console
$ pip install .
$ vf-validate {name} --runtime.type subprocess      # the gold solution gets 1.0, the starter less
$ vf-eval {name} --env.agent.harness.id null --env.agent.runtime.type subprocess --model MODEL
```

## Reward

From 0 to 1. `--env.taskset.task.reward quick` (default) counts contract cases and findings, with no
timing. `grade` is Trapline's whole grade, with precision, memory, speed and the answer's own tests.
A failed contract case caps the reward at 0.69, a critical finding at 0.86. Empty answers and cheats
get 0. Where the machine cannot judge, the rollout fails with an error and gets no reward.

## Reward noise

A mutant is the gold solution with one known bug. Noise is the share of mutants that would get full
reward: the metric `reward_noise`.

| task | difficulty | quick | grade |
|---|---|---|---|
{rows}
{left_out}
Other metrics: each dimension from 0 to 1 (`correctness`, `traps`, `robustness`, …), `findings`,
`hack`, `grading_seconds`, `waiting_seconds`.

An agent whose harness has tools works in a workspace with the starter: if it changes `solution.py`
there, the workspace is graded, otherwise the files of its last reply. Do not give the agent access
to an installation of Trapline: it contains the gold solutions.
"""


def write_verifiers(challenges: Sequence[Challenge], out: Path) -> list[Path]:
    """One package folder a challenge, and `trapline_all` where there are several."""
    packages = {f"trapline_{challenge.id}": [challenge] for challenge in challenges}
    if len(challenges) > 1:
        packages[ALL] = list(challenges)
    for package in packages:
        if (out / package).exists():
            raise UsageError(f"{out / package} exists already and is left alone")
    rows = {challenge.id: task_row(challenge.id) for challenge in challenges}
    return [
        _write_package(out / package, members, [rows[one.id] for one in members])
        for package, members in packages.items()
    ]


def _write_package(folder: Path, challenges: list[Challenge], rows: list[TaskRow]) -> Path:
    package = folder.name
    what = challenges[0].plan.title if len(challenges) == 1 else "All challenges of Trapline"
    facts = {
        "package": package,
        "name": package.replace("_", "-"),
        "version": own_version(),
    }
    inside = folder / package
    inside.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        _PROJECT.format(**facts, description=json.dumps(f"{what}: a verifiers environment.")),
        encoding="utf-8",
    )
    table = "\n".join(map(_noise_row, challenges))
    (folder / "README.md").write_text(
        _README.format(**facts, description=f"{what}.", rows=table, left_out=_left_out(challenges)),
        encoding="utf-8",
    )
    (inside / "__init__.py").write_text(
        _INIT.format(**facts, description=f"{what}."), encoding="utf-8"
    )
    (inside / "taskset.py").write_text(_TASKSET.read_text(encoding="utf-8"), encoding="utf-8")
    (inside / "tasks.json").write_text(
        json.dumps([row.model_dump(mode="json") for row in rows], indent=1) + "\n",
        encoding="utf-8",
    )
    return folder


def _noise_row(challenge: Challenge) -> str:
    quick = reward_noise(challenge, checks_only=True).sentence()
    whole = reward_noise(challenge, checks_only=False).sentence()
    return f"| `{challenge.id}` | {challenge.plan.difficulty} | {quick} | {whole} |"


def _left_out(challenges: Sequence[Challenge]) -> str:
    """What the quick reward does not run, for each challenge where it lets more bugs through."""
    lines = []
    for one in challenges:
        quick, whole = (reward_noise(one, checks_only=only) for only in (True, False))
        if quick.survivors > whole.survivors:
            lines.append(
                f"\n`quick` leaves out {len(one.left_out_of_quick)} slow checks of `{one.id}`, "
                "so that "
                f"{quick.survivors - whole.survivors} more of its known bugs get full reward. "
                "Train with `grade` where that matters.\n"
            )
    return "".join(lines)
