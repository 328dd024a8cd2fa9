"""Findings of single bugs in answers of other styles: one cause, the right one."""

import numpy as np
import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.failures import failure_of
from trapline.arena.judge.grade import grade
from trapline.arena.judge.mutants import GOLD, MutantHost
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.arena.record import CheckResult

LAYER_NORM = """
import numpy as np

def layer_norm_forward(x, gamma, beta, eps=1e-5):
    if x.ndim != 3 or not 0 < eps < np.inf or x.dtype not in (np.float32, np.float64):
        raise ValueError("x")
    if gamma.shape != x.shape[-1:] or beta.shape != gamma.shape:
        raise ValueError("gamma")
    if gamma.dtype != x.dtype or beta.dtype != x.dtype:
        raise TypeError("dtype")
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    rstd = {rstd}
    xhat = centred * rstd
    y = gamma * xhat + beta
    cache = {{"xhat": xhat, "rstd": rstd, "gamma": gamma.copy(), "dtype": str(x.dtype)}}
    return y.astype(x.dtype), cache

def layer_norm_backward(dy, cache):
    xhat, rstd, gamma = cache["xhat"], cache["rstd"], cache["gamma"]
    if dy.shape != xhat.shape:
        raise ValueError("dy")
    if str(dy.dtype) != cache["dtype"]:
        raise TypeError("dtype")
    wide = dy.astype(np.float64)
    g = wide * gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    answers = dx, (wide * xhat).sum((0, 1)), wide.sum((0, 1))
    return tuple(a.astype(dy.dtype) for a in answers)
"""


def test_two_bugs_that_look_alike_are_told_apart():
    """The mutants of two traps give different answers, and only the equal one is confirmed."""
    challenge = load("layer_norm_backward")
    with MutantHost(challenge, 3) as host:
        failures = []
        for check in challenge.fault_dictionary["unbiased-variance"]:
            run = host.run("unbiased-variance", check)
            if run.failed:
                result = CheckResult(id=check, state="fail", message=run.message)
                failures.append(failure_of(result, run.transcript))
        found = Diagnoser(challenge, host, failures).diagnose()
    assert [finding.cause for finding in found.findings] == ["unbiased-variance"]
    assert found.findings[0].certainty == "confirmed"
    assert found.states["unbiased-variance"] == "sprung"


def test_bug_in_another_form_has_the_same_name():
    challenge = load("ternary_training")
    trap = "documents-sorted-by-train"
    with MutantHost(challenge, 3) as host:
        run = host.run(f"{trap}#2", trap)
        failure = failure_of(
            CheckResult(id=trap, state="fail", message=run.message), run.transcript
        )
        found = Diagnoser(challenge, host, [failure]).diagnose()
    (finding,) = found.findings
    assert (finding.cause, finding.certainty) == (trap, "confirmed")
    assert found.states == {trap: "sprung"}


def test_gold_answers_are_right():
    challenge = load("layer_norm_backward")
    with MutantHost(challenge, 3) as host:
        assert not host.run(GOLD, challenge.cases[0].id).failed


def test_crash_is_not_an_accusation():
    """An exception that no mutant raises is reported by its place, not under a trap's name."""
    challenge = load("layer_norm_backward")
    trap = "mean-1e8"  # alone in its pattern, so that only the crash speaks against it
    exchange = Exchange(
        "layer_norm_forward",
        (np.zeros((1, 1, 4)),),
        {},
        raised="IndexError",
        message="index 3 is out of bounds",
        where="solution.py:7 in f",
    )
    message = "raised IndexError: index 3 is out of bounds"
    result = CheckResult(id=trap, state="fail", message=message)
    with MutantHost(challenge, 3) as host:
        found = Diagnoser(challenge, host, [failure_of(result, Transcript([exchange]))]).diagnose()
    assert [finding.cause for finding in found.findings] == ["unnamed"]
    assert "IndexError at solution.py:7 in f" in found.findings[0].sentence
    assert found.states[trap] == "crashed"


def test_what_is_not_offered_is_not_asked():
    challenge = load("layer_norm_backward")
    trap = challenge.traps[0].id
    exchange = Exchange("layer_norm_forward", (), {}, raised="NotImplementedError")
    result = CheckResult(id=trap, state="fail", message="raised NotImplementedError")
    failure = failure_of(result, Transcript([exchange]), "layer_norm_forward as asked for here")
    with MutantHost(challenge, 3) as host:
        found = Diagnoser(challenge, host, [failure]).diagnose()
    assert found.states[trap] == "not_asked"
    assert "not offered" in found.findings[0].sentence


@pytest.mark.parametrize(
    ("rstd", "cause"),
    [
        ("1 / np.sqrt(wide.var(-1, keepdims=True, ddof=1) + eps)", "unbiased-variance"),
        ("1 / (wide.std(-1, keepdims=True) + eps)", "eps-outside-the-root"),
    ],
)
def test_graded_cell_leads_with_the_bug(tmp_path, rstd, cause):
    tmp_path.joinpath("solution.py").write_text(LAYER_NORM.format(rstd=rstd))
    challenge = load("layer_norm_backward")
    request = GradeRequest("a", challenge.id, 1, tmp_path, seed=5)
    cell = grade(request, challenge).cell
    assert cell.reason.startswith("missing entry points")
    tmp_path.joinpath("solution.py").write_text(
        LAYER_NORM.format(rstd=rstd)
        + "\n\ndef gradient_check(*args, **kwargs):\n    raise NotImplementedError\n"
    )
    cell = grade(request, challenge).cell
    assert cell.findings[0].cause == cause, cell.findings
    assert cell.findings[0].certainty == "confirmed"
    assert {t.state for t in cell.traps} <= {"pass", "sprung", "hidden", "not_asked"}


def test_many_places_that_raise_are_at_most_two_findings():
    challenge = load("layer_norm_backward")
    failures = []
    for number, trap in enumerate(challenge.traps[:5]):
        exchange = Exchange(
            "layer_norm_forward", (), {}, raised="KeyError", where=f"solution.py:{number} in f"
        )
        result = CheckResult(id=trap.id, state="fail", message="raised KeyError")
        failures.append(failure_of(result, Transcript([exchange])))
    with MutantHost(challenge, 3) as host:
        found = Diagnoser(challenge, host, failures).diagnose()
    assert [finding.cause for finding in found.findings] == ["unnamed", "unnamed"]
    assert sum(len(finding.explains) for finding in found.findings) == 5


def test_crash_without_a_place_joins_the_one_whose_place_is_known():
    challenge = load("layer_norm_backward")
    failures = []
    for trap, place in zip(challenge.traps[:3], ("solution.py:9 in f", "", ""), strict=True):
        exchange = Exchange("layer_norm_forward", (), {}, raised="KeyError", where=place)
        result = CheckResult(id=trap.id, state="fail", message="raised KeyError")
        failures.append(failure_of(result, Transcript([exchange])))
    with MutantHost(challenge, 1) as host:
        found = Diagnoser(challenge, host, failures).diagnose().findings
    assert [(f.cause, f.where, len(f.explains)) for f in found] == [
        ("unnamed", "solution.py:9 in f", 3)
    ]
