"""How causes are written down: what a finding lowers, which one leads, what hides a trap."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.failures import Failure
from trapline.arena.judge.findings import Report
from trapline.arena.judge.patterns import Patterns
from trapline.arena.process.transcript import Transcript

NAME = "layer_norm_backward"
REFUSAL_CASE, REFUSAL_TRAPS = "bad-input-is-refused", ("gamma-broadcast", "zero-eps-accepted")
CASE, TRAPS = "forward-matches-float64", ("gamma-missing-in-dx", "rstd-squared")


def written(failing, causes=None, confirmed=(), unexplained=None, not_offered=()):
    failures = {
        check: Failure(check, "off", Transcript(), not_offered="f" if check in not_offered else "")
        for check in failing
    }
    patterns = Patterns(load(NAME), failures, failures)
    left = failures.keys() - set(not_offered) if unexplained is None else unexplained
    causes = {cause: {cause} for cause in causes or ()}
    report = Report(patterns, failures, causes, set(confirmed))
    return report.write(left - {check for own in causes.values() for check in own})


@pytest.mark.parametrize("way", ["wrong", "not offered"])
@pytest.mark.parametrize(
    ("others", "dimension", "severity"),
    [((), "robustness", "minor"), ((CASE,), "traps", "major")],
)
def test_bug_without_a_name_lowers_robustness_if_only_bad_input_shows_it(
    others, dimension, severity, way
):
    failing = [REFUSAL_CASE, *REFUSAL_TRAPS, *others]
    (finding,) = written(failing, not_offered=failing if way == "not offered" else ()).findings
    assert (finding.cause, len(finding.explains)) == ("unnamed", len(failing))
    assert (finding.dimension, finding.severity) == (dimension, severity)


@pytest.mark.parametrize(
    ("failing", "named", "confirmed", "not_offered", "order"),
    [
        # The most certain leads, also where it is only accepted bad input.
        (
            [*REFUSAL_TRAPS, CASE],
            REFUSAL_TRAPS[:1],
            REFUSAL_TRAPS,
            (),
            ["gamma-broadcast", "unnamed"],
        ),
        # Of equally certain ones accepted bad input comes last.
        (
            [REFUSAL_TRAPS[0], TRAPS[0]],
            [REFUSAL_TRAPS[0], TRAPS[0]],
            [REFUSAL_TRAPS[0], TRAPS[0]],
            (),
            ["gamma-missing-in-dx", "gamma-broadcast"],
        ),
        (
            [REFUSAL_TRAPS[0], TRAPS[0]],
            [REFUSAL_TRAPS[0], TRAPS[0]],
            (),
            (),
            ["gamma-missing-in-dx", "gamma-broadcast"],
        ),
        # Alone it leads.
        (REFUSAL_TRAPS, REFUSAL_TRAPS, REFUSAL_TRAPS, (), ["gamma-broadcast", "zero-eps-accepted"]),
        # What is not offered is certain, so it stands before what is likely, after a confirmed bug.
        (
            [*TRAPS, CASE],
            TRAPS,
            TRAPS[:1],
            (CASE,),
            ["gamma-missing-in-dx", "unnamed", "rstd-squared"],
        ),
    ],
)
def test_the_most_certain_comes_first_and_of_these_bad_input_last(
    failing, named, confirmed, not_offered, order
):
    found = written(failing, named, confirmed, not_offered=not_offered).findings
    assert [finding.cause for finding in found] == order


def test_trap_is_hidden_only_behind_what_explains_it():
    failing = ["rstd-missing", *TRAPS, CASE]
    found = written(failing, [TRAPS[0]], TRAPS, unexplained={"rstd-missing", CASE})
    assert [finding.cause for finding in found.findings] == ["gamma-missing-in-dx", "unnamed"]
    assert found.states == {
        "rstd-missing": "hidden",
        "gamma-missing-in-dx": "sprung",
        "rstd-squared": "hidden",
    }
    # An echo: so little is left that no finding claims it.
    assert found.behind == {
        "rstd-missing": "unnamed",
        "gamma-missing-in-dx": "",
        "rstd-squared": "",
    }
