"""Solve, grade and report, through every fault that a provider, a model or an agent can have."""

import sys
from dataclasses import replace

import pytest

from trapline.arena.report.runview import RunView
from trapline.arena.report.site import write_site
from trapline.arena.runs import field
from trapline.arena.runs.run import Options, grade_field, open_run
from trapline.arena.solving.agents import from_template
from trapline.arena.solving.endpoint import Endpoint
from trapline.arena.solving.solve import Assignment, solve_all
from trapline.arena.solving.solvers import AgentSolver, EndpointSolver

KEY = "sk-test-9b1f0c7d5e3a42c8a6f1"
#: What the provider does before it answers well, by entrant.
RECOVERED = {
    "busy": ["busy", "busy"],
    "broken": ["broken", "broken"],
    "late": ["timeout"],
    "truncated": ["truncated"],
    "malformed": ["malformed"],
}
DEAD = {"down": ["broken"] * 20, "shut": ["forbidden"]}
#: What the model says instead of an answer, and what is said about it.
UNANSWERED = {
    "refuses": ("I cannot help with that.", "does not contain solution.py"),
    "climbs": ("```python ../../evil.py\nx = 1\n```\n", "leads out"),
    "climbs-too": ("```python solution.py\nx\n```\n```python /tmp/evil.py\nx\n```\n", "leads out"),
}
AGENT = """
import os, pathlib, shutil, sys
print("working", os.environ["OPENAI_API_KEY"])
shutil.copy(sys.argv[1], "solution.py")
"""


def block(path):
    return f"```python {path.name}\n{path.read_text()}```\n"


@pytest.fixture
def known(known_sorting, monkeypatch, no_measures):
    """The sorting challenge where fields are read, and a key to be kept secret."""
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": known_sorting})
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return known_sorting


@pytest.fixture
def solved(known, provider, tmp_path, level):
    """Everybody's workspace after `solve`, and how it ended."""
    # Without its tests, which every grade would run on a dozen texts.
    good, root, slept = block(known.solution / "solution.py"), tmp_path / "field", []
    endpoint = Endpoint(provider.url, "m", timeout=60, attempts=4, sleep=slept.append)
    solvers = {}
    for name, faults in {**RECOVERED, **DEAD}.items():
        # Only the sleeping server is sure to be late, however slow this machine is.
        patient = replace(endpoint, timeout=2.0, attempts=20) if name == "late" else endpoint
        solvers[name] = (EndpointSolver(patient, level), faults, good)
    for name, (reply, _) in UNANSWERED.items():
        solvers[name] = (EndpointSolver(endpoint, level), [], reply)
    echo = f"Your key is {KEY}.\n{good}\n```python notes.py\nkey = '{KEY}'\n```\n"
    solvers["echo"] = (EndpointSolver(endpoint, level), [], echo)
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    command = f"{sys.executable} {script} {known.solution / 'solution.py'} {{prompt}}"
    solvers["agent"] = (AgentSolver("stand-in", "m", from_template(command), 600), [], "")
    records = {}
    for name, (solver, faults, reply) in solvers.items():
        provider.faults, provider.replies = list(faults), [reply]
        assignment = Assignment(name, known, 1, root)
        ((_, records[name]),) = solve_all([assignment], solver, 1)
    return root, records, slept


def test_every_fault_is_handled_from_prompt_to_report(solved, tmp_path, level):
    root, records, slept = solved
    run, site = tmp_path / "run", tmp_path / "site"
    with open_run(run) as store:
        list(grade_field(field.find_entries(root, []), store, Options(level)))
        cells = {cell.entrant: cell for cell in store.cells()}
        write_site(RunView.of(store), site)
    for name in (*RECOVERED, "echo", "agent"):
        assert (name, records[name].status, cells[name].state) == (name, "solved", "pass")
    for name in DEAD:
        assert (name, records[name].status) == (name, "infra_error")
        assert (cells[name].state, cells[name].score) == ("infra_error", None)
    for name, (_, reason) in UNANSWERED.items():
        assert (name, records[name].status, cells[name].state) == (name, "no_answer", "no_answer")
        assert reason in records[name].reason
    assert slept.count(0.01) == 2, "the provider said when to come back"
    assert (cells["agent"].harness, cells["busy"].harness) == ("stand-in", "endpoint")
    pages = {path.name: path.read_text() for path in site.rglob("*.html")}
    for name in cells:
        assert any(name in text for text in pages.values())
    assert any("no answer to grade" in text and "HTTP 500" in text for text in pages.values())
    assert any("of hidden files occur in the submission" in text for text in pages.values()), (
        "gold is gold"
    )
    assert not list(tmp_path.rglob("evil.py"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
