"""Asks the inspector about a submission, and computes the `code` dimension from the answer."""

from functools import cache
from pathlib import Path
from typing import Any

from trapline.arena.errors import SubmissionDied
from trapline.arena.process.sandbox import SandboxLimits, scratch_folder
from trapline.arena.process.session import SandboxConfig, Session
from trapline.arena.record import Dimension, Level, Record

SECONDS = 90.0
#: Rules that point at mistakes and needless complexity, not at taste.
RULES = ["F", "E7", "E9", "B", "C90", "PLE", "PLR0912", "PLR0913", "PLR0915", "RET", "SIM", "UP"]
RUFF = "\n".join(
    (
        f"lint.select = {RULES!r}",
        "lint.mccabe.max-complexity = 10",
        "lint.pylint.max-args = 8",
        'target-version = "py311"',
    )
)
LONG_FUNCTION = 60
#: Places named in the reason where code is made from data.
MOST_NAMED = 5
_UNREADABLE = "could not be read: "


#: A submission of ours that every sandbox must be able to inspect and to test.
CONTROL = {
    "solution.py": 'def double(x: int) -> int:\n    """Twice x."""\n    return 2 * x\n',
    "test_solution.py": "from solution import double\n\n\n"
    "def test_double():\n    assert double(2) == 4\n",
}


class Inspection(Record):
    """Figures about the code and texts to try the own tests on; why either is missing."""

    unreadable: str = ""
    #: Why this machine cannot inspect any code.
    not_measured: str = ""
    code: dict[str, Any] = {}
    #: Name → the files that differ, each with its other text.
    rewrites: dict[str, dict[str, str]] = {}
    mutants: dict[str, dict[str, str]] = {}


def inspect(folder: Path, level: Level, seed: int, mutants: int) -> Inspection:
    """Reads the submission inside a sandbox of its own. What cannot be read is its fault only if
    the sandbox can read a submission of ours."""
    inspection = _inspect(folder, level, seed, mutants)
    if inspection.unreadable and (reason := why_no_inspection(level)):
        return Inspection(not_measured=reason)
    return inspection


@cache
def why_no_inspection(level: Level) -> str:
    """Why code cannot be inspected at this level on this machine; empty where it can."""
    with scratch_folder() as name:
        write_control(Path(name))
        reason = _inspect(Path(name), level, seed=0, mutants=0).unreadable
    where = f"at isolation {level!r} on this machine"
    return f"code cannot be inspected {where}: {reason}" if reason else ""


def write_control(folder: Path) -> None:
    for name, text in CONTROL.items():
        (folder / name).write_text(text, encoding="utf-8")


def _inspect(folder: Path, level: Level, seed: int, mutants: int) -> Inspection:
    config = SandboxConfig(level, SandboxLimits(memory_mb=1024, processes=64), SECONDS, ("ruff",))
    session = Session(folder, config, "inspector")
    question = {"op": "inspect", "config": RUFF, "seed": seed, "mutants": mutants}
    try:
        answer, _ = session.ask(question, (), SECONDS)
    except SubmissionDied as died:
        return Inspection(unreadable=str(died))
    finally:
        session.close()
    return Inspection(
        unreadable=answer.get("unreadable", ""),
        code=answer.get("code", {}),
        **answer.get("variants", {}),
    )


def forbidden_uses(inspection: Inspection, forbidden: list[str]) -> list[str]:
    """The finished things that the code calls although the prompt forbids it."""
    used = [*inspection.code.get("imports", []), *inspection.code.get("names", [])]
    return sorted({name for name in used for ban in forbidden if f"{name}.".startswith(f"{ban}.")})


def says_unreadable(code: Dimension | None) -> bool:
    """Whether this `code` dimension belongs to a submission that could not be read."""
    return code is not None and code.reason.startswith(_UNREADABLE)


def code_dimension(inspection: Inspection) -> Dimension:
    """100 minus what a reviewer would ask to have changed."""
    if inspection.not_measured:
        return Dimension(score=None, reason=inspection.not_measured)
    if inspection.unreadable:
        return Dimension(score=0.0, reason=f"{_UNREADABLE}{inspection.unreadable}")
    code = inspection.code
    hundreds = max(1.0, code["lines"] / 100)
    functions = max(1, code["functions"])
    deductions = {
        "ruff findings": min(40.0, 4.0 * sum(code["ruff"].values()) / hundreds),
        "missing type hints": 15.0 * (1 - code["hinted"] / functions),
        "missing docstrings": 15.0 * (1 - code["documented"] / functions),
        "functions longer than 60 lines": 10.0 * (code["longest_function"] > LONG_FUNCTION),
        "unused functions": min(10.0, 5.0 * len(code["unused"])),
        "duplicated lines": min(10.0, 2.0 * code["duplicated_lines"] / hundreds),
    }
    hidden = code["code_from_data"]
    if hidden:
        # The figures describe what was read, and that is not what runs.
        deductions["code from data"] = 100.0
    worst = [name for name, value in sorted(deductions.items(), key=lambda d: -d[1]) if value >= 1]
    reason = f"deductions: {', '.join(worst)}" if worst else "nothing to ask for"
    if hidden:
        more = f" and {len(hidden) - MOST_NAMED} more" if len(hidden) > MOST_NAMED else ""
        reason += f"; runs code that cannot be read: {', '.join(hidden[:MOST_NAMED])}{more}"
    facts = {key: value for key, value in code.items() if key not in ("names", "imports")}
    evidence = {"deductions": {k: round(v, 1) for k, v in deductions.items()}, **facts}
    score = max(0.0, 100.0 - sum(deductions.values()))
    return Dimension(score=round(score, 1), reason=reason, evidence=evidence)
