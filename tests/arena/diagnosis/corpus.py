"""The blind corpus: answers written from the prompts alone, right ones and ones with one bug.

`<challenge>/right/<style>/` holds a right answer in an unusual style; `<challenge>/bugs.toml` lists
bugs as edits of one of them. The authors knew the prompt, but no trap, mutant or solution, and
described each bug before it was graded. `named_by` lists the traps whose sentence names the bug.
"""

import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from trapline.arena.certify.diagnosis import DiagnosisCertifier
from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.traps import Case
from trapline.arena.process.local import LocalSubmission

ROOT = Path(__file__).with_name("corpus")
SEED = 11


@dataclass(frozen=True)
class Answer:
    challenge: str
    name: str
    files: dict[str, str]
    description: str = ""
    #: Traps that name its bug; empty for a right answer.
    named_by: tuple[str, ...] = ()


def challenges():
    return sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def right(challenge):
    folders = sorted((ROOT / challenge / "right").iterdir())
    return [Answer(challenge, folder.name, _files(folder)) for folder in folders]


def buggy(challenge, file="bugs.toml"):
    bugs = tomllib.loads((ROOT / challenge / file).read_text())["bug"]
    return [_buggy(challenge, bug) for bug in bugs]


def _buggy(challenge, bug):
    files = _files(ROOT / challenge / "right" / bug["base"])
    for edit in bug.get("edit", [bug]):
        path = edit.get("file", "solution.py")
        assert files[path].count(edit["old"]) == 1, bug["name"]
        files[path] = files[path].replace(edit["old"], edit["new"])
    return Answer(challenge, bug["name"], files, bug["description"], tuple(bug["named_by"]))


def _files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def diagnose(answers):
    """Yields each answer with its findings; all answers are to the same challenge.

    As in a grade, controls are asked of the answer. Unlike in a grade, slow checks are left out
    unless they name its bug, since each takes seconds: what fails in them alone is not caught here,
    and what else fails in them cannot change the findings.
    """
    challenge = load(answers[0].challenge)
    with DiagnosisCertifier(challenge, SEED) as certifier:
        host = certifier.host(SEED)
        for answer in answers:
            failures = list(certifier.failures(host, answer.files, answer.named_by))
            asked = partial(_control_passes, challenge, answer), partial(_fails, challenge, answer)
            yield answer, Diagnoser(challenge, host, failures, *asked).diagnose().findings


def _control_passes(challenge, answer, trap):
    return _passes(challenge, answer, Case(trap.id, trap.control))


def _fails(challenge, answer, trap):
    return not _passes(challenge, answer, trap)


def _passes(challenge, answer, check):
    config = challenge.sandbox_config("process", challenge.plan.limits.mutant_seconds)
    with TemporaryDirectory() as folder:
        place = Path(folder, "answer")
        with LocalSubmission(place, config, files=answer.files) as submission:
            return run_check(check, submission, SEED).state == "pass"
