"""Inspect: a package that `inspect eval` runs, and logs of our runs that Inspect opens."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.export.eval_logs import Run, write_eval_logs
from trapline.arena.export.inspect_package import write_package
from trapline.arena.record import Bundle, Cell, CheckResult, Dimension

CHALLENGE = "fused_softmax_topk"
#: Inspect's mock model answers with the gold files; it takes outputs as objects, not as flags.
MOCKED = """
import json
from pathlib import Path

from inspect_ai import Task, task, task_with
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from tasks import trapline


@task
def mocked() -> Task:
    output = ModelOutput.from_content("mockllm/model", json.loads(Path("reply.json").read_text()))
    # Without a count Inspect would download a tokenizer.
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=[output])
    return task_with(trapline(challenge="fused_softmax_topk"), model=model)
"""


def quiet_environment(home):
    """Nobody's Inspect settings, nobody's home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSPECT")}
    return {**kept, "HOME": str(home), "XDG_DATA_HOME": str(home), "XDG_CACHE_HOME": str(home)}


def test_inspect_eval_ends_with_our_grade_in_its_log(tmp_path):
    from inspect_ai.log import read_eval_log

    write_package([load(CHALLENGE)], tmp_path)
    (tmp_path / "mocked.py").write_text(MOCKED)
    files = sorted(load(CHALLENGE).solution.glob("*.py"))
    reply = "\n".join(f"````python {path.name}\n{path.read_text()}````" for path in files)
    (tmp_path / "reply.json").write_text(json.dumps(reply))
    program = Path(sys.executable).with_name("inspect")
    done = subprocess.run(
        [str(program), "eval", "mocked.py", "--display", "none", "--log-dir", "logs"],
        cwd=tmp_path,
        env=quiet_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    (path,) = (tmp_path / "logs").glob("*.eval")
    log = read_eval_log(str(path))
    assert log.status == "success", done.stdout + done.stderr + str(log.error)
    (sample,) = log.samples
    score = sample.scores["trapline"]
    assert (sample.id, score.metadata["state"]) == (CHALLENGE, "pass")
    assert score.value["grade"] > 70
    assert set(score.metadata["traps"].values()) == {"pass"}
    assert score.metadata["same_challenge"] is True
    means = {one.name: one.metrics["mean"].value for one in log.results.scores}
    assert means["grade"] == score.value["grade"]


def test_samples_are_the_prompts(tmp_path):
    write_package(load_all().values(), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["id"]: row["input"] for row in rows} == {
        name: one.prompt for name, one in load_all().items()
    }
    with pytest.raises(UsageError, match="left alone"):
        write_package(load_all().values(), tmp_path)


def graded(entrant, attempt, score, state="pass"):
    analysis = Dimension(score=None, reason="no judge was asked")
    return Cell(
        entrant=entrant,
        challenge=CHALLENGE,
        attempt=attempt,
        harness="endpoint",
        state=state,
        score=score,
        letter=None if score is None else "B",
        reason="because",
        isolation="process",
        dimensions={"traps": Dimension(score=score, reason="some"), "analysis": analysis},
        cases=[],
        traps=[CheckResult(id="exp-overflow", state="fail")],
        submission_digest="s",
        challenge_digest="c",
        seed=7,
        versions={"trapline": "0"},
        started="2026-01-01T00:00:00Z",
        seconds=2.0,
        bundle=f"{entrant}{attempt}",
    )


def test_run_becomes_logs_that_inspect_reads(tmp_path):
    from inspect_ai.log import list_eval_logs, read_eval_log

    cells = [
        graded("able", 1, 80.0),
        graded("able", 2, 90.0),
        graded("Odd name/..", 1, None, "infra_error"),
    ]
    by_address = {cell.bundle: cell for cell in cells}

    def bundle_of(address):
        return Bundle(cell=by_address[address], files={"solution.py": "x = 1"})

    run = Run("nightly", cells, load_all(), bundle_of)
    paths = write_eval_logs(run, tmp_path)
    assert paths == write_eval_logs(run, tmp_path)  # ours: written anew
    assert all(path.parent == tmp_path for path in paths)
    assert len(list_eval_logs(str(tmp_path))) == 2
    logs = {log.eval.metadata["entrant"]: log for log in map(read_eval_log, map(str, paths))}
    able, odd = logs["able"], logs["Odd name/.."]
    assert [(sample.id, sample.epoch) for sample in able.samples] == [
        (CHALLENGE, 1),
        (CHALLENGE, 2),
    ]
    score = able.samples[0].scores["trapline"]
    assert score.value["grade"] == score.value["traps"] == 80.0
    assert math.isnan(score.value["analysis"])
    assert score.metadata["traps"] == {"exp-overflow": "fail"}
    assert "x = 1" in able.samples[0].output.completion
    assert able.results.scores[0].metrics["mean"].value == 85.0
    assert (odd.samples[0].scores or {}) == {}
    assert "because" in odd.samples[0].error.message


def test_logs_are_not_written_beside_foreign_files(tmp_path):
    (tmp_path / "able.eval").write_text("another log")
    run = Run("nightly", [graded("able", 1, 80.0)], load_all(), lambda address: None)
    with pytest.raises(UsageError, match="is not empty and was not written by"):
        write_eval_logs(run, tmp_path)
    assert (tmp_path / "able.eval").read_text() == "another log"


def test_empty_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no graded cell"):
        write_eval_logs(Run("empty", [], {}, lambda address: None), tmp_path)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(MissingError, match=r"pip install 'trapline\[inspect\]'"):
        write_eval_logs(Run("nightly", [], {}, lambda address: None), tmp_path)
