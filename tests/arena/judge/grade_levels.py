"""Grades the gold answer and a wrong one of the sorting challenge at isolation levels; prints JSON.

`grade_levels.py FOLDER LEVEL …`; FOLDER receives the wrong answer.
"""

import json
import sys
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest

ARENA_TESTS = Path(__file__).resolve().parents[1]


def summary(cell):
    """What must not depend on the level: everything but times."""
    exact = ("correctness", "traps", "precision", "tests", "code")
    return {
        "state": cell.state,
        "reason": cell.reason,
        "checks": {check.id: check.state for check in [*cell.cases, *cell.traps]},
        "measured": {name: one.score is not None for name, one in cell.dimensions.items()},
        "scores": {name: cell.dimensions[name].score for name in exact},
        "why": {name: cell.dimensions[name].reason for name in exact},
        "killed": cell.dimensions["tests"].evidence.get("killed"),
    }


def answers(challenge, folder):
    """The gold answer, and one with wrong values that its own tests notice."""
    yield "gold", challenge.solution
    folder.mkdir(parents=True)
    suite = (challenge.solution / "test_solution.py").read_text()
    (folder / "test_solution.py").write_text(suite)
    gold = (challenge.solution / "solution.py").read_text()
    wrong = gold.replace("return np.take_along_axis(", "return -np.take_along_axis(")
    (folder / "solution.py").write_text(wrong)
    yield "wrong", folder


def main(folder, *levels):
    sys.path.insert(0, str(ARENA_TESTS))
    challenge = Challenge(ARENA_TESTS / "sorting", "sorting")
    subjects = list(answers(challenge, Path(folder) / "wrong"))
    found = {}
    for level in levels:
        for name, place in subjects:
            request = GradeRequest(name, "sorting", 1, place, level=level, seed=7)
            found.setdefault(level, {})[name] = summary(grade(request, challenge).cell)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
