"""Traps of the split, whose messages once depended on which documents an answer holds out."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.comparison import without_numbers
from trapline.arena.process.local import LocalSubmission
from trapline.arena.runs.field import EXAMPLE_FIELD
from trapline.challenges.ternary_training.traps_split import split_by_company, split_by_place

NAME = "ternary_training"


@pytest.mark.parametrize("trap", [split_by_company, split_by_place], ids=lambda trap: trap.id)
def test_reason_is_that_of_the_mutant_with_every_seed(tmp_path, trap):
    """Diagnosis compares the reasons: what is held out is free."""
    challenge = load(NAME)
    for name, text in trap.plant(challenge.solution_files()).items():
        (tmp_path / name).write_text(text)
    reasons = {
        without_numbers(run_check(trap, submission, seed).message)
        for folder in (tmp_path, EXAMPLE_FIELD / "hasty" / NAME)
        for submission in [LocalSubmission(folder, challenge.sandbox_config("process"))]
        for seed in (101, 202, 303)
    }
    assert len(reasons) == 1
