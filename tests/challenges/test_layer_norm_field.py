"""Each example entrant of layer_norm_backward is caught by the traps of its bugs alone."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_check, run_checks
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.proxy import Submission
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries
from trapline.arena.runs.run import choose_level
from trapline.challenges.layer_norm_backward.traps_check import (
    check_propagates_ones,
    check_with_ones,
)

NAME = "layer_norm_backward"
SEED = 20260
FOLDERS = {entry.entrant: entry.folder for entry in find_entries(EXAMPLE_FIELD, [NAME])}

TRAPS = {
    "gold": set(),
    "textbook": set(),
    "bloated-cache": {"bloated-cache"},
    "naive-variance": {"huge-constant-rows", "mean-1e8"},
    "wrong-derivation": {
        "another-gamma-in-dx",
        "beta-for-gamma",
        "dy-divided-by-gamma",
        "gamma-after-the-means",
        "gamma-missing-in-dx",
        "gamma-twice-in-dx",
    },
    "confident": {
        "check-of-a-few-elements",
        "dy-broadcast",
        "dy-modified",
        "huge-float32",
        "infinite-eps-accepted",
        "nan-eps-accepted",
        "only-negative-eps-refused",
        "only-the-sign-of-eps-checked",
        "rows-summed-in-float32",
        "variance-cached-in-float32",
        "zero-eps-accepted",
    },
    "hasty": {
        "beta-broadcast",
        "beta-of-rank-2",
        "cache-aliases-an-input",
        "check-needs-every-element",
        "complex-accepted",
        "dtypes-unchecked",
        "dy-broadcast",
        "dy-shape-unchecked",
        "eps-unchecked",
        "gamma-broadcast",
        "gamma-of-rank-2",
        "huge-float32",
        "infinite-eps-accepted",
        "integer-dy-accepted",
        "integers-accepted",
        "length-one-accepted",
        "nan-eps-accepted",
        "negative-eps-accepted",
        "only-negative-eps-refused",
        "only-the-sign-of-eps-checked",
        "parameter-shapes-unchecked",
        "rank-4-accepted",
        "rank-ignored",
        "rows-summed-in-float32",
        "variance-cached-in-float32",
        "zero-eps-accepted",
    },
}


def failed(entrant, checks):
    challenge = load(NAME)
    with Submission(FOLDERS[entrant], challenge.sandbox_config(choose_level())) as submission:
        results = run_checks(checks, submission, SEED)
    return {result.id for result in results if result.state != "pass"}


@pytest.mark.parametrize("entrant", TRAPS)
def test_entrant_is_caught_by_the_traps_of_its_bug(entrant):
    assert failed(entrant, load(NAME).traps) == TRAPS[entrant]


def test_broken_entrant_fails_most_cases_and_traps():
    challenge = load(NAME)
    assert len(failed("broken", challenge.cases)) > len(challenge.cases) / 2
    assert len(failed("broken", challenge.traps)) > len(challenge.traps) / 2


@pytest.mark.parametrize("trap", [check_propagates_ones, check_with_ones], ids=lambda trap: trap.id)
def test_directions_that_cancel_where_they_can_are_no_bug(tmp_path, trap):
    """Six random signs may sum to 0, in one of a thousand checks in all six directions."""
    challenge = load(NAME)
    source = (challenge.solution / "solution.py").read_text()
    signs = "rng.choice([-1.0, 1.0], value.shape)"
    assert source.count(signs) == 1
    alternating = "np.resize([-1.0, 1.0], value.shape)"
    (tmp_path / "solution.py").write_text(source.replace(signs, alternating))
    submission = LocalSubmission(tmp_path, challenge.sandbox_config("process"))
    assert run_check(trap, submission, SEED).state == "pass"


def test_every_entrant_of_this_challenge_is_covered():
    assert FOLDERS.keys() == {*TRAPS, "broken"}
