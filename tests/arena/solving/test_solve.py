"""From a prompt to a graded cell, through every fault a provider can have."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from trapline.arena.errors import MissingError, UsageError
from trapline.arena.judge import grade
from trapline.arena.judge.intake import take_in
from trapline.arena.runs import field
from trapline.arena.solving import agents
from trapline.arena.solving import endpoint as solving_endpoint
from trapline.arena.solving.agents import from_template
from trapline.arena.solving.deploy import deploy
from trapline.arena.solving.endpoint import Endpoint, ProviderError, RateLimit, backoff
from trapline.arena.solving.solve import Assignment, is_done, read_record, solve_all
from trapline.arena.solving.solvers import CUT_OFF, AgentSolver, EndpointSolver, Price
from trapline.cli.grade import _brief

KEY = "sk-test-3f9c2b7d8e1a4c5f6b7a"


@pytest.fixture
def endpoint(provider, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return Endpoint(provider.url, "m", timeout=60, attempts=3, sleep=lambda seconds: None)


@pytest.fixture
def assignment(known_sorting, tmp_path):
    return Assignment("somebody", known_sorting, 1, tmp_path / "field")


def reply_of(files):
    return "Here it is.\n\n" + "\n".join(f"```python {n}\n{t}```\n" for n, t in files.items())


@pytest.fixture
def good_reply(sorting):
    files = {p.name: p.read_text() for p in sorted(sorting.solution.glob("*.py"))}
    return reply_of(files)


def solve(assignment, solver):
    return [record for _, record in solve_all([assignment], solver, 1)]


def test_an_answer_becomes_files_a_transcript_and_a_record(
    provider, endpoint, assignment, good_reply, level, monkeypatch, no_measures
):
    provider.replies = [good_reply]
    (record,) = solve(assignment, EndpointSolver(endpoint, level, price=Price(1.0, 2.0)))
    assert record.status == "solved"
    assert record.cost_usd == pytest.approx((100 + 2 * len(good_reply)) / 1e6)
    assert (assignment.workspace / "solution.py").is_file()
    trajectory = json.loads((assignment.workspace / ".trapline/trajectory.json").read_text())
    assert trajectory["schema_version"].startswith("ATIF-v1")
    assert [step["source"] for step in trajectory["steps"]] == ["system", "user", "agent"]
    assert [step["step_id"] for step in trajectory["steps"]] == [1, 2, 3]
    assert trajectory["final_metrics"]["total_prompt_tokens"] == 100
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": assignment.challenge})
    (entry,) = field.find_entries(assignment.root, [])
    assert (entry.harness, entry.model, entry.attempt) == ("endpoint", "m", 1)
    cell = grade.grade(replace(entry, level=level, seed=3), assignment.challenge).cell
    assert (cell.state, cell.harness, cell.model) == ("pass", "endpoint", "m")


@pytest.mark.parametrize("fault", ["busy", "broken", "truncated", "malformed"])
def test_a_fault_is_tried_again(provider, endpoint, assignment, good_reply, level, fault):
    provider.replies, provider.faults = [good_reply], [fault, fault]
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert record.status == "solved"
    assert len(provider.requests) == 3


def test_a_time_out_is_tried_again(provider, endpoint, assignment, good_reply, level):
    """However slow this machine: only the first answer is sure to come too late."""
    provider.replies, provider.faults = [good_reply], ["timeout"]
    patient = replace(endpoint, timeout=2.0, attempts=20)
    (record,) = solve(assignment, EndpointSolver(patient, level))
    assert record.status == "solved"
    assert len(provider.requests) >= 2


@pytest.mark.parametrize("fault", ["busy", "broken", "truncated", "forbidden"])
def test_failed_provider_gives_no_grade(
    provider, endpoint, assignment, good_reply, level, fault, monkeypatch
):
    provider.faults = [fault] * 3
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert record.status == "infra_error"
    assert not is_done(assignment)
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": assignment.challenge})
    (entry,) = field.find_entries(assignment.root, [])
    cell = grade.grade(replace(entry, level=level, seed=3), assignment.challenge).cell
    assert (cell.state, cell.score) == ("infra_error", None)
    provider.faults, provider.replies = [], [good_reply]
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert record.status == "solved"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I cannot help with that.", "does not contain solution.py"),
        (reply_of({"../../evil.py": "x = 1\n"}), "leads out"),
        (reply_of({"/etc/passwd.py": "x = 1\n", "solution.py": ""}), "leads out"),
        (reply_of({"solution.py": "", ".git/hooks.py": "x\n"}), "leads out"),
        ("```python solution.py\nx = 1\n", "does not contain solution.py"),
    ],
)
def test_reply_without_files_is_no_answer(provider, endpoint, assignment, level, reply, reason):
    provider.replies = [reply]
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert (record.status, reason in record.reason) == ("no_answer", True)
    assert is_done(assignment)
    assert not list(assignment.root.parent.rglob("evil.py"))


def test_sampling_is_sent_and_recorded(provider, endpoint, assignment, good_reply, level):
    provider.replies = [good_reply]
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9000, "effort": "high", "seed": 4}
    asked = replace(endpoint, sampling=sampling)
    third = replace(assignment, attempt=3)
    (record,) = solve(third, EndpointSolver(asked, level, price=Price(1.0, 2.0)))
    sent = provider.requests[0]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.5, 0.9, 9000)
    assert (sent["reasoning_effort"], sent["seed"]) == ("high", 6)
    assert record.sampling == sampling | {"seed": 6}
    assert (record.provider, record.model_version, record.turns) == ("127.0.0.1", "m", 1)
    assert record.price_usd == {"input": 1.0, "output": 2.0}
    assert record.limits == {"rounds": 1, "seconds": 60}
    assert record.answered.startswith("20")


@pytest.mark.parametrize(
    ("finish", "status", "answer"),
    [
        ("length", "truncated", "truncated"),
        ("content_filter", "refused", "refused"),
        ("stop", "no_answer", "missing"),
    ],
)
def test_reason_without_an_answer_is_a_state(
    provider, endpoint, assignment, level, monkeypatch, finish, status, answer
):
    provider.replies, provider.finish = ["I would rather"], finish
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert record.status == status
    assert is_done(assignment)
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": assignment.challenge})
    (entry,) = field.find_entries(assignment.root, [])
    bundle = grade.grade(replace(entry, level=level, seed=3), assignment.challenge)
    assert (bundle.cell.state, bundle.cell.score) == ("no_answer", 0.0)
    assert bundle.cell.origin.status == status
    told = _brief(bundle.cell)
    assert (told["state"], told["answer"]) == ("no_answer", answer)
    assert status in bundle.cell.reason
    assert [step["source"] for step in bundle.raw["transcript"]] == ["system", "user", "agent"]


def test_answer_that_was_cut_off_counts_and_says_so(
    provider, endpoint, assignment, good_reply, level
):
    provider.replies, provider.finish = [good_reply], "length"
    (record,) = solve(assignment, EndpointSolver(endpoint, level))
    assert (record.status, record.reason) == ("solved", CUT_OFF)


def test_public_transcript_hides_names_and_keys(provider, endpoint, assignment, level):
    provider.replies = ["See /home/janedoe/notes.txt and sk-live-9f8e7d6c5b4a39281706f5e4d3c2b1a0"]
    solve(assignment, EndpointSolver(endpoint, level))
    text = (assignment.workspace / ".trapline" / field.PUBLIC).read_text()
    assert "janedoe" not in text
    assert "9f8e7d6c5b4a" not in text


def test_the_key_is_sent_and_written_nowhere(provider, endpoint, assignment, good_reply, level):
    provider.replies = [good_reply]
    solve(assignment, EndpointSolver(endpoint, level))
    assert provider.keys == [f"Bearer {KEY}"]
    for path in assignment.root.rglob("*"):
        assert not path.is_file() or KEY not in path.read_text()


def test_a_model_may_see_its_own_tests_fail(provider, endpoint, assignment, good_reply, level):
    files = {"solution.py": "x = 1\n", "test_it.py": "def test_it(): assert 0\n"}
    wrong = reply_of(files)
    provider.replies = [wrong, good_reply]
    (record,) = solve(assignment, EndpointSolver(endpoint, level, rounds=3))
    assert record.status == "solved"
    first, second, *_ = provider.requests
    assert "1 failed" in second["messages"][-1]["content"]
    assert len(first["messages"]) == 2


def test_answer_is_kept_when_later_replies_have_no_files(
    provider, endpoint, assignment, level, gold_source
):
    """Its first answer brought no tests; the second brings no files."""
    provider.replies = [reply_of({"solution.py": gold_source}), "I think it is fine."]
    (record,) = solve(assignment, EndpointSolver(endpoint, level, rounds=2))
    assert (record.status, len(provider.requests)) == ("solved", 2)
    assert (assignment.workspace / "solution.py").read_text() == gold_source
    provider.replies = ["Hm.", "Let me think."]
    other = replace(assignment, attempt=2)
    (record,) = solve(other, EndpointSolver(endpoint, level, rounds=2))
    assert record.status == "no_answer"


def test_solved_cells_are_skipped_and_the_budget_holds(
    provider, endpoint, known_sorting, tmp_path, good_reply, level
):
    provider.replies = [good_reply]
    assignments = [Assignment("s", known_sorting, n, tmp_path) for n in (1, 2, 3)]
    solver = EndpointSolver(endpoint, level, price=Price(1e6, 1e6))
    records = [record for _, record in solve_all(assignments, solver, 1, budget_usd=1.0)]
    assert sorted(record.status for record in records) == ["infra_error", "infra_error", "solved"]
    assert sum("budget" in record.reason for record in records) == 2
    solve(assignments[0], solver)
    assert len(provider.requests) == 1


def test_waits_grow_and_are_spread():
    waits = [backoff(n) for n in range(10)]
    assert waits[0] <= 1.0
    assert max(waits) <= 60.0
    assert backoff(5) >= 16.0


def test_the_rate_is_limited(monkeypatch):
    slept = []
    monkeypatch.setattr(solving_endpoint, "time", SimpleNamespace(monotonic=lambda: 100.0))
    limit = RateLimit(per_minute=60)
    for _ in range(3):
        limit.wait(slept.append)
    assert slept == [0.0, 1.0, 2.0]


def test_permanent_refusal_is_not_retried(provider, endpoint):
    provider.faults = ["forbidden"] * 3
    with pytest.raises(ProviderError, match="401"):
        endpoint.ask([{"role": "user", "content": "x"}])
    assert len(provider.requests) == 1


AGENT = """
import pathlib, sys
here = pathlib.Path(".")
names = sorted(path.name for path in here.iterdir() if not path.name.startswith("."))
assert names == ["prompt.md", "solution.py"]
instruction = sys.stdin.read() if sys.argv[2:] == [] else sys.argv[2]
assert "prompt.md" in instruction
mode = sys.argv[1]
if mode == "works":
    (here / "solution.py").write_text(pathlib.Path(SOLUTION).read_text())
