"""Answers of the GPU track from a model or an agent: files, rounds, fields."""

import sys

import pytest

from trapline.arena.challenge import load
from trapline.arena.errors import UsageError
from trapline.arena.gpu.contract import HEADER
from trapline.arena.runs.field import find_entries
from trapline.arena.solving import solvers
from trapline.arena.solving.agents import from_template
from trapline.arena.solving.answers import AnswerError, parse_files
from trapline.arena.solving.deploy import claim_field, deploy
from trapline.arena.solving.endpoint import Endpoint
from trapline.arena.solving.solve import Assignment, solve_all
from trapline.arena.solving.solvers import AgentSolver, EndpointSolver

GPU = ("solution.py", "solution.cu")


@pytest.fixture
def assignment(tmp_path):
    return Assignment("somebody", load("fused_softmax_topk", "gpu"), 1, tmp_path / "field")


@pytest.fixture
def endpoint(provider, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-3f9c2b7d8e1a4c5f6b7a")
    return Endpoint(provider.url, "m", timeout=60, attempts=1, sleep=lambda seconds: None)


@pytest.mark.parametrize(
    ("reply", "name"),
    [
        ("```cuda solution.cu\nint x;\n```", "solution.cu"),
        ("### `solution.cu`\n```\nint x;\n```", "solution.cu"),
        ("```cuda\nint x;\n```", "solution.cu"),
        ("```cpp\nint x;\n```", "solution.cu"),
        ("```python\nx = 1\n```", "solution.py"),
    ],
)
def test_a_reply_may_hold_cuda_or_python(reply, name):
    assert list(parse_files(reply, GPU)) == [name]


def test_cuda_is_no_answer_on_the_cpu_track():
    with pytest.raises(AnswerError, match=r"does not contain solution\.py"):
        parse_files("```cuda solution.cu\nint x;\n```")


def test_a_reply_without_an_accepted_file_names_both():
    with pytest.raises(AnswerError, match=r"does not contain solution\.py or solution\.cu"):
        parse_files("no code", GPU)


def test_rounds_show_what_the_compiler_says(provider, endpoint, assignment, level, monkeypatch):
    said = ["Your answer cannot be loaded: raised CompileError: solution.cu(1): error", ""]
    monkeypatch.setattr(solvers, "compile_feedback", lambda *_: said.pop(0))
    provider.replies = ["```cuda solution.cu\nbroken\n```", "```cuda solution.cu\nright\n```"]
    (pair,) = solve_all([assignment], EndpointSolver(endpoint, level, rounds=3), 1)
    assert (pair[1].status, pair[1].turns) == ("solved", 2)
    assert provider.requests[0]["messages"][1]["content"] == assignment.challenge.prompt
    assert "CompileError" in provider.requests[1]["messages"][-1]["content"]
    assert (assignment.workspace / "solution.cu").read_text() == "right\n"
    (entry,) = find_entries(assignment.root, [], track="gpu")
    assert (entry.track, entry.model) == ("gpu", "m")


def test_a_reply_in_the_other_language_replaces_the_first(
    provider, endpoint, assignment, level, monkeypatch
):
    said = ["Your answer cannot be loaded", ""]
    monkeypatch.setattr(solvers, "compile_feedback", lambda *_: said.pop(0))
    provider.replies = ["```python solution.py\nbroken\n```", "```cuda solution.cu\nright\n```"]
    list(solve_all([assignment], EndpointSolver(endpoint, level, rounds=3), 1))
    assert (assignment.workspace / "solution.cu").read_text() == "right\n"
    assert not (assignment.workspace / "solution.py").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def softmax_topk(*args):\n    pass\n", ""),
        ("x = 1\n", "Your answer lacks entry points: softmax_topk"),
        ("1 / 0\n", "Your answer cannot be loaded: raised ZeroDivisionError: division by zero"),
    ],
)
def test_feedback_says_why_an_answer_cannot_be_called(tmp_path, level, source, told):
    (tmp_path / "solution.py").write_text(source)
    challenge = load("fused_softmax_topk", "gpu")
    assert solvers.compile_feedback(tmp_path, challenge, level) == told


def test_an_agent_may_write_cuda(assignment, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import pathlib, sys\n"
        "assert 'solution.py or solution.cu' in sys.argv[1]\n"
        "pathlib.Path('solution.cu').write_text('int x;')\n"
    )
    solver = AgentSolver("stand-in", "m", from_template(f"{sys.executable} {script} {{prompt}}"))
    (pair,) = solve_all([assignment], solver, 1)
    assert pair[1].status == "solved"


def test_prompt_and_workspace_hold_the_header_that_cuda_includes(tmp_path):
    header = HEADER.read_text()
    challenge = load("fused_softmax_topk", "gpu")
    workspace = deploy(tmp_path, challenge, "me")
    assert (workspace / "cuda" / "trapline.h").read_text() == header
    assert header in (workspace / "prompt.md").read_text()
    assert "trapline_tensor" not in load("fused_softmax_topk").prompt


def test_a_field_holds_one_track(tmp_path):
    claim_field(tmp_path / "gpu", "", "gpu")
    claim_field(tmp_path / "gpu", "", "gpu")
    with pytest.raises(UsageError, match=r"holds answers of the gpu track.* add --track gpu"):
        claim_field(tmp_path / "gpu", "", "cpu")
    with pytest.raises(UsageError, match="add --track gpu"):
        find_entries(tmp_path / "gpu", [])
    deploy(tmp_path / "cpu", load("kv_cache"), "me")
    with pytest.raises(UsageError, match="deploy the gpu track into another folder"):
        claim_field(tmp_path / "cpu", "", "gpu")
