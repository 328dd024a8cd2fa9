"""Fills workspaces: asks a model or runs an agent, keeps transcripts, resumes per cell."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.record import Origin
from trapline.arena.runs.executor import run_all
from trapline.arena.runs.field import RECORD
from trapline.arena.runs.store import write_durably
from trapline.arena.solving.deploy import deploy
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.transcript import FinalMetrics, write_public

#: The cost and the seconds of what gave no answer.
NOTHING = (FinalMetrics(), 0.0)


class SolveRecord(Origin):
    """How an answer was made; stored beside it and never graded."""

    harness: str
    model: str
    reason: str = ""


class Outcome(NamedTuple):
    #: solved; no_answer, refused or truncated: the model gave none.
    status: str
    reason: str
    cost: FinalMetrics
    seconds: float
    turns: int = 0
    model_version: str = ""
    sampling: Mapping[str, float | int | str] = MappingProxyType({})


@dataclass(frozen=True)
class Assignment:
    entrant: str
    challenge: Challenge
    attempt: int
    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / self.entrant / self.challenge.id / f"attempt-{self.attempt}"


class Solver(Protocol):
    @property
    def harness(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def tells_cost(self) -> bool: ...

    def version(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]:
        """What is the same for all answers: provider, price_usd, limits."""
        ...

    def solve(self, assignment: Assignment) -> Outcome:
        """A dead provider raises `ArenaError`."""
        ...


def solve_all(
    assignments: list[Assignment],
    solver: Solver,
    workers: int,
    budget_usd: float | None = None,
    on_done: Callable[[Assignment, SolveRecord], None] = lambda a, r: None,
) -> Iterator[tuple[Assignment, SolveRecord]]:
    """Solves all assignments without an answer, several at a time, within the budget."""
    if budget_usd is not None and not solver.tells_cost:
        raise UsageError(
            "--budget-usd needs the cost of an answer: give --input-usd and --output-usd for an "
            "endpoint, or use an agent that reports its cost"
        )
    spent = [read_record(a).cost_usd or 0.0 for a in assignments if is_done(a)]
    version = solver.version()
    waiting = [assignment for assignment in assignments if not is_done(assignment)]

    def work(assignment: Assignment) -> SolveRecord:
        if budget_usd is not None and sum(spent) >= budget_usd:
            reason = f"the budget of {budget_usd:g} USD was spent"
            return _record(solver, version, Outcome("infra_error", reason, *NOTHING))
        record = solve_one(assignment, solver, version)
        spent.append(record.cost_usd or 0.0)
        on_done(assignment, record)
        return record

    yield from run_all(work, waiting, workers)


def solve_one(assignment: Assignment, solver: Solver, version: str) -> SolveRecord:
    """Makes and fills a workspace; its record is on disk when this returns."""
    workspace = assignment.workspace
    path = workspace / RECORD
    # Begun by us and not finished; `deploy` does not touch a workspace that others filled.
    if path.parent.is_dir():
        shutil.rmtree(workspace, ignore_errors=True)
    deploy(assignment.root, assignment.challenge, assignment.entrant, assignment.attempt)
    path.parent.mkdir()
    try:
        outcome = solver.solve(assignment)
    except ArenaError as error:
        outcome = Outcome("infra_error", str(error), *NOTHING)
    record = _record(solver, version, outcome)
    path.parent.mkdir(exist_ok=True)
    write_public(path.parent)
    write_durably(path, record.model_dump_json(indent=1) + "\n")
    return record


def is_done(assignment: Assignment) -> bool:
    """Whether the model has answered; a cell whose provider failed is tried again."""
    path = assignment.workspace / RECORD
    return path.is_file() and read_record(assignment).status != "infra_error"


def read_record(assignment: Assignment) -> SolveRecord:
    path = assignment.workspace / RECORD
    try:
        return SolveRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path} is not a record of an answer: {where} {first['msg']}") from None


def _record(solver: Solver, version: str, outcome: Outcome) -> SolveRecord:
    return SolveRecord(
        harness=solver.harness,
        model=solver.model,
        harness_version=version,
        status=outcome.status,
        # It goes into cells and reports, and may quote output of a provider or an agent.
        reason=Redactor().redact(outcome.reason)[:500],
        answered=datetime.now(UTC).isoformat(timespec="seconds"),
        model_version=outcome.model_version,
        turns=outcome.turns,
        input_tokens=outcome.cost.total_prompt_tokens,
        output_tokens=outcome.cost.total_completion_tokens,
        cost_usd=outcome.cost.total_cost_usd,
        seconds=round(outcome.seconds, 1),
        sampling=dict(outcome.sampling),
        **solver.settings,
    )