elif mode == "dies":
    sys.exit(7)
elif mode == "hangs":
    import time
    (here / "solution.py").write_text("x = 1")
    time.sleep(60)
print("done", mode)
"""


@pytest.fixture
def stand_in(tmp_path, sorting):
    """A stand-in agent script."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT.replace("SOLUTION", repr(str(sorting.solution / "solution.py"))))

    def make(mode, seconds=60.0, by_stdin=False):
        tail = "" if by_stdin else " {prompt}"
        agent = from_template(f"{sys.executable} {script} {mode}{tail}")
        return AgentSolver("stand-in", "m", agent, seconds)

    return make


@pytest.mark.parametrize("by_stdin", [False, True])
def test_an_agent_fills_a_workspace(assignment, stand_in, by_stdin, gold_source):
    (record,) = solve(assignment, stand_in("works", by_stdin=by_stdin))
    assert (record.status, record.harness) == ("solved", "stand-in")
    assert (assignment.workspace / "solution.py").read_text() == gold_source
    assert "done works" in (assignment.workspace / ".trapline/raw.jsonl").read_text()
    assert read_record(assignment) == record


def test_crashed_agent_gives_no_grade_and_idle_agent_no_answer(assignment, stand_in):
    (record,) = solve(assignment, stand_in("dies"))
    assert (record.status, "code 7" in record.reason) == ("infra_error", True)
    (record,) = solve(assignment, stand_in("idles"))
    assert (record.status, record.reason) == ("no_answer", "the agent changed nothing")


