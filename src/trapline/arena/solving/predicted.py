"""Fills workspaces from patches: SWE-bench-style predictions."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trapline.arena.export.patches import PatchError, apply_patch
from trapline.arena.export.predictions import read_predictions
from trapline.arena.solving.answers import AnswerError, write_files
from trapline.arena.solving.deploy import check_entrant, read_starter
from trapline.arena.solving.solve import Assignment, Outcome, Solver
from trapline.arena.solving.transcript import FinalMetrics


@dataclass(frozen=True)
class PatchSolver:
    """One model's patches, by challenge and attempt."""

    model: str
    patches: dict[tuple[str, int], str]
    harness: str = "predictions"
    #: The patches cost nothing here.
    tells_cost: bool = False

    def version(self) -> str:
        return "1"

    @property
    def settings(self) -> dict[str, Any]:
        return {"provider": self.harness}

    def solve(self, assignment: Assignment) -> Outcome:
        """A patch that does not apply or leaves the workspace counts as no answer."""
        started = time.monotonic()
        patch = self.patches[assignment.challenge.id, assignment.attempt]
        starter = read_starter(assignment.challenge)
        status, reason = "solved", ""
        try:
            files = apply_patch(starter, patch)
            write_files(assignment.workspace, files)
            for name in starter.keys() - files.keys():
                (assignment.workspace / name).unlink()
        except (PatchError, AnswerError) as error:
            status, reason = "no_answer", str(error)
        return Outcome(status, reason, FinalMetrics(), time.monotonic() - started)


def assign_predictions(
    path: Path, field: Path, wanted: list[str]
) -> list[tuple[Solver, list[Assignment]]]:
    """Each model of a predictions file with the workspaces its patches fill."""
    solvers: dict[str, PatchSolver] = {}
    work: dict[str, list[Assignment]] = {}
    for challenge, attempt, prediction in read_predictions(path):
        if wanted and challenge.id not in wanted:
            continue
        model = prediction.model_name_or_path
        solver = solvers.setdefault(model, PatchSolver(model, {}))
        solver.patches[challenge.id, attempt] = prediction.model_patch
        assignment = Assignment(entrant_of(model), challenge, attempt, field)
        work.setdefault(model, []).append(assignment)
    return [(solvers[model], work[model]) for model in solvers]


def entrant_of(model: str) -> str:
    """The folder name of a model: slashes and colons become hyphens."""
    return check_entrant(model.replace("/", "-").replace(":", "-"))
