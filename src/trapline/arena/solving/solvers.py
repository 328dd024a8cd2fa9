"""The two ways to fill a workspace: ask an endpoint, or start an agent."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, Violation
from trapline.arena.gpu.opening import open_submission
from trapline.arena.judge.own_tests import OWN, OWN_SECONDS, open_tester
from trapline.arena.judge.request import entry_files
from trapline.arena.profile import FLAWED
from trapline.arena.record import Level
from trapline.arena.solving import agents, transcript
from trapline.arena.solving.agents import Agent
from trapline.arena.solving.answers import AnswerError, parse_files, write_files
from trapline.arena.solving.deploy import read_starter
from trapline.arena.solving.endpoint import Endpoint, Message, Reply, sdk
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.solve import Assignment, Outcome
from trapline.arena.solving.transcript import Metrics, Transcript

FORMAT = (
    "Answer with whole files. Put each file into a fenced code block whose opening line names it, "
    "for example ```python solution.py. Files that you do not repeat stay as they are."
)
#: Status of an answer that was not given, by the reason why the reply ended.
_UNANSWERED = {"refusal": "refused", "content_filter": "refused", "length": "truncated"}
CUT_OFF = "the reply was cut off at its token limit"


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens; with unknown prices the cost is unknown."""

    input_usd: float | None = None
    output_usd: float | None = None

    @property
    def is_known(self) -> bool:
        return self.input_usd is not None and self.output_usd is not None

    @property
    def told(self) -> dict[str, float]:
        """The known prices, by "input" and "output"."""
        prices = {"input": self.input_usd, "output": self.output_usd}
        return {name: usd for name, usd in prices.items() if usd is not None}

    def of(self, reply: Reply) -> float | None:
        if self.input_usd is None or self.output_usd is None:
            return None
        return (reply.input_tokens * self.input_usd + reply.output_tokens * self.output_usd) / 1e6


@dataclass(frozen=True)
class EndpointSolver:
    """One request, or a bounded loop in which the model sees the results of its own tests."""

    endpoint: Endpoint
    level: Level
    rounds: int = 1
    price: Price = Price()
    harness: str = "endpoint"

    @property
    def model(self) -> str:
        return self.endpoint.model

    @property
    def tells_cost(self) -> bool:
        return self.price.is_known

    def version(self) -> str:
        return f"openai {sdk().__version__}, rounds={self.rounds}"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "provider": self.endpoint.provider,
            "price_usd": self.price.told,
            "limits": {"rounds": self.rounds, "seconds": self.endpoint.timeout},
        }

    def solve(self, assignment: Assignment) -> Outcome:
        """Asks, writes the files, runs the model's own tests, and asks again if they fail."""
        started = time.monotonic()
        log = _log(
            assignment, transcript.Agent(name=self.harness, version="1", model_name=self.model)
        )
        messages: list[Message] = [
            {"role": "system", "content": FORMAT},
            {"role": "user", "content": assignment.challenge.prompt},
        ]
        log.add("system", FORMAT)
        log.add("user", assignment.challenge.prompt)
        status, reason = "no_answer", "the model was not asked"
        turns, version = 0, ""
        endpoint = self.endpoint.for_attempt(assignment.attempt)
        try:
            for number in range(self.rounds):
                reply = self._ask(endpoint, messages, log)
                turns, version = turns + 1, reply.version or version
                status, reason, feedback = self._take(reply, assignment, number)
                if not feedback:
                    break
                messages += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": feedback},
                ]
                log.add("user", feedback)
        finally:
            totals = log.close()
        seconds = time.monotonic() - started
        return Outcome(status, reason, totals, seconds, turns, version, endpoint.sampling)

    def _ask(self, endpoint: Endpoint, messages: list[Message], log: Transcript) -> Reply:
        reply = endpoint.ask(messages)
        metrics = Metrics(
            prompt_tokens=reply.input_tokens,
            completion_tokens=reply.output_tokens,
            cost_usd=self.price.of(reply),
        )
        log.add("agent", reply.text, metrics)
        return reply

    def _take(self, reply: Reply, assignment: Assignment, number: int) -> tuple[str, str, str]:
        """Status, its reason, and the message for the model's next round."""
        last = number + 1 == self.rounds
        try:
            files = parse_files(reply.text, _accepted(assignment))
            _remove_other_language(assignment, files)
            write_files(assignment.workspace, files)
        except AnswerError as error:
            starter = read_starter(assignment.challenge).get("solution.py", "")
            answered = _solution(assignment) != starter.encode()
            status = "solved" if answered else _UNANSWERED.get(reply.finish, "no_answer")
            told = f"{CUT_OFF}: {error}" if reply.finish == "length" else str(error)
            return status, told, "" if last else f"{told}. {FORMAT}"
        reason = CUT_OFF if reply.finish == "length" else ""
        if last:
            return "solved", reason, ""
        tell = compile_feedback if assignment.challenge.track == "gpu" else own_test_feedback
        return "solved", reason, tell(assignment.workspace, assignment.challenge, self.level)