def test_agent_is_stopped_at_its_time_limit(assignment, stand_in):
    (record,) = solve(assignment, stand_in("hangs", seconds=8.0))
    assert (record.status, record.reason) == ("solved", "the time limit was reached")
    assert record.seconds < 50


STREAMS = {
    "claude": [
        {"type": "assistant", "message": {"usage": {"output_tokens": 5}}},
        {
            "type": "result",
            "total_cost_usd": 0.25,
            "usage": {"input_tokens": 7, "output_tokens": 9},
        },
    ],
    "codex": [
        {"type": "turn.completed", "usage": {"input_tokens": 3, "output_tokens": 4}},
        {"type": "turn.completed", "usage": {"input_tokens": 4, "output_tokens": 5}},
    ],
    "opencode": [
        {"type": "step_finish", "part": {"cost": 0.2, "tokens": {"input": 3, "output": 4}}},
        {"type": "step_finish", "part": {"cost": 0.05, "tokens": {"input": 4, "output": 5}}},
    ],
    "pi": [
        {"type": "message_end", "message": {"role": "user"}},
        {
            "type": "message_end",
            "message": {"usage": {"input": 7, "output": 9, "cost": {"total": 0.25}}},
        },
    ],
}


@pytest.mark.parametrize("name", list(agents.table()))
def test_usage_is_read_from_an_agents_stream(name):
    agent = agents.find(name)
    noise = ["no json", "{broken", "[1]", '{"type": 1}']
    output = "\n".join([*noise, *map(json.dumps, STREAMS[name])])
    found = agents.spent(agent, output)
    assert (found.prompt_tokens, found.completion_tokens) == (7, 9)
    assert found.cost_usd == (None if name == "codex" else 0.25)
    assert agents.spent(agent, "\n".join(noise)) is None
    assert agents.spent(from_template("x {prompt}"), output) is None


