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
