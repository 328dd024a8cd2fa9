"""Trapline challenges as a verifiers v1 taskset, graded by Trapline in a sandbox on this machine.

A policy answers with whole files in fenced code blocks, or edits the workspace if its harness has
tools. Choose the reward with `--env.taskset.task.reward quick` (default) or `grade`.
"""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import verifiers.v1 as vf

from trapline.arena.export.environment import (
    Graded,
    RewardKind,
    files_of_reply,
    grade_answer,
    grade_solution,
)

ROWS = Path(__file__).with_name("tasks.json")
SOLUTION = "solution.py"
#: Lists the files that belong to an answer: no hidden ones, none of more than 512 KiB.
LIST = r"find . -type f \( -name '*.py' -o -name '*.md' \) -size -512k -not -path '*/.*' -print0"
MOST_FILES, MOST_BYTES = 40, 512 << 10


class TraplineData(vf.TaskData):
    """One challenge: the workspace it starts from, and how noisy its reward is."""

    challenge: str
    title: str
    difficulty: str
    digest: str
    starter: dict[str, str]
    noise: dict[str, float]


class TraplineState(vf.State):
    """The grade of a rollout, once it is finalized."""

    graded: Graded | None = None


class TraplineTaskConfig(vf.TaskConfig):
    reward: RewardKind = "quick"
    """quick: cases and findings, in seconds; grade: with measurements and the answer's own tests"""
    seed: int | None = None
    """seed of the inputs; None: secret ones, others for other bytes (right for training)"""


class TraplineTask(vf.Task[TraplineData, TraplineState, TraplineTaskConfig]):
    """Writes the workspace, grades what the policy leaves there or replies."""

    async def setup(self, runtime: vf.Runtime) -> None:
        for name, text in self.data.starter.items():
            await runtime.write(name, text.encode())

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        files = await self._changed_files(runtime) or files_of_reply(trace.last_reply)
        trace.state.graded = await grade_answer(
            self.data.challenge, files, self.config.reward, self.config.seed
        )

    async def _changed_files(self, runtime: vf.Runtime) -> dict[str, str]:
        """The workspace's files if the policy changed the solution there; otherwise none."""
        listed = await runtime.run(["sh", "-c", LIST], {})
        names = [name for name in listed.stdout.split("\0") if name][:MOST_FILES]
        found: dict[str, str] = {}
        for name in names:
            text = await runtime.read(name, max_bytes=MOST_BYTES)
            found[str(PurePosixPath(name))] = text.decode(errors="replace")
        return {} if found.get(SOLUTION) == self.data.starter[SOLUTION] else found

    async def validate(self, runtime: vf.Runtime) -> bool:  # noqa: ARG002
        """Whether the gold solution gets the full quick reward on this machine."""
        return (await grade_solution(self.data.challenge)).reward == 1.0

    @vf.reward(weight=1.0)
    async def trapline(self, trace: vf.Trace) -> float:
        return graded(trace).reward

    @vf.metric
    async def dimensions(self, trace: vf.Trace) -> dict[str, float]:
        """One metric a dimension (correctness, traps, …), and what grading cost."""
        return graded(trace).metrics()

    @vf.metric
    async def reward_noise(self) -> float:
        """The share of known bugs that would get full reward."""
        return self.data.noise[self.config.reward]


def graded(trace: vf.Trace) -> Graded:
    if trace.state.graded is None:
        raise vf.TaskError("the rollout was scored before it was finalized")
    return trace.state.graded


class TraplineConfig(vf.TasksetConfig):
    task: TraplineTaskConfig = TraplineTaskConfig()


class TraplineTaskset(vf.Taskset[TraplineTask, TraplineConfig]):
    """The challenges of `tasks.json`."""

    def load(self) -> Iterator[TraplineTask]:
        for row in json.loads(ROWS.read_text(encoding="utf-8")):
            data = TraplineData(id=row["challenge"], name=row["challenge"], **row)
            yield TraplineTask(data, self.config.task)