def compile_feedback(workspace: Path, challenge: Challenge, level: Level) -> str:
    """The message to the model about an answer that cannot be called; empty if it can.

    The GPU track asks for no tests: what a round shows is the compiler's log or the exception.
    """
    with open_submission(challenge, workspace, level) as submission:
        try:
            missing = submission.start(challenge.plan.entry_points)
        except Violation as violation:
            return f"Your answer cannot be loaded: {violation}"
    return f"Your answer lacks entry points: {', '.join(missing)}" if missing else ""


def own_test_feedback(workspace: Path, challenge: Challenge, level: Level) -> str:
    """The message to the model about its own tests; empty if they pass."""
    if not list(workspace.glob("test_*.py")):
        return "There are no tests (test_*.py). Add them."
    with open_tester(workspace, challenge, level) as tests:
        try:
            report = tests.run(OWN, stop_early=False)
        except Violation as violation:
            return f"Your tests ended their process: {violation}"
    if report is None:
        return f"Your tests gave no report within {OWN_SECONDS:g} seconds."
    if report.get("failed") or not report.get("passed"):
        return (
            f"Your tests: {report.get('passed')} passed, {report.get('failed')} failed. "
            f"The first failure: {report.get('first')}"
        )
    return ""


@dataclass(frozen=True)
class AgentSolver:
    harness: str
    model: str
    agent: Agent
    seconds: float = 3600.0

    @property
    def tells_cost(self) -> bool:
        return self.agent.usage is not None and bool(self.agent.usage.cost)

    def version(self) -> str:
        return agents.probe(self.agent)

    @property
    def settings(self) -> dict[str, Any]:
        return {"provider": self.harness, "limits": {"seconds": self.seconds}}

    def solve(self, assignment: Assignment) -> Outcome:
        """Runs the agent; an answer counts even if the time limit was reached."""
        log = _log(
            assignment, transcript.Agent(name=self.harness, version="", model_name=self.model)
        )
        instruction = agents.instruction(assignment.challenge.track)
        log.add("user", instruction)
        before = _solution(assignment)
        done = agents.run(self.agent, assignment.workspace, self.model, self.seconds, instruction)
        metrics = agents.spent(self.agent, done.output)
        log.add("agent", Redactor().hide_secrets(done.output), metrics)
        totals = log.close()
        if _solution(assignment) != before:
            reason = "the time limit was reached" if done.timed_out else ""
            return Outcome("solved", reason, totals, done.seconds)
        if done.code and not done.timed_out:
            raise ArenaError(f"the agent ended with code {done.code}: {done.output[-300:]}")
        reason = "the time limit was reached" if done.timed_out else "the agent changed nothing"
        return Outcome("no_answer", reason, totals, done.seconds)


def _log(assignment: Assignment, agent: transcript.Agent) -> Transcript:
    session = f"{assignment.entrant}-{assignment.challenge.id}-{assignment.attempt}"
    return Transcript(assignment.workspace / ".trapline", session, agent)


def _accepted(assignment: Assignment) -> tuple[str, ...]:
    """The files one of which an answer to the assigned prompt must have."""
    return entry_files(FLAWED if assignment.challenge.flaw else "", assignment.challenge.track)


def _remove_other_language(assignment: Assignment, files: Mapping[str, str]) -> None:
    """A reply that turns to the other language replaces the file of an earlier round, which would
    be graded in its place."""
    sent = [name for name in _accepted(assignment) if name in files]
    if not any((assignment.workspace / name).exists() for name in sent):
        for name in set(_accepted(assignment)) - set(sent):
            (assignment.workspace / name).unlink(missing_ok=True)


def _solution(assignment: Assignment) -> bytes:
    paths = [assignment.workspace / name for name in _accepted(assignment)]
    return b"".join(path.read_bytes() for path in paths if path.is_file())
