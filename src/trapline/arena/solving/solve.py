"""Fills workspaces: asks a model or starts an agent, keeps what was said, resumes at the cell."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trapline.arena.challenge import Challenge
from trapline.arena.deploy import deploy
from trapline.arena.errors import ArenaError
from trapline.arena.executor import run_all
from trapline.arena.field import RECORD
from trapline.arena.record import Record
from trapline.arena.redact import Redactor
from trapline.arena.solving.transcript import FinalMetrics
from trapline.arena.store import write_durably


class SolveRecord(Record):
    """What is known about how an answer came about; lies beside it and is never graded."""

    harness: str
    model: str
    harness_version: str = ""
    #: solved, no_answer (the model gave none) or infra_error (it never got to speak).
    status: str
    reason: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """One workspace to fill."""

    entrant: str
    challenge: Challenge
    attempt: int
    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / self.entrant / self.challenge.id / f"attempt-{self.attempt}"


class Solver(Protocol):
    """Whatever can fill a workspace: an endpoint, an agent."""

    @property
    def harness(self) -> str: ...

    @property
    def model(self) -> str: ...

    def version(self) -> str: ...

    def solve(self, assignment: Assignment) -> tuple[str, str, FinalMetrics, float]:
        """Status, reason, cost and seconds. A dead provider raises `ArenaError`."""
        ...


def solve_all(
    assignments: list[Assignment],
    solver: Solver,
    workers: int,
    budget_usd: float | None = None,
    on_done: Callable[[Assignment, SolveRecord], None] = lambda a, r: None,
) -> Iterator[tuple[Assignment, SolveRecord]]:
    """Every assignment that has no answer yet, several at a time, while the money lasts."""
    spent = [read_record(a).cost_usd or 0.0 for a in assignments if is_done(a)]
    version = solver.version()
    waiting = [assignment for assignment in assignments if not is_done(assignment)]

    def work(assignment: Assignment) -> SolveRecord:
        if budget_usd is not None and sum(spent) >= budget_usd:
            reason = f"the budget of {budget_usd:g} USD was spent"
            return _record(solver, version, "infra_error", reason)
        record = solve_one(assignment, solver, version)
        spent.append(record.cost_usd or 0.0)
        on_done(assignment, record)
        return record

    yield from run_all(work, waiting, workers)


def solve_one(assignment: Assignment, solver: Solver, version: str) -> SolveRecord:
    """A fresh workspace, filled; what came of it is on disk when this returns."""
    workspace = assignment.workspace
    shutil.rmtree(workspace, ignore_errors=True)
    deploy(assignment.root, assignment.challenge, assignment.entrant, assignment.attempt)
    try:
        status, reason, cost, seconds = solver.solve(assignment)
        record = _record(solver, version, status, reason, cost, seconds)
    except ArenaError as error:
        record = _record(solver, version, "infra_error", str(error))
    path = workspace / RECORD
    path.parent.mkdir(exist_ok=True)
    write_durably(path, record.model_dump_json(indent=1) + "\n")
    return record


def is_done(assignment: Assignment) -> bool:
    """Whether the model has had its say; a dead provider's cell is tried again."""
    path = assignment.workspace / RECORD
    return path.is_file() and read_record(assignment).status != "infra_error"


def read_record(assignment: Assignment) -> SolveRecord:
    return SolveRecord.model_validate(json.loads((assignment.workspace / RECORD).read_text()))


def _record(
    solver: Solver,
    version: str,
    status: str,
    reason: str,
    cost: FinalMetrics | None = None,
    seconds: float = 0.0,
) -> SolveRecord:
    cost = cost or FinalMetrics()
    return SolveRecord(
        harness=solver.harness,
        model=solver.model,
        harness_version=version,
        status=status,
        # It travels into cells and reports, and may quote what a provider or an agent printed.
        reason=Redactor().redact(reason)[:500],
        input_tokens=cost.total_prompt_tokens,
        output_tokens=cost.total_completion_tokens,
        cost_usd=cost.total_cost_usd,
        seconds=round(seconds, 1),
    )
