"""What an exported Inspect package calls: samples from its file, our grader as the scorer.

Imports Inspect at the top: only a folder that `inspect eval` runs imports this module.
"""

import tempfile
from pathlib import Path

import anyio
from inspect_ai import Task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate, system_message
from inspect_ai.util import concurrency

from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import ArenaError
from trapline.arena.export.grading import grade_folder, score_values, trap_states
from trapline.arena.record import Cell
from trapline.arena.solving.answers import AnswerError, parse_files, write_files
from trapline.arena.solving.deploy import copy_workspace
from trapline.arena.solving.solvers import FORMAT


def challenges_task(samples: Path, challenge: str = "", *, full: bool = False) -> Task:
    dataset = json_dataset(str(samples))
    if challenge:
        wanted = load(challenge).id
        dataset = dataset.filter(lambda sample: sample.id == wanted, name=wanted)
    return Task(
        dataset=dataset,
        solver=[system_message(FORMAT), generate()],
        scorer=trapline_grade(full),
    )


@scorer(metrics={"*": [mean(), stderr()]}, name="trapline")
def trapline_grade(full: bool = False) -> Scorer:
    """Our grade of the files in the reply: 0 to 100, with the dimensions beside it."""

    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001 - Inspect's contract
        challenge = load(str(state.sample_id))
        # One at a time: cells that are timed side by side disturb each other.
        async with concurrency("trapline", 1):
            cell, note = await anyio.to_thread.run_sync(
                _grade, challenge, state.output.completion, str(state.model), full
            )
        if cell.score is None:
            raise ArenaError(f"not measured: {cell.reason}")
        return Score(
            value=score_values(cell),
            answer=note or "files were taken from the reply",
            explanation=f"{cell.letter}, {cell.state}: {cell.reason}",
            metadata=_metadata(cell, state, challenge),
        )

    return score


def _grade(challenge: Challenge, reply: str, entrant: str, full: bool) -> tuple[Cell, str]:
    """The starter with the reply's files over it, as `trapline solve` would leave it."""
    with tempfile.TemporaryDirectory(prefix="trapline-inspect-") as name:
        workspace, note = Path(name), ""
        copy_workspace(challenge, workspace)
        try:
            write_files(workspace, parse_files(reply))
        except AnswerError as error:
            note = str(error)
        return grade_folder(challenge, workspace, entrant, full=full).cell, note


def _metadata(cell: Cell, state: TaskState, challenge: Challenge) -> dict[str, object]:
    return {
        "state": cell.state,
        "letter": cell.letter,
        "isolation": cell.isolation,
        "traps": trap_states(cell),
        "same_challenge": (state.metadata or {}).get("challenge_digest") == challenge.digest,
        "submission_digest": cell.submission_digest,
    }
