"""Transcripts: a private raw one, and one in a common format (ATIF)."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trapline.arena.record import Record
from trapline.arena.runs.field import PUBLIC
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import learn_document

SCHEMA = "ATIF-v1.8"
#: Characters of a message, and messages, that the public transcript keeps.
MOST_PUBLIC, MOST_STEPS = 20_000, 40
WITHHELD = "(withheld: a name, a path or a key is in it)"
Source = Literal["system", "user", "agent"]


class Metrics(Record):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None


class Step(Record):
    step_id: int
    timestamp: str
    source: Source
    message: str
    metrics: Metrics | None = None


class Agent(Record):
    name: str
    version: str
    model_name: str = ""


class FinalMetrics(Record):
    total_prompt_tokens: int = 0
    total_completion_tokens: int = 0
    total_cost_usd: float | None = None
    total_steps: int = 0


class Trajectory(Record):
    schema_version: str = SCHEMA
    session_id: str
    agent: Agent
    steps: list[Step] = Field(default_factory=list)
    final_metrics: FinalMetrics | None = None


class Transcript:
    """A conversation on disk: `raw.jsonl` line by line, `trajectory.json` at the end."""

    def __init__(self, folder: Path, session: str, agent: Agent) -> None:
        self._folder, self._session, self._agent = folder, session, agent
        self._steps: list[Step] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "raw.jsonl").write_text("", encoding="utf-8")

    def add(self, source: Source, message: str, metrics: Metrics | None = None) -> None:
        now = datetime.now(UTC).isoformat()
        step = Step(
            step_id=len(self._steps) + 1,
            timestamp=now,
            source=source,
            message=message,
            metrics=metrics,
        )
        self._steps.append(step)
        with (self._folder / "raw.jsonl").open("a", encoding="utf-8") as file:
            file.write(step.model_dump_json() + "\n")

    def totals(self) -> FinalMetrics:
        """The cost so far; None unless the cost of every step is known."""
        measured = [step.metrics for step in self._steps if step.metrics is not None]
        costs = [metrics.cost_usd for metrics in measured]
        known = [cost for cost in costs if cost is not None]
        return FinalMetrics(
            total_prompt_tokens=sum(metrics.prompt_tokens for metrics in measured),
            total_completion_tokens=sum(metrics.completion_tokens for metrics in measured),
            total_cost_usd=sum(known) if costs and len(known) == len(costs) else None,
            total_steps=len(self._steps),
        )

    def close(self) -> FinalMetrics:
        totals = self.totals()
        trajectory = Trajectory(
            session_id=self._session, agent=self._agent, steps=self._steps, final_metrics=totals
        )
        text = json.dumps(_without_nothing(trajectory.model_dump(mode="json")), indent=1)
        (self._folder / "trajectory.json").write_text(text + "\n", encoding="utf-8")
        return totals


def write_public(folder: Path) -> None:
    """The messages of `trajectory.json`, redacted and shortened, for the evidence of a grade."""
    try:
        text = (folder / "trajectory.json").read_text(encoding="utf-8")
        steps = Trajectory.model_validate_json(text).steps[:MOST_STEPS]
    except (OSError, ValueError):
        return
    redactor = Redactor(learned=learn_document(text))
    public = [{"source": one.source, "message": _safe(one.message, redactor)} for one in steps]
    (folder / PUBLIC).write_text(json.dumps(public, indent=1) + "\n", encoding="utf-8")


def _safe(message: str, redactor: Redactor) -> str:
    """The redacted message; withheld where a second scan still finds something."""
    shown = redactor.redact(message)
    return WITHHELD if [*redactor.scan(shown)] else shown[:MOST_PUBLIC]


def _without_nothing(value: Any) -> Any:
    """Leaves out unknown values, as ATIF asks."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nothing(item) for item in value]
    return value
