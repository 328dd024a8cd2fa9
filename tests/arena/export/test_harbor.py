"""Harbor task folders: the format, nothing hidden for the agent, and a verifier that grades."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.export import harbor
from trapline.arena.export.harbor import write_tasks
from trapline.arena.export.own_package import core_requirements, own_version
from trapline.arena.export.verifier import rewards
from trapline.arena.judge.contamination import hidden, leaks_in
from trapline.arena.record import Cell, CheckResult, Dimension

CHALLENGE = "fused_softmax_topk"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """All challenges, exported."""
    out = tmp_path_factory.mktemp("harbor")
    write_tasks(load_all().values(), out)
    return out


@pytest.mark.parametrize("name", list(load_all()))
def test_task_folder_is_whole(tasks, name):
    task = tasks / name
    config = tomllib.loads((task / "task.toml").read_text())
    assert (config["schema_version"], config["task"]["name"]) == ("1.4", f"trapline/{name}")
    assert config["verifier"]["environment_mode"] == "separate"
    assert config["metadata"]["challenge_digest"] == load(name).digest
    assert (task / "instruction.md").read_text() == load(name).prompt
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert os.access(task / script, os.X_OK)
    for image in ("tests/Dockerfile", "environment/Dockerfile"):
        assert (task / image).read_text().startswith("FROM python:")
    workspace = {path.name for path in (task / "environment/workspace").iterdir()}
    assert workspace == {"prompt.md", "solution.py"}


@pytest.mark.parametrize("name", list(load_all()))
def test_agent_image_holds_no_file_of_the_judge(tasks, name):
    seen = [path for path in (tasks / name / "environment").rglob("*") if path.is_file()]
    text = "\n".join(path.read_text() for path in [*seen, tasks / name / "instruction.md"])
    assert leaks_in(text, hidden(load(name))) == []


def test_requirements_are_pinned(tasks):
    lines = (tasks / CHALLENGE / "tests/requirements.txt").read_text().splitlines()
    assert len(lines) == len(core_requirements()) > 5
    assert all("==" in line for line in lines)


def images_of(task):
    config = tomllib.loads((task / "task.toml").read_text())
    return [
        box["docker_image"] for box in (config["environment"], config["verifier"]["environment"])
    ]


def test_tasks_name_images_of_this_machine_or_of_a_registry(tasks, tmp_path):
    (task,) = write_tasks([load(CHALLENGE)], tmp_path, images="ghcr.io/me")
    for folder, prefix in ((tasks / CHALLENGE, "localhost"), (task, "ghcr.io/me")):
        stem, tag = f"{prefix}/trapline-{CHALLENGE}", version("trapline")
        assert images_of(folder) == [f"{stem}-agent:{tag}", f"{stem}-verifier:{tag}"]


def test_build_script_builds_every_image_and_pushes_to_registries_only(tmp_path):
    """With a `docker` that writes down how it is called."""
    out, log = tmp_path / "out", tmp_path / "log"
    (here,) = write_tasks([load("kv_cache")], out)
    (remote,) = write_tasks([load(CHALLENGE)], out, images="ghcr.io/me")
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run([out / "build-images.sh"], env=environment, cwd=tmp_path, check=True)
    (agent, verifier), local = images_of(remote), images_of(here)
    assert log.read_text().splitlines() == [
        f"build --tag {agent} {CHALLENGE}/environment",
        f"push {agent}",
        f"build --tag {verifier} {CHALLENGE}/tests",
        f"push {verifier}",
        f"build --tag {local[0]} kv_cache/environment",
        f"build --tag {local[1]} kv_cache/tests",
    ]


@pytest.mark.full
def test_verifiers_loads_tasks_that_name_images(tmp_path, monkeypatch):
    """With verifiers' own Harbor taskset and Harbor's parser, which need Python 3.12."""
    pytest.importorskip("harbor")
    route = pytest.importorskip("verifiers.v1.tasksets.harbor.taskset")
    challenges = load_all()
    write_tasks(challenges.values(), tmp_path)
    monkeypatch.setattr(route, "dataset_dir", lambda config: tmp_path)  # instead of a download
    found = {task.data.name: task.data for task in route.HarborTaskset(route.HarborConfig()).load()}
    assert found.keys() == {f"trapline/{name}" for name in challenges}
    for name, challenge in challenges.items():
        data = found[f"trapline/{name}"]
        assert data.prompt.strip() == challenge.prompt.strip()
        assert data.image == f"localhost/trapline-{name}-agent:{own_version()}"
        assert data.verifier_image == f"localhost/trapline-{name}-verifier:{own_version()}"
        assert [artifact.source for artifact in data.artifacts] == ["/app"]


def test_wrong_image_prefix_is_refused(tmp_path):
    with pytest.raises(UsageError, match="registry and owner"):
        write_tasks([load(CHALLENGE)], tmp_path / "out", images="Me And You")
    assert not (tmp_path / "out").exists()


def test_existing_task_is_left_alone(tasks):
    with pytest.raises(UsageError, match="left alone"):
        write_tasks([load(CHALLENGE)], tasks)


def test_tasks_are_written_all_or_none(tmp_path):
    (tmp_path / CHALLENGE).mkdir()
    with pytest.raises(UsageError, match="left alone"):
        write_tasks([load("kv_cache"), load(CHALLENGE)], tmp_path)
    assert not (tmp_path / "kv_cache").exists()


def test_permitted_packages_are_in_the_image_even_if_not_installed(tmp_path, monkeypatch):
    def local_version(name):
        if name == "torch":
            raise PackageNotFoundError(name)
        return "1.0+local"

    monkeypatch.setattr(harbor, "version", local_version)
    (task,) = write_tasks([load("ternary_training")], tmp_path)
    assert "numpy==1.0 pytest==1.0 torch\n" in (task / "environment/Dockerfile").read_text()
    assert "torch" in (task / "tests/requirements.txt").read_text().splitlines()


def verify(task, workspace, logs, *scripts):
    """Runs scripts of a task in the workspace, which also holds a module that would shadow ours."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TRAPLINE_WORKSPACE": str(workspace),
        "TRAPLINE_VERIFIER_LOGS": str(logs),
    }
    (workspace / "trapline.py").write_text("raise SystemExit('imported from the workspace')")
    for script in scripts:
        done = subprocess.run(
            ["bash", str(task / script)],
            env=environment,
            cwd=workspace,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
    evidence = json.loads((logs / "evidence.json").read_text())
    return json.loads((logs / "reward.json").read_text()), evidence["cell"]


def test_test_script_runs_our_grader(tasks, tmp_path):
    # Wrong values would be compared with those of every known bug.
    (tmp_path / "solution.py").write_text("def softmax_topk(logits, k): raise MemoryError\n")
    reward, cell = verify(tasks / CHALLENGE, tmp_path, tmp_path / "logs", "tests/test.sh")
    assert (cell["state"], reward["correctness"]) == ("fail", 0.0)
    assert reward["reward"] == pytest.approx(cell["score"] / 100)
    assert reward["reward"] < 0.6
    assert {f"trap-{trap.id}" for trap in load(CHALLENGE).traps} < set(reward)


@pytest.mark.full
@pytest.mark.parametrize("name", list(load_all()))
def test_solve_script_earns_full_marks(tasks, tmp_path, name):
    scripts = ("solution/solve.sh", "tests/test.sh")
    reward, cell = verify(tasks / name, tmp_path, tmp_path / "logs", *scripts)
    assert (cell["state"], reward["correctness"], reward["traps"]) == ("pass", 1.0, 1.0)


def test_rewards_are_flat_and_finite(make_cell):
    found = rewards(make_cell(score=43.21))
    assert found == {"reward": 0.4321, "correctness": 0.5, "trap-a-b": 0.0, "trap-c": 1.0}


@pytest.fixture
def make_cell():
    """A cell with one measured dimension and two traps."""

    def make(score) -> Cell:
        return Cell(
            entrant="e",
            challenge=CHALLENGE,
            state="fail",
            score=score,
            letter="F",
            reason="r",
            isolation="process",
            dimensions={
                "correctness": Dimension(score=50.0, reason=""),
                "analysis": Dimension(score=None, reason="nobody"),
            },
            cases=[],
            traps=[CheckResult(id="a-b", state="fail"), CheckResult(id="c", state="pass")],
            submission_digest="",
            challenge_digest="",
            seed=1,
            versions={},
            started="2026-01-01T00:00:00Z",
            seconds=1.0,
        )

    return make
