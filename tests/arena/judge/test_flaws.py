"""Prompts with a planted flaw: gold notices it, its mutant follows it, another bug does neither."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.judge.checks import run_checks
from trapline.arena.judge.diagnosis import diagnose
from trapline.arena.judge.flaw import flaw_outcome
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.local import load as load_module
from trapline.arena.profile import FLAWED, PREVAILS, profile_names
from trapline.arena.runs.field import find_entries
from trapline.arena.standings.profiles import of_one_profile
from trapline.cli.main import main

CHALLENGES = [name for name, one in load_all().items() if FLAWED in profile_names(one.folder)]


def files_of(challenge, bug):
    """The gold solution, with the mutant of this trap unless it is empty."""
    gold = challenge.solution_files()
    return next(t for t in challenge.traps if t.id == bug).plant(gold) if bug else gold


@pytest.fixture
def written(tmp_path):
    def write(files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def outcome_of(challenge, folder, seed=7):
    """As a grade finds it, without the sandbox and the measures."""
    failures = []
    with LocalSubmission(folder, challenge.sandbox_config("process")) as submission:
        keep = lambda result, transcript: failures.append((result, transcript))  # noqa: E731
        run_checks(challenge.cases, submission, seed, keep)
        traps = run_checks(challenge.traps, submission, seed, keep)
        with MutantHost(challenge, seed) as host:
            found = diagnose(challenge, failures, submission, host)
        return flaw_outcome(challenge, challenge.flaw, submission, traps, found.findings, seed)


def bugs(challenge):
    flaw = challenge.flaw
    return {"": "noticed", flaw.mutant: "followed", flaw.another: "neither"}


def test_at_least_five_challenges_have_a_flawed_prompt():
    assert set(CHALLENGES) >= {
        "beam_search",
        "dflash",
        "flash_attention_backward",
        "kv_cache",
        "layer_norm_backward",
    }


@pytest.mark.parametrize("name", CHALLENGES)
def test_prompt_has_the_sketch_and_the_golden_test_which_prevails(name):
    own, flawed = load(name), load(name, profile=FLAWED)
    assert flawed.prompt.startswith(own.prompt)
    added = flawed.prompt.removeprefix(own.prompt)
    assert added.count(PREVAILS) == 1
    assert added.index("## Pseudo-code") < added.index("## Golden test")
    for secret in (flawed.flaw.name, flawed.flaw.mutant, "flaw"):
        assert secret not in added
    assert flawed.digest != own.digest
    assert flawed.scope == own.scope
    assert [trap.id for trap in flawed.traps] == [trap.id for trap in own.traps]


def golden_of(challenge):
    """The very text that an entrant sees."""
    return challenge.prompt.split("```python\n")[-1].split("```")[0]


@pytest.mark.parametrize("name", CHALLENGES)
def test_golden_test_of_the_prompt_is_right(name, written):
    challenge = load(name, profile=FLAWED)
    test = {"__name__": "golden"}
    exec(golden_of(challenge), test)
    failed = []
    for bug in bugs(challenge):
        try:
            test["check"](load_module(written(files_of(challenge, bug))))
        except AssertionError:
            failed.append(bug)
    assert failed == [bug for bug in bugs(challenge) if bug]


def test_golden_test_runs_as_the_prompt_says(written):
    challenge = load("dflash", profile=FLAWED)
    told = []
    for bug in ("", challenge.flaw.mutant):
        folder = written({**files_of(challenge, bug), "golden.py": golden_of(challenge)})
        command = [sys.executable, "-B", "golden.py"]
        told.append(subprocess.run(command, cwd=folder, capture_output=True, text=True))
    assert [done.returncode for done in told] == [0, 1]
    assert "the golden test passes" in told[0].stdout
    assert "AssertionError" in told[1].stderr


QUICK = ("layer_norm_backward",)
CELLS = [
    pytest.param(name, bug, outcome, marks=[] if name in QUICK else pytest.mark.full)
    for name in CHALLENGES
    for bug, outcome in bugs(load(name, profile=FLAWED)).items()
]


@pytest.mark.parametrize(("name", "bug", "outcome"), CELLS)
def test_outcome(name, bug, outcome, written):
    challenge = load(name, profile=FLAWED)
    assert outcome_of(challenge, written(files_of(challenge, bug))) == outcome


@pytest.mark.full
def test_answer_that_knows_only_the_golden_numbers_follows(written):
    """The trap's own numbers decide: a table of the golden test does not make an answer right."""
    challenge = load("dflash", profile=FLAWED)
    files = files_of(challenge, challenge.flaw.mutant)
    table = "\nKNOWN = {\n"
    for tokens, parents, choices, path, bonus in challenge.profile_module("golden").TREES:
        table += f"    {(*tokens, *parents, *choices)!r}: ({path!r}, {bonus!r}),\n"
    files["solution.py"] += table + (
        "}\n_followed = verify_tree\n\n\ndef verify_tree(tokens, parents, choices):\n"
        "    key = (*map(int, tokens), *map(int, parents), *map(int, choices))\n"
        "    return KNOWN[key] if key in KNOWN else _followed(tokens, parents, choices)\n"
    )
    assert outcome_of(challenge, written(files)) == "followed"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def started(*args):
        monkeypatch.setattr("sys.argv", ["trapline", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, " ".join("".join(capsys.readouterr()).split())

    return started


def test_deploy_writes_the_flawed_prompts_and_says_so_in_the_field(run, tmp_path):
    code, told = run("deploy", "field", "--entrant", "me", "--variant", "flawed")
    assert code == 0
    assert {path.name for path in (tmp_path / "field/me").iterdir()} == set(CHALLENGES)
    assert all(name in told for name in CHALLENGES)
    prompt = (tmp_path / "field/me/dflash/prompt.md").read_text()
    assert prompt == load("dflash", profile=FLAWED).prompt
    assert {entry.profile for entry in find_entries(tmp_path / "field", [])} == {FLAWED}
    assert run("deploy", "field", "--entrant", "you", "--variant", "flawed")[0] == 0


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ([], ["--variant", "flawed"], "is a field of the challenges' own prompts"),
        (["--variant", "flawed"], [], "is a field of the profile 'flawed'"),
    ],
)
def test_one_field_holds_one_kind_of_prompt(run, tmp_path, first, second, sentence):
    only = ("--challenge", "dflash")
    assert run("deploy", "field", "--entrant", "me", *only, *first)[0] == 0
    code, told = run("deploy", "field", "--entrant", "you", *only, *second)
    assert (code, sentence in told) == (2, True)
    assert not (tmp_path / "field/you").exists()


