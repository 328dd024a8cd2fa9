"""Packages for verifiers: what they hold, how noisy their reward is, and real rollouts."""

import ast
import asyncio
import json
import os
import statistics
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.export.environment import files_of_reply, grade_answer
from trapline.arena.export.folder import claim
from trapline.arena.export.noise import Noise, reward_noise
from trapline.arena.export.verifiers_package import ALL, write_verifiers
from trapline.arena.judge.contamination import hidden, leaks_in
from trapline.arena.runs.field import EXAMPLE_FIELD

CHALLENGE = "flash_attention_forward"
ENTRANTS = ("textbook", "confident", "hasty", "broken")
ROOT = Path(__file__).parents[3]
#: Rollouts at once, and the seed of their inputs.
ROLLOUTS, SEED = 200, 7


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """All challenges, exported."""
    out = tmp_path_factory.mktemp("verifiers")
    write_verifiers(list(load_all().values()), out)
    return out


@pytest.mark.parametrize("name", [*(f"trapline_{name}" for name in load_all()), ALL])
def test_package_is_whole(packages, name):
    folder = packages / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == name.replace("_", "-")
    assert any(line.startswith("verifiers") for line in project["dependencies"])
    rows = json.loads((folder / name / "tasks.json").read_text())
    ids = [*load_all()] if name == ALL else [name.removeprefix("trapline_")]
    assert [row["challenge"] for row in rows] == ids
    assert [row["prompt"] for row in rows] == [load(one).prompt for one in ids]
    tree = ast.parse((folder / name / "__init__.py").read_text())
    assert ast.unparse(tree.body[1]) == f"from {name}.taskset import TraplineTaskset"
    classes = {
        node.name: {part.name for part in node.body if hasattr(part, "name")}
        for node in ast.parse((folder / name / "taskset.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert {"setup", "finalize", "validate", "trapline", "dimensions"} <= classes["TraplineTask"]
    assert "load" in classes["TraplineTaskset"]


@pytest.mark.parametrize("name", list(load_all()))
def test_package_holds_nothing_of_the_judge(packages, name):
    folder = packages / f"trapline_{name}"
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert leaks_in(text, hidden(load(name))) == []


def test_noise_counts_the_mutants_that_no_check_kills():
    whole = reward_noise(load("ternary_training"), checks_only=False)
    quick = reward_noise(load("ternary_training"), checks_only=True)
    # Known survivors are listed with their reasons; leaving checks out can only add to them.
    assert 0 < whole.survivors <= len(load("ternary_training").survivors)
    assert whole.survivors < quick.survivors
    assert whole.mutants == quick.mutants


def test_noise_of_no_survivor_still_has_a_bound():
    assert Noise(100, 0).bound == pytest.approx(1 - 0.05 ** (1 / 100))
    assert Noise(3, 3).bound == 1.0
    assert "0 of 100 mutants" in Noise(100, 0).sentence()


def test_readme_states_the_noise(packages):
    text = (packages / ALL / "README.md").read_text()
    for challenge in load_all().values():
        assert reward_noise(challenge, checks_only=True).sentence() in text


def test_readme_says_which_quick_rewards_leave_checks_out(packages):
    left_out = load("ternary_training").left_out_of_quick
    said = f"`quick` leaves out {len(left_out)} slow checks of `ternary_training`"
    for name in (ALL, "trapline_ternary_training"):
        assert said in (packages / name / "README.md").read_text()
    assert "leaves out" not in (packages / "trapline_beam_search" / "README.md").read_text()


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.md").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and was not written by"):
        claim(tmp_path, "verifiers")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.md"]


def test_own_folder_is_taken_again_for_the_same_format_only(tmp_path):
    claim(tmp_path / "out", "verifiers")
    claim(tmp_path / "out", "verifiers")
    with pytest.raises(UsageError, match="--format verifiers"):
        claim(tmp_path / "out", "harbor")


def test_existing_package_is_left_alone(packages):
    with pytest.raises(UsageError, match="left alone"):
        write_verifiers([load(CHALLENGE)], packages)


def reply(files):
    return "\n".join(f"````python {name}\n{text}````" for name, text in files.items())


def answers():
    """Name → reply: gold, the example entrants, a cheat, and one that contains no file."""
    gold = load(CHALLENGE).solution_files()
    found = {"gold": reply(gold), "silent": "I cannot do this."}
    for entrant in ENTRANTS:
        text = (EXAMPLE_FIELD / entrant / CHALLENGE / "solution.py").read_text()
        found[entrant] = reply({"solution.py": text})
    cheat = f"import scipy.special\n{gold['solution.py']}\nshortcut = scipy.special.softmax\n"
    return {**found, "cheat": reply({"solution.py": cheat})}


def test_reply_without_files_gets_no_reward():
    graded = asyncio.run(grade_answer(CHALLENGE, files_of_reply("I cannot do this.")))
    assert (graded.reward, graded.state, graded.metrics()["findings"]) == (0.0, "no_answer", 0.0)


@pytest.fixture(scope="module")
def evaluate(packages, tmp_path_factory):
    """An environment of its own with verifiers from the registry; (replies, copies) → rollouts."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    chosen = [
        "hatchling",
        str(ROOT),
        str(packages / f"trapline_{CHALLENGE}"),
        "verifiers>=0.4,<0.5",
    ]
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *chosen], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"verifiers cannot be installed here: {done.stderr[-300:]}")

    def run(replies, copies):
        rows = [[CHALLENGE, name, text] for name, text in replies.items()]
        (folder / "replies.json").write_text(json.dumps(rows))
        here = Path(__file__).parent
        package = f"trapline_{CHALLENGE}"
        arguments = [package, "replies.json", "out", str(copies), str(SEED)]
        done = subprocess.run(
            [python, here / "scripted_policy.py", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(here), "SCRIPTED_KEY": "none"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((folder / "out").read_text())

    return run


@pytest.mark.full
def test_200_rollouts_at_once_get_the_reward_of_their_answers(evaluate):
    replies = answers()
    copies = -(-ROLLOUTS // len(replies))
    rows = evaluate(replies, copies)
    assert len(rows) == copies * len(replies) >= ROLLOUTS
    assert [row["error"] for row in rows if row["error"]] == []
    rewards = {name: {row["reward"] for row in rows if row["name"] == name} for name in replies}
    assert (rewards["gold"], rewards["cheat"], rewards["silent"]) == ({1.0}, {0.0}, {0.0})
    for entrant in ENTRANTS:
        files = files_of_reply(replies[entrant])
        assert rewards[entrant] == {asyncio.run(grade_answer(CHALLENGE, files, seed=SEED)).reward}
    seconds = sorted(row["metrics"]["grading_seconds"] for row in rows if row["name"] != "silent")
    p50, p95 = statistics.median(seconds), seconds[int(0.95 * len(seconds))]
    load_average = os.getloadavg()[0]
    print(f"{len(rows)} rollouts: p50 {p50:.2f} s, p95 {p95:.2f} s, load {load_average:.1f}")
