"""A challenge as an environment for training: files in, a reward from 0 to 1 out.

The packages for verifiers, NeMo Gym and OpenEnv call this module; it depends on none of them.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

from trapline.arena.challenge import load
from trapline.arena.errors import ArenaError
from trapline.arena.export.grading import dimension_scores, grade_folder
from trapline.arena.export.noise import reward_noise
from trapline.arena.record import Record
from trapline.arena.runs.executor import cores
from trapline.arena.solving.answers import AnswerError, parse_files, write_files
from trapline.arena.solving.deploy import copy_workspace, read_starter
from trapline.arena.solving.solvers import FORMAT

#: quick: cases and findings, in seconds. grade: the whole grade, with measurements and own tests.
RewardKind = Literal["quick", "grade"]


class TaskRow(Record):
    """What a training framework needs to know about a challenge."""

    challenge: str
    title: str
    difficulty: str
    prompt: str
    system_prompt: str
    #: The files of the workspace, path → text.
    starter: dict[str, str]
    digest: str
    #: The share of mutants that would get full reward, by kind of reward.
    noise: dict[RewardKind, float]


class Graded(Record):
    """The reward of one answer, with what it rests on."""

    #: 0 to 1; a correct answer without findings gets 1, a cheat and an empty answer 0.
    reward: float
    state: str
    reason: str
    findings: list[str]
    #: 0 to 1 each: correctness, traps, robustness and, for `grade`, the measured dimensions.
    dimensions: dict[str, float]
    #: Seconds of grading, and of waiting for a free core before.
    seconds: float
    waited: float

    def metrics(self) -> dict[str, float]:
        return {
            **self.dimensions,
            "findings": float(len(self.findings)),
            "hack": float(self.state == "hack"),
            "grading_seconds": self.seconds,
            "waiting_seconds": self.waited,
        }


def task_row(challenge_id: str) -> TaskRow:
    challenge = load(challenge_id)
    return TaskRow(
        challenge=challenge.id,
        title=challenge.plan.title,
        difficulty=challenge.plan.difficulty,
        prompt=challenge.prompt,
        system_prompt=FORMAT,
        starter=read_starter(challenge),
        digest=challenge.digest,
        noise={
            "quick": round(reward_noise(challenge, checks_only=True).share, 4),
            "grade": round(reward_noise(challenge, checks_only=False).share, 4),
        },
    )


def files_of_reply(reply: str) -> dict[str, str]:
    """The files of a model's reply; empty where it has none that can be used."""
    try:
        return parse_files(reply)
    except AnswerError:
        return {}


async def grade_answer(
    challenge_id: str,
    files: Mapping[str, str],
    kind: RewardKind = "quick",
    seed: int | None = None,
) -> Graded:
    """Grades in a sandbox on this machine, as many answers at once as it has cores.

    The inputs are secret and depend on the answer's bytes, or are those of `seed`: the same answer
    gets the same quick reward again.

    Raises `ArenaError` where the machine cannot judge: the answer is not at fault.
    """
    return await asyncio.wrap_future(
        _graders().submit(_grade, challenge_id, dict(files), kind, seed, time.perf_counter())
    )


async def grade_solution(challenge_id: str, kind: RewardKind = "quick") -> Graded:
    """The gold solution, which must get the full quick reward."""
    return await grade_answer(challenge_id, load(challenge_id).solution_files(), kind)


@cache
def _graders() -> ThreadPoolExecutor:
    """Threads suffice: other processes do the work."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="trapline-grader")


def _grade(
    challenge_id: str, files: dict[str, str], kind: RewardKind, seed: int | None, asked: float
) -> Graded:
    challenge = load(challenge_id)
    if not files:
        return _no_answer("the reply contains no file that can be used", asked)
    with tempfile.TemporaryDirectory(prefix="trapline-environment-") as name:
        workspace = Path(name)
        copy_workspace(challenge, workspace)
        try:
            write_files(workspace, files)
        except AnswerError as error:
            return _no_answer(str(error), asked)
        quick = kind == "quick"
        cell = grade_folder(challenge, workspace, "policy", checks_only=quick, seed=seed).cell
    if cell.score is None:
        raise ArenaError(f"not measured: {cell.reason}")
    return Graded(
        reward=cell.score / 100.0,
        state=cell.state,
        reason=cell.reason,
        findings=[finding.cause for finding in cell.findings],
        dimensions={name: score / 100.0 for name, score in dimension_scores(cell).items()},
        seconds=cell.seconds,
        waited=max(0.0, time.perf_counter() - asked - cell.seconds),
    )


def _no_answer(reason: str, asked: float) -> Graded:
    return Graded(
        reward=0.0,
        state="no_answer",
        reason=reason,
        findings=[],
        dimensions={},
        seconds=0.0,
        waited=time.perf_counter() - asked,
    )