def test_challenge_without_a_flaw_is_refused_by_name(run, tmp_path):
    code, told = run(
        "deploy", "f", "--entrant", "me", "--variant", "flawed", "--challenge", "ternary_training"
    )
    assert code == 2
    assert "ternary_training has no flawed prompt; the challenges that have one are:" in told
    assert not (tmp_path / "f").exists()
    assert run("deploy", "f", "--entrant", "me", "--variant", "broken")[0] == 2


def test_golden_test_that_an_entrant_saved_is_not_part_of_its_answer(run, tmp_path):
    assert run("deploy", "f", "--entrant", "me", "--variant", "flawed")[0] == 0
    (tmp_path / "f/me/dflash/golden.py").write_text("x = 1\n")
    (entry,) = (one for one in find_entries(tmp_path / "f", []) if one.challenge == "dflash")
    assert set(entry.read().files) == {"prompt.md", "solution.py"}
    assert "golden.py" in replace(entry, profile="").read().files


def test_scores_under_flawed_and_own_prompts_are_not_ranked_together():
    cells = [SimpleNamespace(profile=name, score=50.0, track="cpu") for name in ("", FLAWED)]
    with pytest.raises(UsageError, match="cannot be compared"):
        of_one_profile(cells)
    assert of_one_profile(cells, FLAWED) == cells[1:]