def test_unknown_and_missing_agents_are_named():
    with pytest.raises(UsageError, match="known agents: claude, codex, opencode, pi"):
        agents.find("nobody")
    with pytest.raises(MissingError, match="not installed"):
        agents.probe(from_template("no-such-program-here {prompt}"))


def test_missing_package_is_named_before_the_first_cell(endpoint, assignment, level, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingError, match=r"trapline\[models\]"):
        solve(assignment, EndpointSolver(endpoint, level))
    assert not assignment.workspace.exists()


def test_a_deployed_workspace_is_not_overwritten(assignment):
    deploy(assignment.root, assignment.challenge, "somebody", 1)
    with pytest.raises(UsageError, match="already exists; nothing was written"):
        deploy(assignment.root, assignment.challenge, "somebody", 1)


def test_workspace_filled_by_a_person_is_kept(provider, endpoint, assignment, good_reply, level):
    deploy(assignment.root, assignment.challenge, "somebody", 1)
    (assignment.workspace / "solution.py").write_text("# by hand\n")
    provider.replies = [good_reply]
    with pytest.raises(UsageError, match="already exists; nothing was written"):
        solve(assignment, EndpointSolver(endpoint, level))
    assert (assignment.workspace / "solution.py").read_text() == "# by hand\n"


def test_an_answer_beside_further_attempts_is_the_first(assignment, monkeypatch):
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": assignment.challenge})
    first = deploy(assignment.root, assignment.challenge, "somebody")
    alone = take_in(first).digest
    second = deploy(assignment.root, assignment.challenge, "somebody", 2)
    entries = field.find_entries(assignment.root, [])
    assert [(entry.attempt, entry.folder) for entry in entries] == [(1, first), (2, second)]
    assert take_in(first).digest == alone


def test_second_first_attempt_is_refused(assignment):
    deploy(assignment.root, assignment.challenge, "somebody")
    with pytest.raises(UsageError, match="already holds attempt 1"):
        deploy(assignment.root, assignment.challenge, "somebody", 1)


def test_invalid_record_is_refused(assignment, endpoint, level):
    deploy(assignment.root, assignment.challenge, "somebody", 1)
    record = assignment.workspace / field.RECORD
    record.parent.mkdir()
    record.write_text('{"harness": "person"}')
    with pytest.raises(UsageError, match="is not a record of an answer: model"):
        solve(assignment, EndpointSolver(endpoint, level))


@pytest.mark.parametrize(
    "solver",
    [
        lambda endpoint, level: EndpointSolver(endpoint, level),
        lambda endpoint, level: EndpointSolver(endpoint, level, price=Price(1.0)),
        lambda endpoint, level: AgentSolver("codex", "m", agents.find("codex")),
        lambda endpoint, level: AgentSolver("agent-cmd", "m", from_template("true {prompt}")),
    ],
)
def test_budget_without_known_costs_is_refused(endpoint, assignment, level, solver):
    with pytest.raises(UsageError, match="--budget-usd needs the cost of an answer"):
        list(solve_all([assignment], solver(endpoint, level), 1, budget_usd=5.0))
    assert not assignment.workspace.exists()
